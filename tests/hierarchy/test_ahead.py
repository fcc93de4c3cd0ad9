"""Scouts: what they bring up is right, and nobody waits for them or is held up by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hierarchy.invariants import check_all
from tests.hierarchy.worlds import World, keys_of, make_world

from undercroft.keys import ChunkKey
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.memory import MemoryTier


@pytest.fixture
def world() -> Iterator[World]:
    """16 slots; prefixes a, b, c of 8 chunks are below, and host memory holds others."""
    made = make_world(16, [MemoryTier(1 << 24, name="below")])
    for label in ("a", "b", "c", "x", "y"):
        made.engine.run(keys_of(label, 8))
        made.wait_for_tiers()
        made.engine.settle()
    yield made
    made.close()


def scout(world: World, keys: list[ChunkKey]) -> int:
    """Walk as an engine does, and end the step; how many reads were begun."""
    ahead = world.hierarchy.ahead
    walker = ahead.scout("queued", {key: n + 1 for n, key in enumerate(keys)}.get)
    assert walker is not None
    for key in keys:
        if not ahead.finds(key, walker):
            break
    before = len(world.hierarchy.restores)
    world.hierarchy.end_step()
    return len(world.hierarchy.restores) - before


def arrive(world: World) -> None:
    world.wait_for_tiers()
    world.hierarchy.end_step()


def test_the_prefix_is_read_once_and_pinned_for_nobody(world: World) -> None:
    """Up to the first chunk that no level has; its request then hits without waiting."""
    keys = [*keys_of("a", 8), chunk_key("unknown")]
    assert scout(world, keys) == 8
    assert scout(world, keys) == 0, "on its way already"
    arrive(world)
    check_all(world.hierarchy)
    assert world.hierarchy.pool.slots.num_pinned == 0
    assert scout(world, keys) == 0, "here already"
    entry = world.engine.run(keys)
    assert (entry.num_asked, entry.num_hits) == (1, 8)


def test_half_of_the_room_whole_or_not_at_all(world: World) -> None:
    """9 chunks of 16 slots are not begun."""
    world.engine.run(keys_of("long", 9))
    world.wait_for_tiers()
    world.engine.run(keys_of("z", 16))
    world.wait_for_tiers()
    world.engine.settle()
    assert scout(world, keys_of("long", 9)) == 0
    assert scout(world, keys_of("long", 8)) == 8
    arrive(world)
    check_all(world.hierarchy)


def test_a_request_that_comes_meanwhile_joins_the_reads(world: World) -> None:
    """Nothing is read twice."""
    before = world.counters.promoted_chunks.total()
    assert scout(world, keys_of("a", 8)) == 8
    assert world.engine.run(keys_of("a", 8)).num_hits == 8
    assert world.counters.promoted_chunks.total() == before + 8


def test_those_who_wait_now_come_first(world: World) -> None:
    """A scout of the same step gets what they leave."""
    hierarchy = world.hierarchy
    first, second = world.engine.submit(keys_of("a", 8)), world.engine.submit(keys_of("b", 6))
    assert world.engine.walk(first) is world.engine.walk(second) is None
    assert scout(world, keys_of("c", 8)) == 14, "14 of 16 slots: none for it"
    assert hierarchy.ahead.scout("next", {}.get) is not None
    world.engine.settle()
    assert (first.num_hits, second.num_hits) == (8, 6)
    check_all(hierarchy)


def test_reads_ahead_end_with_a_reset(world: World) -> None:
    """What was on its way when the cache was reset never becomes a hit."""
    assert scout(world, keys_of("a", 8)) == 8
    assert world.hierarchy.reset()
    arrive(world)
    check_all(world.hierarchy)
    assert world.engine.run(keys_of("a", 8)).num_hits == 0
