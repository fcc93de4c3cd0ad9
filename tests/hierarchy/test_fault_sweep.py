"""One fault at each operation of a tier in turn: always right bytes, always an answer.

And the negative control: the same sweep over a tier without its checksum must find wrong bytes, or
the sweep proves nothing.
"""

from __future__ import annotations

from functools import partial

import pytest
from tests.hierarchy.invariants import check_all, check_quiet
from tests.hierarchy.worlds import CHUNK_BYTES, Pause, World, make_world

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, sweep
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.base import Tier
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

SILENT = [
    Effect.SHORT_READ,
    Effect.FLIPPED_BIT,
    Effect.TORN_WRITE,
    Effect.MISDIRECTED_WRITE,
    Effect.MISDIRECTED_READ,
]
# A misdirected write, and one of the engine before the restart that comes late, put chunks into the
# tier that this engine never heard of.
ASTRAY = {Effect.MISDIRECTED_WRITE, Effect.HANG, Effect.SLOW}
NUM_CHUNKS = 2


def keys_of(label: str) -> list[ChunkKey]:
    return [chunk_key(f"{label}{i}") for i in range(NUM_CHUNKS)]


def make(tier: Tier, clock: ManualClock) -> World:
    pause = Pause(0.0005)

    def let_movers_run() -> None:
        """For a moment; a call that sleeps or hangs has all the time it wants."""
        pause(world.hierarchy.levels)
        if tier.inner.num_hung or clock._num_sleepers():
            clock.advance(0.3)

    world = make_world(
        3,
        [tier],
        clock=clock,
        num_threads=1,
        limits=Limits(drain_deadline_s=0.02),
        transfer_limits=TransferLimits(retry_pause_s=0.25, failures_to_open=2, first_pause_s=0.5),
        write_deadline_s=1.5,
        between_steps=let_movers_run,
    )
    return world


def run(world: World, label: str) -> int:
    entry = world.engine.submit(keys_of(label))
    world.engine.settle(300)
    assert entry.num_hits is not None, "never answered"
    check_all(world.hierarchy)
    return entry.num_hits


def scenario(wrap: type[Checked], injector: Injector) -> None:
    """Store, restart, load, evict, reset, with the one fault of `injector` somewhere."""
    clock = ManualClock()
    faulty = FaultyTier(
        MemoryTier(5 * (CHUNK_BYTES + Checked.overhead_bytes), name="below"), injector, clock=clock
    )
    tier = wrap(faulty)
    worlds = [make(tier, clock)]
    try:
        hits = [run(worlds[0], label) for label in "aba"]
        # A restart: nothing in host memory, everything below. The tier goes on.
        again = make(tier, clock)
        worlds.append(again)
        hits += [run(again, label) for label in "aca"]
        again.engine.version += 1
        again.engine.reset()
        hits += [run(again, label) for label in "aa"]
        if not injector.num_fired:
            n = NUM_CHUNKS
            assert hits == [0, 0, n, n, 0, n, 0, n]
        faulty.release()
        for _ in range(500):
            if not (tier_busy(again) or again.hierarchy.has_pending_work()):
                break
            again.engine.step()
        check_quiet(again.hierarchy, orphans=injector.effect in ASTRAY)
    finally:
        for world in worlds:
            world.close()


def tier_busy(world: World) -> bool:
    (level,) = world.hierarchy.levels
    return bool(level.transfers.open or level.transfers.late)


class Bare(Checked):
    """The same wrapper without its check: what is read is believed."""

    def _verify(self, key: ChunkKey, block: memoryview, payload: memoryview) -> None:
        pass


@pytest.mark.parametrize("effect", [each for each in Effect if each is not Effect.KILLED])
def test_a_fault_anywhere_is_at_worst_a_miss(effect: Effect) -> None:
    """Whatever goes wrong and when: right bytes, an answer, and nothing left behind."""
    num_faults = sweep(partial(scenario, Checked), effect, max_points=200)
    assert num_faults >= NUM_CHUNKS


@pytest.mark.parametrize("effect", SILENT)
def test_without_the_checksum_the_sweep_fails(effect: Effect) -> None:
    """The negative control: it is the checksum that keeps wrong bytes out."""
    with pytest.raises(AssertionError, match="loaded wrong bytes"):
        sweep(partial(scenario, Bare), effect, max_points=200)
