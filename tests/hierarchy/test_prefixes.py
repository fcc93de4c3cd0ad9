"""A prefix is worth as much as its unbroken part: the order of evictions, copies and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from tests.hierarchy.invariants import check_all, check_quiet
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.policies.arc import Arc
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.hazard import Hazard
from undercroft.policies.lru import Lru
from undercroft.testing.faults import Effect, FaultyTier, Injector, both, on_index, on_key, on_verb
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


def held(world: World, keys: list[ChunkKey]) -> list[bool]:
    return [world.hierarchy.pool.find(key) >= 0 for key in keys]


def is_prefix(here: list[bool]) -> bool:
    return all(a >= b for a, b in pairwise(here))


def store_in_steps(world: World, keys: list[ChunkKey], per_step: int) -> Request:
    """One request that stores a few chunks each step, as an engine's chunked prefill does."""
    hierarchy, ends = world.hierarchy, {key: n for n, key in enumerate(keys)}
    request = Request(f"steps-{keys[0].hex()[:8]}", ends.get)
    for begin in range(0, len(keys), per_step):
        hierarchy.end_step()
        plan = hierarchy.prepare_store(keys[begin : begin + per_step], request)
        for key, slot in zip(plan.keys, plan.slots, strict=True):
            hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
        hierarchy.complete_store(set(plan.keys), request)
    hierarchy.finish_request(request)
    return request


@pytest.mark.parametrize("make_policy", [Lru, Arc, Hazard])
@pytest.mark.parametrize("per_step", [1, 3, 8])
@pytest.mark.parametrize("num_hits", [0, 1])
def test_under_pressure_the_root_stays_longest(
    worlds: list[World], make_policy: type[Lru], per_step: int, num_hits: int
) -> None:
    """What survives of a prompt is a prefix, however many steps it took to store it."""
    world = make_world(16, make_policy=make_policy)
    worlds.append(world)
    keys = keys_of("a", 8)
    store_in_steps(world, keys, per_step)
    for _ in range(num_hits):
        assert world.engine.run(keys).num_hits == 8
    for n in range(40):
        world.engine.run(keys_of(f"other{n}-", 1))
        assert is_prefix(held(world, keys)), held(world, keys)
    # Arc lets one-time chunks go by what was used twice.
    assert make_policy is Arc or not any(held(world, keys))


def test_a_request_does_not_evict_what_it_stands_on(worlds: list[World]) -> None:
    """The prefix that a request loaded outlives the chunks it adds behind it."""
    world = make_world(16)
    worlds.append(world)
    keys = keys_of("a", 16)
    world.engine.run(keys[:8])
    world.engine.run(keys_of("b", 8))
    entry = world.engine.run(keys)
    assert (entry.num_hits, entry.num_stored) == (8, 8)
    assert all(held(world, keys))


def test_a_request_larger_than_level_0_keeps_its_prefix(worlds: list[World]) -> None:
    """With no room but its own prefix, the deeper chunks are declined, not swapped in."""
    world = make_world(12)
    worlds.append(world)
    keys = keys_of("a", 24)
    world.engine.run(keys[:8])
    world.engine.run(keys)
    assert is_prefix(held(world, keys))
    assert sum(held(world, keys)) == 12
    assert world.counters.declined_chunks["host", "full"] == 12


