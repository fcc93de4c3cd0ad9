"""Every event in every state of a request: the engine lives, nothing stays, what follows is right.

A state is reached on purpose, with the disk's calls or the workers' answers held back, and proven:
a test whose request is not in its state fails. Then something happens to it. At the end all pins
are gone, nothing is filling or waits, and the same prompt is answered with the right bytes: those
of the weights from after a reset, never older ones.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from between import Go, between
from managers import disk
from rig import Job, Rig, running
from shapes import TOKENS_PER_BLOCK, prompt
from vllm.v1.request import RequestStatus

from tests.engines.vllm.lab.failing import FailingCopies
from undercroft.engines.vllm import UndercroftConnector
from undercroft.engines.vllm import manager as manager_module
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

TOKENS = 320
CHUNKS = TOKENS // TOKENS_PER_BLOCK
OLD, NEW = prompt(1, TOKENS), prompt(2, TOKENS)
NUM_BLOCKS = 60


class Gate:
    """Holds chunks on their way to or from the disk tier back until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.is_open = self._open.is_set
        self.close, self.open = self._open.clear, self._open.set

    def pass_through(self, go: Go) -> bool:
        assert self._open.wait(60)
        return go()


@dataclass
class Scene:
    """An engine whose disk holds `OLD`, and the request of interest."""

    rig: Rig
    reads: Gate
    writes: Gate
    jobs: list[Job] = field(default_factory=list)
    copies: FailingCopies | None = None

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    @property
    def hierarchy(self) -> Any:
        return self.rig.hierarchy

    def submit(self, tokens: Any, **more: Any) -> Job:
        self.jobs.append(self.rig.submit([*tokens, len(self.jobs)], **more))
        return self.jobs[-1]

    def step_until(self, reached: Callable[[], bool], most: int = 400) -> None:
        for _ in range(most):
            if reached():
                return
            self.rig.step()
        raise AssertionError("the state was not reached")

    def moving(self, op: Op) -> int:
        (level,) = self.hierarchy.levels
        return sum(move.op is op for move in level.transfers._moves.values())

    def let_go(self) -> None:
        self.reads.open()
        self.writes.open()
        self.rig.hold_acks = False
        if self.copies is not None:
            self.copies.stop()


# --- states: how to get there, and how to know ------------------------------------------------


def queued(scene: Scene) -> Callable[[], bool]:
    """Behind another that has all the engine's blocks; with our connector, read ahead."""
    scene.reads.close()
    scene.submit(prompt(9, 700), num_decode=20)
    scene.step_until(lambda: scene.job in scene.rig.running)
    job = scene.submit(OLD)
    ahead = isinstance(scene.rig.on_scheduler, UndercroftConnector)
    scene.rig.step()
    scene.rig.step()
    return lambda: (
        job in scene.rig.waiting and job.num_asked == 0 and bool(scene.moving(Op.READ)) == ahead
    )


def looking_up(scene: Scene) -> Callable[[], bool]:
    """Deferred: what it found below has no room yet, because another restore holds it."""
    scene.reads.close()
    scene.submit(prompt(3, TOKENS))
    scene.rig.step()
    job = scene.submit(OLD)
    scene.rig.step()
    restores = scene.hierarchy.restores
    wanted = {bytes(each) + bytes(4) for each in job.request.block_hashes}
    return lambda: (
        job.num_asked > 0
        and job.num_hit_tokens is None
        and restores.find(job.request.request_id) is not None
        and not wanted & restores._by_key.keys()
    )


def promoting(scene: Scene) -> Callable[[], bool]:
    """Its chunks are being read."""
    scene.reads.close()
    job = scene.submit(OLD)
    scene.step_until(lambda: scene.hierarchy.levels[0].transfers.num_running > 0)
    return lambda: (
        job.num_hit_tokens is None
        and scene.moving(Op.READ) == CHUNKS
        and len(scene.hierarchy.restores) == CHUNKS
    )


def loading(scene: Scene) -> Callable[[], bool]:
    """The workers copy what it hit."""
    scene.rig.hold_acks = True
    job = scene.submit(OLD)
    scene.step_until(lambda: job.loading)
    loads = scene.hierarchy.loads
    return lambda: job.loading and job.request.request_id in loads.requests and len(loads) == CHUNKS


