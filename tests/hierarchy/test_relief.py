"""A tier that says that it is full costs a few chunks, not the cache."""

from __future__ import annotations

import time
from collections.abc import Callable

from worlds import CHUNK_BYTES, World, make_world

from undercroft.hierarchy.relief import Relief
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector
from undercroft.testing.injectors import Call
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.memory import MemoryTier

CAPACITY_CHUNKS = 640
AHEAD = CAPACITY_CHUNKS // 64


def filled(fault: Injector, num_chunks: int) -> World:
    """A tier with so many chunks, which is going to say that it is full."""
    fault.active = False
    tier = FaultyTier(MemoryTier(CAPACITY_CHUNKS * CHUNK_BYTES, name="below"), fault)
    world = make_world(16, [tier])
    for number in range(num_chunks):
        world.engine.run([chunk_key(f"old {number}")])
    step_until(world, lambda: world.counters.cascaded_chunks["below"] == num_chunks)
    fault.active = True
    return world


def step_until(world: World, done: Callable[[], bool]) -> None:
    for _ in range(5000):
        if done():
            return
        world.engine.step()
        time.sleep(0.001)
    raise AssertionError(world.counters)


def test_a_disk_that_others_filled_does_not_cost_the_cache() -> None:
    """Evicting is of no use: a few are tried, and what is there goes on being read."""
    world = filled(Injector(Effect.FULL), 200)
    try:
        for number in range(60):
            world.engine.run([chunk_key(f"new {number}")])
        dropped = world.counters.dropped_chunks
        step_until(world, lambda: dropped["below", "full"] >= 60)  # each once, tried twice
        assert 0 < world.counters.evicted_chunks["below"] <= 1 + AHEAD
        (level,) = world.hierarchy.levels
        assert sum(level.has(chunk_key(f"old {n}")) for n in range(200)) >= 200 - (1 + AHEAD)
    finally:
        world.close()


def test_a_chunk_that_is_written_at_the_second_try_is_not_dropped() -> None:
    """What was to make room for it was not deleted yet: nothing is lost by that."""
    tried: set[ChunkKey] = set()

    def is_first(call: Call) -> bool:
        known = call.key in tried
        tried.add(call.key)
        return not known

    injector = Injector(Effect.FULL, is_first)
    world = filled(injector, 10)
    before = world.counters.cascaded_chunks["below"]
    try:
        for number in range(20):
            world.engine.run([chunk_key(f"new {number}")])
        step_until(world, lambda: world.counters.cascaded_chunks["below"] == before + 20)
        assert injector.num_fired == 20
        assert not world.counters.dropped_chunks
    finally:
        world.close()


def test_a_delete_that_fails_for_want_of_space_evicts_nothing() -> None:
    """File systems that copy on write say so when something is deleted."""
    world = filled(Injector(Effect.FULL, verbs=("delete",)), CAPACITY_CHUNKS - AHEAD)
    before = world.counters.evicted_chunks["below"]
    try:
        world.engine.run([chunk_key("new")])
        step_until(world, lambda: world.counters.dropped_chunks["below", "full"] > 0)
        for _ in range(50):
            world.engine.step()
            time.sleep(0.001)
        assert world.counters.evicted_chunks["below"] - before <= 1 + AHEAD
    finally:
        world.close()


def test_it_comes_back_with_a_success_and_with_time() -> None:
    """For each size class by itself."""
    clock = ManualClock()
    relief = Relief([3, 5], clock)
    relief.spend(0, 3)
    assert (relief.left(0), relief.left(1)) == (0, 5)
    relief.helped(0)
    assert relief.left(0) == 3
    relief.spend(0, 3)
    clock.advance(59)
    assert relief.left(0) == 0
    clock.advance(2)
    assert relief.left(0) == 3
