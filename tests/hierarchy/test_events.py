"""Events, applied in order to an empty set, give what each level holds."""

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest
from worlds import CHUNK_BYTES, World, made_worlds, make_world

from undercroft.hierarchy.events import LevelEvent, LevelEvents
from undercroft.keys import ChunkKey
from undercroft.testing.mini_engine import chunk_key, content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


def mirror(held: dict[str, set[ChunkKey]], events: Iterable[LevelEvent]) -> None:
    """Apply events as a strict router does: nothing is stored twice, nothing removed unseen."""
    for level, keys, removed in events:
        for key in keys:
            assert (key in held[level]) == removed, f"{level}: removed={removed} {key!r}"
            (held[level].remove if removed else held[level].add)(key)


def filled(num_chunks: int, capacity_chunks: int) -> MemoryTier:
    tier = MemoryTier(capacity_chunks * CHUNK_BYTES, name="below")
    for number in range(num_chunks):
        key = chunk_key(f"old{number}")
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    return tier


def test_what_a_level_held_at_the_start_is_told_bit_by_bit(worlds: list[World]) -> None:
    """After a restart a router hears of all that is on disk; no step tells of more than 1,024."""
    tier = filled(3000, 4000)
    world = make_world(4, [tier])
    worlds.append(world)
    held: dict[str, set[ChunkKey]] = defaultdict(set)
    steps = 0
    while world.hierarchy.has_pending_work():
        world.engine.step()
        events = world.hierarchy.events.take()
        assert sum(len(event.keys) for event in events) <= 1024
        mirror(held, events)
        steps += 1
    assert steps == 3
    assert held["below"] == {key for key, _ in tier.evictable()}


def test_levels_and_events_agree_whatever_happens(worlds: list[World], seed: int) -> None:
    """Stores, evictions from both levels, restores and resets on top of what was found: at each
    moment without work under way the events say what is there."""
    rng = random.Random(seed)
    tier = filled(60, 64)
    world = make_world(24, [tier])
    worlds.append(world)
    held: dict[str, set[ChunkKey]] = defaultdict(set)
    for turn in range(40):
        label = rng.choice("abcdefgh")
        world.engine.run([chunk_key(f"{label}{i}") for i in range(rng.randint(1, 20))])
        if turn == 25:
            world.hierarchy.reset()
        world.engine.settle()
        world.wait_for_tiers()
        world.engine.step()
        mirror(held, world.hierarchy.events.take())
        assert held["host"] == set(dict(world.hierarchy.pool.keys()))
        assert held["below"] == {key for key, _ in tier.evictable()}
    assert world.counters.evicted_chunks["below"] > 60


def test_found_and_evicted_before_it_was_told() -> None:
    """Nobody hears of it: it was never said to be there."""
    events = LevelEvents(enabled=True)
    key, other = chunk_key("a"), chunk_key("b")
    events.find("disk", key)
    events.find("disk", other)
    events.add("disk", key, removed=True)
    events.add("disk", key, removed=False)
    events.tell_found()
    assert events.take() == [LevelEvent("disk", [key, other], removed=False)]
    assert not events.has_more


def test_an_idle_engine_steps_once_more_for_what_it_has_to_tell(worlds: list[World]) -> None:
    """A reset of an idle engine is heard of at once, not with the next request. If nobody takes
    events at all, that does not keep the engine stepping."""
    world = make_world(16)
    worlds.append(world)
    world.engine.run([chunk_key(f"a{i}") for i in range(8)])
    world.engine.settle()
    world.hierarchy.events.take()
    world.engine.step()
    assert not world.hierarchy.has_pending_work()
    world.hierarchy.reset()
    assert world.hierarchy.has_pending_work()
    world.engine.step()
    assert [event.removed for event in world.hierarchy.events.take()] == [True]
    assert not world.hierarchy.has_pending_work()
    world.engine.run([chunk_key("b")])
    world.hierarchy.reset()
    for _ in range(10):
        world.engine.step()
    assert not world.hierarchy.has_pending_work()


def test_nothing_is_kept_when_off() -> None:
    """A million found chunks cost no memory when nobody asks for events."""
    events = LevelEvents(enabled=False)
    events.find("disk", chunk_key("a"))
    events.add("disk", chunk_key("a"), removed=True)
    assert not events.has_more
    assert events.take() == []
