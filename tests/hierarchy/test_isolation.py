"""A tier that hangs, or raises anything, is nobody's trouble but its own."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.hierarchy.invariants import check_quiet
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, make_world

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.memory import MemoryTier

VERBS = ("read_into", "write_in_epoch", "delete", "refresh", "raise_epoch", "close")
ERRORS = (OSError(5, "injected"), MemoryError("injected"), SystemExit(1), KeyboardInterrupt())
LIMITS = Limits(promote_deadline_s=2.0, drain_deadline_s=0.3, shutdown_deadline_s=0.8)
SLACK_S = 0.5


class Rude(MemoryTier):
    """Some of its verbs misbehave while `active`, until it is let go."""

    def __init__(self, verbs: tuple[str, ...], behave: Callable[[Rude], None]) -> None:
        super().__init__(40 * CHUNK_BYTES, name="rude")
        self.active = False
        self.let_go = threading.Event()
        self.num_rude = 0
        for verb in verbs:
            setattr(self, verb, self._rude(getattr(self, verb), behave))

    def _rude(self, good: Callable[..., Any], behave: Callable[[Rude], None]) -> Any:
        def call(*arguments: Any) -> Any:
            if self.active:
                self.num_rude += 1
                behave(self)
            return good(*arguments)

        return call

    def refresh(self) -> None: ...

    def take_adopted(self) -> tuple[()]:
        return ()

    def take_lost(self) -> tuple[()]:
        return ()


def hang(tier: Rude) -> None:
    tier.let_go.wait(120)


def fail_with(error: BaseException) -> Callable[[Rude], None]:
    def fail(_tier: Rude) -> None:
        raise error

    return fail


def put(tier: MemoryTier, keys: list[ChunkKey]) -> None:
    for key in keys:
        MemoryTier.write_from(tier, key, memoryview(content_of(key, CHUNK_BYTES)))


class Neighbours:
    """A rude tier before a good one; both hold chunks."""

    def __init__(self, verbs: tuple[str, ...], behave: Callable[[Rude], None]) -> None:
        self.rude, self.good = Rude(verbs, behave), MemoryTier(4096 * CHUNK_BYTES, name="good")
        self.theirs, self.ours = keys_of("rude", 32), keys_of("good", 64)
        put(self.rude, self.theirs)
        put(self.good, self.ours)
        self.world: World = make_world(
            96,
            [self.rude, self.good],
            limits=LIMITS,
            write_deadline_s=0.3,
            transfer_limits=TransferLimits(failures_to_open=2, first_pause_s=0.2, retry_pause_s=0),
        )
        self._number = 0
        self.longest_s = 0.0

    def provoke(self) -> None:
        """Ask the rude tier for chunks, and give it some, so many that it has to delete."""
        self._number += 1
        self.world.engine.submit(self.theirs[:8])
        self.world.engine.submit(keys_of(f"new{self._number}-", 6))
        self.step()

    def step(self) -> None:
        begun_s = time.perf_counter()
        self.world.engine.step()
        self.longest_s = max(self.longest_s, time.perf_counter() - begun_s)

    def serve_s(self) -> float:
        """Seconds that a request waits for four chunks of the good tier."""
        first = 4 * (self._number % 16)
        keys = self.ours[first : first + 4]
        for key in keys:
            slot = self.world.hierarchy.pool.find(key)
            if slot >= 0 and not self.world.hierarchy.pool.slots.pins[slot]:
                self.world.hierarchy.pool.void(key, slot)
        begun_s = time.perf_counter()
        entry = self.world.engine.submit(keys)
        for _ in range(1000):
            if entry.num_hits is not None:
                break
            self.step()
        assert entry.num_hits == 4
        return time.perf_counter() - begun_s

    def close(self) -> None:
        self.rude.let_go.set()
        self.world.close()


@pytest.fixture
def made() -> Iterator[list[Neighbours]]:
    """What was made is let go and closed."""
    every: list[Neighbours] = []
    yield every
    for each in every:
        each.close()
    ends = time.monotonic() + 60
    while any(each.name.startswith("undercroft-rude") for each in threading.enumerate()):
        assert time.monotonic() < ends, "a thread is still in the rude tier"
        time.sleep(0.01)


def check_bounds(it: Neighbours) -> None:
    """Served by the good tier meanwhile; reset and close come back; the good tier is closed."""
    it.rude.active = True
    for _ in range(12):
        it.provoke()
        assert it.serve_s() < 5.0
    begun_s = time.perf_counter()
    it.world.engine.reset()
    assert time.perf_counter() - begun_s < LIMITS.drain_deadline_s + SLACK_S
    for _ in range(3):
        it.provoke()
    begun_s = time.perf_counter()
    it.world.hierarchy.close()
    assert time.perf_counter() - begun_s < LIMITS.shutdown_deadline_s + SLACK_S
    assert it.good._closed
    assert it.rude.num_rude, "the rude tier was not"


@pytest.mark.parametrize("verbs", [*((verb,) for verb in VERBS), VERBS], ids=" ".join)
def test_a_tier_that_hangs(verbs: tuple[str, ...], made: list[Neighbours]) -> None:
    """For good, in any verb or in all: what is beside it is served, reset and closed in time."""
    it = Neighbours(verbs, hang)
    made.append(it)
    check_bounds(it)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tier_that_raises_anything(error: BaseException, made: list[Neighbours]) -> None:
    """Also what is no `Exception`: a mover that dies of it is replaced."""
    it = Neighbours(VERBS, fail_with(error))
    made.append(it)
    check_bounds(it)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_movers_that_died_are_replaced_and_the_tier_works_again(made: list[Neighbours]) -> None:
    """Once it raises no more, its chunks are hits."""
    it = Neighbours(("read_into", "write_in_epoch"), fail_with(KeyboardInterrupt()))
    made.append(it)
    it.rude.active = True
    for _ in range(6):
        it.provoke()
    assert it.rude.num_rude
    it.rude.active = False
    ends = time.monotonic() + 60
    while it.world.engine.run(it.theirs[8:12]).num_hits < 4:
        assert time.monotonic() < ends
        time.sleep(0.02)
    it.world.wait_for_tiers()
    it.world.engine.settle(4000)
    check_quiet(it.world.hierarchy)


def test_a_tier_that_hangs_makes_no_other_slower(made: list[Neighbours]) -> None:
    """What a request waits for chunks of the good tier, beside one that hangs and one that works.

    The best of three, since a busy machine may make any of them slow.
    """
    best = float("inf")
    for _ in range(3):
        hung, sound = Neighbours(VERBS[:3], hang), Neighbours((), hang)
        made.extend((hung, sound))
        hung.rude.active = True
        waits: dict[Neighbours, list[float]] = {hung: [], sound: []}
        for _ in range(30):
            for each, seconds in waits.items():
                each.provoke()
                seconds.append(each.serve_s())
        assert hung.rude.num_rude
        best = min(best, statistics.median(waits[hung]) / statistics.median(waits[sound]))
        if best < 1.5:
            return
    raise AssertionError(f"a request waits {best:.2f} times as long beside a tier that hangs")


class SlowToClose(MemoryTier):
    """Needs a moment to close, as a disk does that has to be flushed."""

    def close(self) -> None:
        time.sleep(0.2)
        super().close()


def test_a_tier_that_hangs_takes_no_time_of_anothers_end() -> None:
    """The other writes all that waits, more than its queue takes at once, and is closed."""
    rude = Rude(VERBS, hang)
    good = SlowToClose(4096 * CHUNK_BYTES, name="good")
    limits = Limits(drain_deadline_s=0.3, shutdown_deadline_s=4.0)
    world = make_world(400, [rude, good], limits=limits, max_queued_write_bytes=32 * CHUNK_BYTES)
    rude.active = True
    try:
        request, keys = Request("last"), keys_of("last", 300)
        plan = world.hierarchy.prepare_store(keys, request)
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            world.hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
        world.hierarchy.complete_store(set(keys), request)
        world.hierarchy.finish_request(request)
        begun_s = time.perf_counter()
        world.hierarchy.close()
        assert time.perf_counter() - begun_s < 4.0 + SLACK_S
        assert good._closed
        assert world.counters.cascaded_chunks["good"] == 300
        assert rude.num_rude
    finally:
        rude.let_go.set()
        world.close()