def reloading(scene: Scene) -> Callable[[], bool]:
    """A load of it has failed; it is to be looked up again."""
    scene.copies = FailingCopies(scene.rig.on_worker.connector_worker.worker)
    scene.copies.next_chunk = CHUNKS // 2
    job = scene.submit(OLD)
    scene.step_until(lambda: job.num_failed == 1)
    return lambda: job.num_failed == 1 and not job.loading and job in scene.rig.waiting


def storing(scene: Scene) -> Callable[[], bool]:
    """It runs, and the workers copy what it computes."""
    scene.rig.hold_acks = True
    job = scene.submit(NEW, num_decode=400)
    scene.step_until(lambda: len(scene.hierarchy.stores) >= CHUNKS)
    return lambda: job in scene.rig.running and len(scene.hierarchy.stores) >= CHUNKS


def finished_storing(scene: Scene) -> Callable[[], bool]:
    """It has ended, and the workers still copy."""
    scene.rig.hold_acks = True
    job = scene.submit(NEW)
    scene.step_until(job.request.is_finished)
    return lambda: job.request.is_finished() and len(scene.hierarchy.stores) >= CHUNKS


def cascading(scene: Scene) -> Callable[[], bool]:
    """It runs, and its chunks are being written to the disk."""
    scene.writes.close()
    job = scene.submit(NEW, num_decode=400)
    scene.step_until(lambda: scene.hierarchy.levels[0].transfers.num_running > 0)
    scene.step_until(lambda: scene.moving(Op.WRITE) >= CHUNKS)
    return lambda: job in scene.rig.running and scene.hierarchy.cascade.num_pinned >= CHUNKS


def preempted(scene: Scene) -> Callable[[], bool]:
    """It ran, lost its blocks with stores under way, and waits to start again."""
    storing(scene)
    job = scene.job
    scene.rig.preempt(job)
    return lambda: (
        job in scene.rig.waiting
        and job.request.status == RequestStatus.PREEMPTED
        and len(scene.hierarchy.stores) >= CHUNKS
    )


def resumed(scene: Scene) -> Callable[[], bool]:
    """Preempted, and what it had stored is being loaded again."""
    job = scene.submit(NEW, num_decode=400)
    scene.step_until(lambda: scene.hierarchy.counters.stored_chunks >= CHUNKS)
    scene.rig.preempt(job)
    scene.rig.hold_acks = True
    scene.step_until(lambda: job.loading)
    return lambda: job.loading and job.resumed and len(scene.hierarchy.loads) >= CHUNKS


STATES = (
    queued, looking_up, promoting, loading, reloading, storing, finished_storing, cascading,
    preempted, resumed,
)  # fmt: skip

# --- events -----------------------------------------------------------------------------------


def abort(scene: Scene) -> None:
    """The client goes away between two steps."""
    scene.rig.abort(scene.job)


def abort_in_a_step(scene: Scene) -> None:
    """The client goes away while the workers run a step."""
    scene.rig.during = lambda: None if scene.job.request.is_finished() else abort(scene)
    scene.rig.step()


def preempt(scene: Scene) -> None:
    """The engine takes its blocks away."""
    scene.rig.preempt(scene.job)


def new_weights(scene: Scene) -> None:
    """From now on the same tokens mean other bytes, for all that is computed from the start."""
    rig = scene.rig
    rig.version += 1
    for job in scene.jobs:
        if job in rig.waiting and not job.loading and not any(job.blocks):
            job.version = rig.version


def reset(scene: Scene) -> None:
    """`reset_prefix_cache(reset_connector=True)` under running requests, which go on."""
    assert scene.rig.on_scheduler.reset_cache()
    new_weights(scene)


def resets(scene: Scene) -> None:
    """The same, many times; with our connector also without a step in between.

    Stock's asserts that there was one, if workers' jobs were under way.
    """
    for _ in range(3):
        reset(scene)
        if isinstance(scene.rig.on_scheduler, UndercroftConnector):
            reset(scene)
        scene.rig.step()


