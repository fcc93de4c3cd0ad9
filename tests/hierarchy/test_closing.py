"""What can go wrong while closing, and when the machine has no more threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world
from transfers_rig import FOREVER_S, MakeRig, made_rigs

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)
rig = pytest.fixture(made_rigs)

Refuse = Callable[[str], pytest.MonkeyPatch]


@pytest.fixture
def refuse() -> Iterator[Refuse]:
    """Starts no thread whose name ends so, until what it gives is undone."""
    patched = pytest.MonkeyPatch()
    start = threading.Thread.start

    def refuse_all(ending: str) -> pytest.MonkeyPatch:
        def refusing(thread: threading.Thread) -> None:
            if thread.name.endswith(ending):
                raise RuntimeError("can't start new thread")
            start(thread)

        patched.setattr(threading.Thread, "start", refusing)
        return patched

    yield refuse_all
    patched.undo()


def store(world: World, keys: list[ChunkKey]) -> None:
    """Into host memory; nothing is handed to the levels below yet."""
    hierarchy, request = world.hierarchy, Request(f"stores {len(keys)}")
    plan = hierarchy.prepare_store(keys, request)
    for key, slot in zip(plan.keys, plan.slots, strict=True):
        hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
    hierarchy.complete_store(set(keys), request)
    hierarchy.finish_request(request)


def test_a_broken_level_keeps_no_other_from_its_last_writes(worlds: list[World]) -> None:
    """More chunks wait than one step hands over; the level that works gets all of them."""
    broken = FaultyTier(
        MemoryTier(1 << 20, name="broken"), Injector(Effect.ERROR, on_verb("write_from"))
    )
    limits = TransferLimits(retry_pause_s=0.001, failures_to_open=1, first_pause_s=60.0)
    world = make_world(400, [broken, MemoryTier(4 << 20, name="sound")], transfer_limits=limits)
    worlds.append(world)
    world.engine.run(keys_of("a", 1))
    world.wait_for_tiers()
    world.engine.step()
    assert not world.hierarchy.levels[0].usable
    before = world.counters.cascaded_chunks["sound"]
    store(world, keys_of("b", 300))
    world.hierarchy.close()
    assert world.counters.cascaded_chunks["sound"] - before == 300


def test_closing_twice_does_not_touch_what_was_given_back_between(worlds: list[World]) -> None:
    """What could not be copied down in time is let go with the first close: the memory that it
    lies in belongs to somebody else, who takes it away then."""
    tier = FaultyTier(
        MemoryTier(1 << 20, name="below"), Injector(Effect.HANG, on_verb("write_from"))
    )
    world = make_world(
        16,
        [tier],
        num_threads=1,
        max_queued_write_bytes=CHUNK_BYTES,
        limits=Limits(shutdown_deadline_s=0.2),
    )
    worlds.append(world)
    store(world, keys_of("a", 1))
    world.hierarchy.end_step()
    tier.await_hung(1)
    store(world, keys_of("b", 4))
    world.hierarchy.end_step()
    assert world.hierarchy.cascade.num_waiting("below") >= 3
    world.hierarchy.close()
    world.hierarchy._buffer.release()
    world.hierarchy.close()


def test_what_fails_while_closing_keeps_nothing_else_open(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other levels are closed, and who is to be told last is told."""
    world = make_world(16, [MemoryTier(1 << 20, name="one"), MemoryTier(1 << 20, name="two")])
    worlds.append(world)
    one, two = world.hierarchy.levels
    told: list[str] = []
    world.hierarchy.on_close.append(lambda _deadline_s: told.append("last"))

    def fail(_deadline_s: float) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(one, "close", fail)
        with pytest.raises(RuntimeError, match="injected"):
            world.hierarchy.close()
    assert told == ["last"]
    assert two.tier._closed  # type: ignore[attr-defined] # a MemoryTier


class Unasked(MemoryTier):
    """Fails when it is asked anything once it is closed, and has something to follow."""

    def epoch(self) -> int:
        self._check_open()
        return super().epoch()

    def refresh(self) -> None:
        pass

    def take_adopted(self) -> list[tuple[ChunkKey, int]]:
        self._check_open()
        return []

    def take_lost(self) -> list[tuple[ChunkKey, str]]:
        self._check_open()
        return []


def test_a_closed_level_is_not_asked_and_promises_nothing(worlds: list[World]) -> None:
    """Whatever the engine still calls: no error, no hit from below, no reset that was none."""
    world = make_world(16, [Unasked(1 << 20, name="below")])
    worlds.append(world)
    keys = keys_of("a", 2)
    world.engine.run(keys)
    hierarchy = world.hierarchy
    hierarchy.close()
    assert not hierarchy.reset()
    request = Request("late")
    assert hierarchy.lookup(keys[0], request) is Lookup.MISS
    store(world, keys)
    hierarchy.end_step()
    hierarchy.step_ended()
    hierarchy.finish_request(request)
    assert not hierarchy.reset()
    hierarchy.close()


def test_a_level_that_cannot_be_made_void_now_is_not_used_until_it_was(
    worlds: list[World], refuse: Refuse
) -> None:
    """Without a thread for it the epoch is raised later, and nothing of before is served."""
    tier = MemoryTier(1 << 20, name="below")
    world = make_world(16, [tier])
    worlds.append(world)
    keys = keys_of("a", 3)
    world.engine.run(keys)
    world.engine.version += 1
    out_of_threads = refuse("-epoch")
    assert not world.hierarchy.reset()
    assert not world.hierarchy.levels[0].usable
    assert world.engine.run(keys).num_hits == 0
    out_of_threads.undo()
    assert world.hierarchy.levels[0].wait_void(10.0)
    assert world.hierarchy.levels[0].usable
    assert tier.epoch() == 1


def test_a_tier_that_cannot_be_closed_now_can_be_closed_later(rig: MakeRig, refuse: Refuse) -> None:
    """Without a thread for it, it stays open and says so."""
    it = rig()
    out_of_threads = refuse("-close")
    assert not it.transfers.close(it.clock.now_s() + FOREVER_S)
    assert not it.memory._closed
    out_of_threads.undo()
    assert it.transfers.close(it.clock.now_s() + FOREVER_S)
    assert it.memory._closed


def test_a_mover_that_could_not_be_started_is_not_waited_for(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed a moment before it is started, and gone when that fails."""
    it = rig()
    crew = it.transfers._crew
    wait, stillborn = crew.wait, threading.Thread()
    crew.threads.add(stillborn)

    def wait_later(*args: object) -> bool:
        crew.threads.discard(stillborn)
        return wait(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(crew, "wait", wait_later)
    assert it.transfers.close(it.clock.now_s() + FOREVER_S)
