"""An engine without requests rests when stepping would bring nothing, and loses nothing by it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.hierarchy.invariants import check_quiet
from tests.hierarchy.transfers_rig import MakeRig, made_rigs
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.clock import SystemClock
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, When, always, on_index, on_verb
from undercroft.testing.mini_engine import content_of
from undercroft.testing.tier_suite import key_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)

SOON_S, WRITE_DEADLINE_S = 2.1, 30.0
rig = pytest.fixture(made_rigs)


class Hung:
    """A world over a tier some of whose writes hang, with a queue of `room` writes."""

    def __init__(
        self,
        worlds: list[World],
        *,
        room: int = 64,
        when: When | None = None,
        there: Sequence[ChunkKey] = (),
    ) -> None:
        self.clock = ManualClock()
        self.memory = MemoryTier(256 * CHUNK_BYTES, name="below")
        for key in there:
            self.memory.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
        self.tier = FaultyTier(self.memory, Injector(Effect.HANG, when or on_verb("write_from")))
        self.world = make_world(
            64,
            [self.tier],
            clock=self.clock,
            num_threads=4,
            max_queued_write_bytes=room * CHUNK_BYTES,
            write_deadline_s=WRITE_DEADLINE_S,
            limits=Limits(promote_deadline_s=1.0, drain_deadline_s=0.1),
            between_steps=lambda: None,
        )
        worlds.append(self.world)
        self.hierarchy = self.world.hierarchy
        self.engine = self.world.engine

    @property
    def pending(self) -> bool:
        return self.hierarchy.has_pending_work()

    def serve(self, keys: list[ChunkKey], num_steps: int = 4, num_hung: int = 0) -> None:
        self.engine.submit(keys)
        for _ in range(num_steps):
            self.engine.step()
        if num_hung:
            self.tier.await_hung(num_hung)
            self.engine.step()  # the movers have taken some from the queue: room for others

    def end(self) -> int:
        """Let the hung calls go; the steps it takes to book everything."""
        self.tier.release()
        self.engine._between_steps = self.await_movers
        self.await_movers()
        return self.engine.settle()

    def await_movers(self) -> None:
        (level,) = self.hierarchy.levels
        assert level.transfers.drain(self.clock.now_s() + 10)


def test_a_hung_write_is_waited_for_a_moment_only(worlds: list[World]) -> None:
    """Not until its deadline; when it comes back, the next step books it and takes its pin."""
    hung = Hung(worlds)
    hung.serve(keys_of("a", 1), num_hung=1)
    assert hung.pending
    hung.clock.advance(SOON_S)
    assert not hung.pending
    assert hung.hierarchy.pool.slots.num_pinned == 1, "the tier still reads from it"
    hung.tier.release()
    hung.await_movers()
    assert hung.pending, "its end is there to be booked"
    hung.engine.step()
    check_quiet(hung.hierarchy)
    assert hung.world.counters.cascaded_chunks["below"] == 1


def test_what_waits_behind_hung_writes_is_no_work_and_is_not_lost(worlds: list[World]) -> None:
    """In the movers' queue and in front of it; requests meanwhile change nothing; then all of it
    is written."""
    hung = Hung(worlds, room=4)
    keys = keys_of("a", 12)
    hung.serve(keys, num_hung=3)
    hung.clock.advance(SOON_S)
    assert not hung.pending
    assert len(hung.hierarchy.cascade) >= 12
    more = keys_of("b", 5)
    hung.serve(more)
    assert not hung.pending, "nothing of this can start"
    assert hung.end() > 0
    check_quiet(hung.hierarchy)
    assert all(hung.memory.has(key) for key in keys + more)


def test_after_a_deadline_something_may_move_again(worlds: list[World]) -> None:
    """Whoever steps then has threads replaced, and the engine goes on while these get on."""
    hung = Hung(worlds, room=32, when=lambda call: call.verb == "write_from" and call.index < 3)
    keys = keys_of("a", 20)
    hung.serve(keys, num_hung=3)
    hung.clock.advance(SOON_S)
    assert not hung.pending
    hung.clock.advance(WRITE_DEADLINE_S)
    assert hung.pending, "the deadline is to be booked"
    more = keys_of("b", 5)
    hung.serve(more, num_steps=1)
    hung.engine._between_steps = lambda: SystemClock().sleep(0.002)
    hung.engine.settle(20_000)
    assert not hung.pending
    assert all(hung.memory.has(key) for key in more)
    assert hung.end() < 5
    check_quiet(hung.hierarchy)


def test_a_hung_read_of_a_request_that_left(worlds: list[World]) -> None:
    """It arrives unpinned if it ever does; nobody steps for it."""
    keys = keys_of("a", 1)
    hung = Hung(worlds, when=on_verb("read_into"), there=keys)
    entry = hung.engine.submit(keys)
    hung.engine.step()
    hung.tier.await_hung(1)
    hung.engine.abort(entry)
    assert hung.pending
    hung.clock.advance(0.5)
    hung.engine.step()
    hung.clock.advance(0.6)
    hung.engine.step()
    assert not hung.pending
    hung.end()
    check_quiet(hung.hierarchy)


def test_a_reset_over_a_hung_tier(worlds: list[World]) -> None:
    """What was queued is told off at once; what hangs is no work after a moment."""
    hung = Hung(worlds, room=4)
    hung.serve(keys_of("a", 12), num_hung=3)
    hung.engine.reset()
    assert hung.engine.settle(20) == 20, "within the first moment it is asked again and again"
    assert len(hung.hierarchy.cascade) == 3
    hung.clock.advance(SOON_S)
    hung.engine.step()
    assert not hung.pending
    hung.serve(keys_of("b", 2))
    assert not hung.pending
    assert not hung.memory.used_bytes()
    hung.end()
    check_quiet(hung.hierarchy)


@pytest.mark.parametrize("effect", [Effect.ERROR, Effect.FULL])
def test_a_tier_that_refuses_is_soon_done_with(worlds: list[World], effect: Effect) -> None:
    """Full, or failing until its breaker opens: what waits is declined, not kept."""
    clock = SystemClock()
    tier = FaultyTier(MemoryTier(256 * CHUNK_BYTES, name="below"), Injector(effect, always))
    world = make_world(
        64,
        [tier],
        max_queued_write_bytes=2 * CHUNK_BYTES,
        between_steps=lambda: clock.sleep(0.002),
        transfer_limits=TransferLimits(retry_pause_s=0.001, first_pause_s=50.0),
    )
    worlds.append(world)
    world.engine.submit(keys_of("a", 40))
    assert world.engine.settle(5000) < 5000
    check_quiet(world.hierarchy)
    for n in range(3):
        world.engine.submit(keys_of(f"b{n}", 4))
    assert world.engine.settle(5000) < 5000
    check_quiet(world.hierarchy)


def test_a_slow_tier_is_waited_for(rig: MakeRig) -> None:
    """As long as moves end now and then; and one that is known to be slow gets more time."""
    fault = Injector(Effect.SLOW, on_verb("write_from"), seconds=1.5)
    slow = rig(fault, num_threads=1)
    for n in range(4):
        slow.write(key_of(n))
    for _ in range(4):
        slow.clock.await_sleepers(1)
        assert slow.transfers.has_news
        slow.clock.advance(1.5)
    assert len(slow.finish()) == 4
    assert not slow.transfers.has_news
    slow.write(key_of("known"))
    slow.clock.await_sleepers(1)
    fault.seconds = 100.0
    slow.clock.advance(1.5)
    slow.finish()
    slow.write(key_of("longer"))
    slow.clock.await_sleepers(1)
    slow.clock.advance(4 * 1.5 - 0.1)
    assert slow.transfers.has_news, "four times what it takes"
    slow.clock.advance(0.2)
    assert not slow.transfers.has_news
    slow.clock.advance(100.0)


def test_a_free_thread_is_waited_for_although_another_hangs(rig: MakeRig) -> None:
    """A read that can start beside hung writes is news to come; a write that cannot is none."""
    hung = rig(Injector(Effect.HANG, on_index(0)), num_threads=2)
    hung.write(key_of("first"))
    hung.faulty.await_hung(1)
    while not hung.transfers._crew._idle:
        SystemClock().sleep(0.001)
    hung.clock.advance(SOON_S)
    hung.write(key_of("second"))
    assert not hung.transfers.has_news, "one of two threads is kept for reads"
    hung.store(key_of("there"))
    hung.read(key_of("there"))
    assert hung.transfers.has_news
    while not (dones := hung.transfers.poll()):
        assert hung.transfers.has_news
        SystemClock().sleep(0.001)
    assert [done.outcome.found for done in dones] == [True]
    hung.clock.advance(SOON_S)
    assert not hung.transfers.has_news