class OneThreadOrder(MemoryTier):
    """Notes the order in which it is written and read."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, name="below")
        self.written: list[ChunkKey] = []
        self.read: list[ChunkKey] = []

    def _write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        self.written.append(key)
        return super()._write(key, data, epoch)

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        self.read.append(key)
        return super().read_into(key, out)


def test_chunks_go_down_and_come_up_in_prefix_order(worlds: list[World]) -> None:
    """The engine reports a set; the root is written first and read first all the same."""
    tier = OneThreadOrder(64 * CHUNK_BYTES)
    world = make_world(32, [tier], num_threads=1)
    worlds.append(world)
    keys = keys_of("a", 24)
    world.engine.run(keys)
    assert tier.written == keys
    again = make_world(32, [tier], num_threads=1)
    worlds.append(again)
    assert again.engine.run(keys).num_hits == 24
    assert tier.read == keys


def test_a_burst_reads_each_chunk_once(worlds: list[World]) -> None:
    """Fifty requests with one prefix wait for one read of it."""
    tier = OneThreadOrder(64 * CHUNK_BYTES)
    keys = keys_of("a", 12)
    for key in keys:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    world = make_world(16, [tier])
    worlds.append(world)
    entries = [world.engine.submit(keys) for _ in range(50)]
    world.engine.settle()
    assert {entry.num_hits for entry in entries} == {12}
    assert sorted(tier.read) == sorted(keys)
    check_quiet(world.hierarchy)


def test_what_one_request_reads_no_other_reads_again_in_the_same_step(
    worlds: list[World],
) -> None:
    """The second's prefix begins with the first's and does not fit: it is cut, and waits."""
    tier = OneThreadOrder(64 * CHUNK_BYTES)
    keys = keys_of("a", 12)
    for key in keys:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    world = make_world(8, [tier], num_threads=1)
    worlds.append(world)
    entries = [world.engine.submit(keys[:4]), world.engine.submit(keys)]
    world.engine.step()
    check_all(world.hierarchy)
    world.engine.settle()
    assert entries[0].num_hits == 4
    assert entries[1].num_hits >= 4
    assert len(tier.read) == len(set(tier.read))


def test_a_failed_chunk_loses_only_itself(worlds: list[World]) -> None:
    """Of ten chunks one is corrupt: its neighbours are kept, and it is written anew."""
    memory = MemoryTier(64 * (CHUNK_BYTES + Checked.overhead_bytes), name="below")
    keys = keys_of("a", 10)
    fault = Injector(Effect.FLIPPED_BIT, both(on_verb("read_into"), on_key(keys[5])))
    tier = Checked(FaultyTier(memory, fault))
    for key in keys:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    world = make_world(16, [tier])
    worlds.append(world)
    assert world.engine.run(keys).num_hits == 5
    fault.active = False
    assert world.counters.promoted_chunks["below"] == 9
    assert world.counters.dropped_chunks["below", "corrupt"] == 1
    assert world.engine.run(keys).num_hits == 10
    assert world.counters.promoted_chunks["below"] == 9
    assert tier.has(keys[5])
    again = make_world(16, [tier])
    worlds.append(again)
    assert again.engine.run(keys).num_hits == 10


def test_a_store_overrides_a_remembered_miss(worlds: list[World]) -> None:
    """A chunk denied to a waiting request is a hit as soon as anybody has stored it."""
    tier = MemoryTier(64 * CHUNK_BYTES, name="below")
    world = make_world(8, [tier])
    worlds.append(world)
    (key,) = keys_of("a", 1)
    reader = Request("reader")
    assert world.hierarchy.lookup(key, reader) is Lookup.MISS
    reader.denied.add(key)
    world.engine.run([key])
    assert world.hierarchy.lookup(key, reader) is Lookup.HIT
    world.hierarchy.finish_request(reader)


def test_a_full_tier_makes_room_and_the_write_is_retried(worlds: list[World]) -> None:
    """A write refused for want of room is tried again once something was deleted."""
    fault = Injector(Effect.FULL, on_index(0))
    tier = FaultyTier(MemoryTier(64 * CHUNK_BYTES, name="below"), fault)
    world = make_world(16, [tier])
    worlds.append(world)
    keys = keys_of("a", 4)
    world.engine.run(keys)
    assert fault.num_fired == 1
    assert all(tier.has(key) for key in keys)


def make_blind(capacity_chunks: int) -> EvictionPolicy:
    policy = Lru(capacity_chunks)

    class Blind:
        name = "blind"
        num_searched = 0

        def __getattr__(self, name: str) -> Callable[..., object]:
            return getattr(policy, name)

        def __contains__(self, key: ChunkKey) -> bool:
            return key in policy

        def victims(self) -> Iterator[ChunkKey]:
            for key in policy.victims():
                Blind.num_searched += 1
                yield key

    return Blind()


def test_declining_costs_nothing_and_is_counted(worlds: list[World]) -> None:
    """With every slot in use no search for victims is made, however often somebody asks."""
    world = make_world(256, make_policy=make_blind)
    worlds.append(world)
    hierarchy, keys = world.hierarchy, keys_of("a", 256)
    world.engine.run(keys)
    reader, writer = Request("reader"), Request("writer")
    for key in keys:
        hierarchy.lookup(key, reader)
    hierarchy.prepare_load(keys, reader)
    for step in range(1, 11):
        assert hierarchy.prepare_store(keys_of(f"b{step}", 20), writer).keys == []
        hierarchy.end_step()
        assert world.counters.declined_chunks["host", "full"] == 20 * step
    assert type(hierarchy.pool._policies[0]).num_searched == 0
    hierarchy.complete_load(keys, reader)
    for request in (reader, writer):
        hierarchy.finish_request(request)
    check_quiet(hierarchy)


def test_room_that_others_could_give_is_found(worlds: list[World]) -> None:
    """Though an ended request comes first whose chunks others still use, and so give none."""
    world = make_world(300)
    worlds.append(world)
    hierarchy = world.hierarchy
    shared = keys_of("shared", 200)
    world.engine.run(shared)
    first, second = Request("first"), Request("second")
    for request in (second, first):
        assert all(hierarchy.lookup(key, request) is Lookup.HIT for key in shared)
        hierarchy.prepare_load(shared, request)
        hierarchy.complete_load(shared, request)
    hierarchy.end_step()
    own = keys_of("own", 100)
    assert len(hierarchy.prepare_store(own, second).slots) == 100
    hierarchy.complete_store(own, second)
    hierarchy.finish_request(first)
    assert len(hierarchy.prepare_store(keys_of("new", 4), Request("third")).slots) == 4