def sleep(scene: Scene) -> None:
    """A sleep, or a pause: requests are aborted, all is dropped, weights are replaced."""
    for job in scene.jobs:
        if not job.request.is_finished():
            scene.rig.abort(job)
    reset(scene)


def pause_and_keep(scene: Scene) -> None:
    """A pause that keeps requests: those that run are preempted, all is dropped."""
    for job in list(scene.rig.running):
        scene.rig.preempt(job)
    reset(scene)


def sleep_that_keeps(scene: Scene) -> None:
    """The user says that weights stay: requests are aborted, and nothing is dropped."""
    scene.rig.manager._keeps_across_sleep = True
    for job in scene.jobs:
        if not job.request.is_finished():
            scene.rig.abort(job)
    ready = sum(state >= SlotState.READY for state in scene.hierarchy.pool.slots.states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager_module, "is_pause", lambda: True)
        assert scene.rig.on_scheduler.reset_cache()
    after = sum(state >= SlotState.READY for state in scene.hierarchy.pool.slots.states)
    assert after >= ready


def reset_by_another(scene: Scene) -> None:
    """Another engine on the directory resets what they share."""
    tier = scene.hierarchy.levels[0].tier
    with running(
        scene.rig.extra, num_blocks=20, engine_id="another", connector=UndercroftConnector
    ) as another:
        assert another.hierarchy.levels[0].tier.namespace == tier.inner.namespace
        another.on_scheduler.reset_cache()
    time.sleep(0.03)  # what is seen of it may be 20 ms old
    new_weights(scene)


def shutdown(scene: Scene) -> None:
    """The engine is told to end."""
    scene.rig.close()


EVENTS = (
    abort, abort_in_a_step, preempt, reset, resets, sleep, pause_and_keep, sleep_that_keeps,
    reset_by_another, shutdown,
)  # fmt: skip
RESETS = {reset, resets, sleep, pause_and_keep, reset_by_another}

# --- the matrix -------------------------------------------------------------------------------

RUNNING = {storing, cascading}
ONLY_OURS = {queued, promoting, reloading, finished_storing, resumed}
"""Stock's connector ends the engine in one of them, and has nothing of its own in the others."""
CONNECTORS = {"ours": UndercroftConnector, "stock's": None}


def can_be(state: Any, event: Any, connector: str) -> bool:
    """What vLLM cannot do is left out, by name."""
    if connector != "ours" and state in ONLY_OURS:
        return False
    if event in {abort, abort_in_a_step} and state is finished_storing:
        return False  # it has ended
    if event is preempt:
        return state in RUNNING
    # vLLM refuses to reset under running requests while blocks wait for a load.
    return not (event is pause_and_keep and state in {loading, resumed})


