"""Every miss is counted, and noted, by the level that was to blame and by the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.hierarchy.worlds import CHUNK_BYTES, World, make_world

from undercroft.clock import Clock
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import MiniRequest, chunk_key, content_of
from undercroft.tiers.base import Tier
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

KEYS = [chunk_key(f"k{number}") for number in range(6)]

Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Told:
    """(level, reason) of each note of a miss."""
    return []


@pytest.fixture
def below(told: Told) -> Iterator[Callable[..., World]]:
    """A host of eight slots above an empty tier `near` and the tier `far` that is given."""
    made: list[World] = []

    def make(
        far: Tier,
        *,
        num_slots: int = 8,
        clock: Clock | None = None,
        limits: TransferLimits | None = None,
    ) -> World:
        near = MemoryTier(64 * CHUNK_BYTES, name="near")
        world = make_world(
            num_slots,
            [near, far],
            clock=clock,
            limits=Limits(promote_deadline_s=2.0 if clock else 60.0),
            transfer_limits=limits,
        )
        world.counters.note = lambda level, event, reason, *_keys: (
            told.append((level, reason)) if event == "missed" else None
        )
        made.append(world)
        return world

    yield make
    for world in made:
        world.close()


def far_with_keys(effect: Effect | None = None, wrap: Callable[[Tier], Tier] | None = None) -> Tier:
    memory = MemoryTier(64 * (CHUNK_BYTES + 4096), name="far")
    checked = wrap(memory) if wrap else memory
    for key in KEYS:
        checked.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    if effect is None:
        return checked
    faulty = FaultyTier(memory, Injector(effect, on_verb("read_into")))
    return wrap(faulty) if wrap else faulty


def misses(world: World) -> dict[tuple[str, str], int]:
    return {place: number for place, number in world.counters.lookup_misses.items() if number}


def test_what_nobody_has_is_of_no_level(below: Callable[..., World], told: Told) -> None:
    """`absent` names no level and is not noted: the store shows it by itself."""
    world = below(far_with_keys())
    world.engine.run([chunk_key("never stored")])
    assert misses(world) == {("none", "absent"): 1}
    assert told == []


@pytest.mark.parametrize("effect", [Effect.ERROR, Effect.FLIPPED_BIT])
def test_the_level_whose_read_failed_is_named(
    below: Callable[..., World], told: Told, effect: Effect
) -> None:
    """A level that fails, or gives back a damaged chunk, is named by the miss that follows.

    Also after the damaged chunk has left its index.
    """
    world = below(far_with_keys(effect, Checked))
    assert world.engine.run(KEYS[:1]).num_hits == 0
    assert misses(world) == {("far", "read_failed"): 1}
    assert told == [("far", "read_failed")]
    if effect is Effect.FLIPPED_BIT:
        assert world.counters.dropped_chunks == {("far", "corrupt"): 1}


def test_the_level_that_was_too_slow_is_named(below: Callable[..., World], told: Told) -> None:
    """A read that hangs ends in a miss by `deadline` of its level."""
    clock, far = ManualClock(), far_with_keys(Effect.HANG)
    assert isinstance(far, FaultyTier)
    world = below(far, clock=clock)
    entry = world.engine.submit(KEYS[:1])
    world.engine.step()
    far.await_hung(1)
    clock.advance(2.01)
    world.engine.step()
    assert entry.num_hits == 0
    assert misses(world) == {("far", "deadline"): 1}
    assert told == [("far", "deadline")]


def test_host_memory_is_named_where_a_store_takes_too_long(below: Callable[..., World]) -> None:
    """A chunk that another request is storing, and that comes too late, is late in `host`."""
    clock = ManualClock()
    world = below(MemoryTier(64 * CHUNK_BYTES, name="far"), clock=clock)
    hierarchy = world.hierarchy
    writer, reader = Request("writer"), Request("reader")
    plan = hierarchy.prepare_store(KEYS[:1], writer)
    assert hierarchy.lookup(KEYS[0], reader) is Lookup.PENDING
    clock.advance(2.01)
    assert hierarchy.lookup(KEYS[0], reader) is Lookup.MISS
    assert misses(world) == {("host", "deadline"): 1}
    hierarchy.complete_store(set(plan.keys), writer, success=False)


def test_a_level_that_is_down_is_named(below: Callable[..., World], told: Told) -> None:
    """What only a level has that is left alone after failures is `unavailable`, not `absent`."""
    far = far_with_keys(Effect.ERROR)
    limits = TransferLimits(failures_to_open=1, first_pause_s=600.0, max_pause_s=600.0)
    world = below(far, limits=limits)
    world.engine.run(KEYS[:1])
    assert not world.hierarchy.levels[1].usable
    told.clear()
    assert world.engine.run(KEYS[1:3]).num_hits == 0
    assert world.engine.run([chunk_key("never stored")]).num_hits == 0
    assert misses(world) == {
        ("far", "read_failed"): 1,
        ("far", "unavailable"): 1,
        ("none", "absent"): 1,
    }
    assert told == [("far", "unavailable")]


def test_the_level_is_named_where_host_memory_was_too_small(below: Callable[..., World]) -> None:
    """Six chunks do not fit into four slots: the fifth is a miss of the level that has it."""
    world = below(far_with_keys(), num_slots=4)
    entry: MiniRequest = world.engine.run(KEYS)
    assert entry.num_hits == 4
    assert set(misses(world)) == {("far", "not_restored")}


def test_what_came_up_and_left_again_is_of_the_level_it_came_from(
    below: Callable[..., World],
) -> None:
    """A chunk that was read for a request and is in host memory no more is not read again."""
    world = below(far_with_keys())
    request = Request("r")
    request.promoted[KEYS[0]] = "far"
    assert world.hierarchy.lookup(ChunkKey(KEYS[0]), request) is Lookup.MISS
    assert misses(world) == {("far", "evicted_again"): 1}


def test_hits_blame_nobody(below: Callable[..., World], told: Told) -> None:
    """A prefix that comes up from below is no miss of any level."""
    world = below(far_with_keys())
    assert world.engine.run(KEYS).num_hits == len(KEYS)
    assert misses(world) == {}
    assert told == []