CASES = [
    pytest.param(state, event, connector, id=f"{state.__name__}-{event.__name__}-{connector}")
    for state in STATES
    for event in EVENTS
    for connector in CONNECTORS
    if can_be(state, event, connector)
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk that holds `OLD`, and another prompt of that length."""
    path = tmp_path_factory.mktemp("stored")
    with running({"host": "4MiB", **disk(path)}, engine_id="primer") as rig:
        for tokens in (OLD, prompt(3, TOKENS)):
            rig.run(tokens)
        rig.settle()
    return path


def census(rig: Rig) -> dict[str, int]:
    """What must be 0 when all has ended."""
    hierarchy = rig.hierarchy
    states = list(map(int, hierarchy.pool.slots.states))
    return {
        "pins": hierarchy.pool.slots.num_pinned,
        "filling": states.count(SlotState.FILLING),
        "draining": states.count(SlotState.DRAINING),
        "fresh": states.count(SlotState.FRESH),
        "requests": len(rig.manager._requests),
        "holders": len(hierarchy.holds.requests),
        "loads": len(hierarchy.loads),
        "stores": len(hierarchy.stores),
        "restores": len(hierarchy.restores),
        "waiting": hierarchy.restores.num_waiting,
        "cascade": len(hierarchy.cascade),
        "quarantined": len(hierarchy._draining_until),
        "engine blocks": NUM_BLOCKS - 1 - len(rig.free),
        "off": int(rig.manager.is_off),
    }


def is_by_process(state: Any, event: Any, connector: str) -> bool:
    """Half of the cases, by the luck of their names: batches, and a process that moves them."""
    return bool(crc32(f"{state.__name__} {event.__name__} {connector}".encode()) % 2)


@pytest.mark.parametrize(("state", "event", "connector"), CASES)
def test_any_event_in_any_state(
    state: Any, event: Any, connector: str, stored: Path, tmp_path: Path
) -> None:
    """See the module."""
    shutil.copytree(stored, tmp_path / "kv")
    host = "200KiB" if state is looking_up else "4MiB"
    by_process = is_by_process(state, event, connector)
    tiers = disk(tmp_path / "kv", mover_process=by_process)
    extra = {"host": host, "offload_prompt_only": False, **tiers}
    if event is shutdown:
        extra["shutdown_deadline_s"] = 0.5
    more = {"connector": CONNECTORS[connector], "num_blocks": NUM_BLOCKS}
    gates = {"read_into": Gate(), "write_from": Gate()}

    def held_back(verb: str, _key: ChunkKey) -> Any:
        gate = gates.get(verb)
        return None if gate is None or gate.is_open() else gate.pass_through

    with ExitStack() as stack:
        with between(held_back) as opened:
            rig = stack.enter_context(running(extra, tokens_per_step=96, **more))
        rig.extra = extra
        assert opened[0].inner.await_mover(60) == by_process
        scene = Scene(rig, *gates.values())
        try:
            is_there = state(scene)
            assert is_there(), "the state was not reached"
            event(scene)
        finally:
            scene.let_go()
        if event is not shutdown:
            after(scene, event)
    if event is shutdown:
        assert_right_later(extra, more)


def after(scene: Scene, event: Any) -> None:
    """All ends, nothing is left, and the same prompts are answered right."""
    rig = scene.rig
    for job in scene.jobs:
        job.num_decoded = min(job.num_decoded, 3)
    assert rig.settle(2000) < 2000, f"deferred for ever: {census(rig)}"
    rig.step()
    rig.step()
    left = {name: number for name, number in census(rig).items() if number}
    assert not left
    assert all(job.request.is_finished() for job in scene.jobs)
    asked = rig.run([*OLD, 77]), rig.run([*NEW, 77])
    rig.settle()
    if event in {reset, resets, sleep, reset_by_another}:
        # What was computed since by requests that began anew may be there, of the new weights.
        new = {job.request.request_id for job in scene.jobs if job.version == rig.version}
        assert not asked[0].num_hit_tokens or new
    elif event not in RESETS:
        assert asked[0].num_hit_tokens == TOKENS
    again = rig.run([*OLD, 78]), rig.run([*NEW, 78])
    assert [job.num_hit_tokens for job in again] == [TOKENS, TOKENS]
    assert rig.num_loads_checked >= 2
    rig.settle()
    left = {name: number for name, number in census(rig).items() if number}
    assert not left


def assert_right_later(extra: dict[str, Any], more: dict[str, Any]) -> None:
    """The next engine finds what was stored, with the right bytes."""
    with running(extra, engine_id="later", **more) as rig:
        assert rig.run([*OLD, 77]).num_hit_tokens == TOKENS
        rig.run([*NEW, 77])
        assert rig.num_loads_checked >= 1
        rig.settle()
        assert not {name: number for name, number in census(rig).items() if number}


def test_the_matrix_is_whole() -> None:
    """Each state meets each event with our connector, but for what the engine cannot do."""
    ours = {case.values[:2] for case in CASES if case.values[2] == "ours"}
    absent = {(s.__name__, e.__name__) for s in STATES for e in EVENTS if (s, e) not in ours}
    not_running = {state.__name__ for state in STATES} - {"storing", "cascading"}
    assert absent == {
        ("finished_storing", "abort"),
        ("finished_storing", "abort_in_a_step"),
        ("loading", "pause_and_keep"),
        ("resumed", "pause_and_keep"),
        *((state, "preempt") for state in not_running),
    }
