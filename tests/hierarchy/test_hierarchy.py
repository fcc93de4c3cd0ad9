"""The hierarchy as an engine sees it: right bytes, bounded waits, no wasted reads.

Most tests are recipes for faults that people met with other offloaders; the comment names what
stock vLLM 0.32 did.
"""

from __future__ import annotations

import pytest
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.policies.arc import Arc
from undercroft.policies.hazard import Hazard
from undercroft.policies.lru import Lru
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import chunk_key, content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(capacity_bytes=1024 * CHUNK_BYTES, name="below")


def filled(tier: MemoryTier, keys: list[ChunkKey], worlds: list[World]) -> None:
    world = make_world(len(keys) + 8, [tier])
    worlds.append(world)
    world.engine.run(keys)
    assert all(tier.has(key) for key in keys)


def test_second_request_hits_level_0(worlds: list[World]) -> None:
    """What one request stored, the next one loads."""
    world = make_world(16)
    worlds.append(world)
    keys = keys_of("a", 10)
    assert world.engine.run(keys).num_hits == 0
    assert world.engine.run(keys).num_hits == 10
    world.assert_quiet()


def test_a_lower_hit_takes_two_lookups(tier: MemoryTier, worlds: list[World]) -> None:
    """PENDING, then HIT: no extra engine step for a local tier."""
    keys = keys_of("a", 12)
    filled(tier, keys, worlds)
    world = make_world(16, [tier], between_steps=lambda: world.wait_for_tiers())  # noqa: PLW0108 - not made yet
    worlds.append(world)
    entry = world.engine.run(keys)
    assert (entry.num_hits, entry.num_asked) == (12, 2)


@pytest.mark.parametrize("make_policy", [Lru, Arc, Hazard])
@pytest.mark.parametrize(("total", "room"), [(20, 16), (64, 60), (64, 16), (17, 16), (33, 16)])
def test_prefix_larger_than_level_0(
    tier: MemoryTier, worlds: list[World], total: int, room: int, make_policy: type[Lru]
) -> None:
    """As much as fits is reused, nothing else is read. (Stock: never answered, or 0 hits.)"""
    keys = keys_of("a", total)
    filled(tier, keys, worlds)
    world = make_world(
        room,
        [tier],
        make_policy=make_policy,
        between_steps=lambda: world.wait_for_tiers(),  # noqa: PLW0108 - not made yet
    )
    worlds.append(world)
    entry = world.engine.run(keys, max_steps=30)
    assert entry.num_hits == room
    assert world.counters.promoted_chunks["below"] == room
    world.assert_quiet()


def test_competing_restores_all_hit(tier: MemoryTier, worlds: list[World]) -> None:
    """Four restores of 12 on 16 slots wait for each other. (Stock: two hit, two get 0.)"""
    prompts = [keys_of(f"r{n}-", 12) for n in range(4)]
    for prompt in prompts:
        filled(tier, prompt, worlds)
    world = make_world(16, [tier])
    worlds.append(world)
    entries = [world.engine.submit(prompt) for prompt in prompts]
    world.engine.settle()
    assert [entry.num_hits for entry in entries] == [12] * 4
    assert world.counters.promoted_chunks["below"] == 48
    world.assert_quiet()


def test_fifty_waiting_requests_do_not_waste_reads(tier: MemoryTier, worlds: list[World]) -> None:
    """50 waiting, room for 2: chunks read <= 1.1 x chunks handed to the engine."""
    prompts = [keys_of(f"r{n}-", 8) for n in range(50)]
    for prompt in prompts:
        filled(tier, prompt, worlds)
    world = make_world(16, [tier], limits=Limits(promote_deadline_s=20.0))
    worlds.append(world)
    for prompt in prompts:
        world.engine.submit(prompt)
    world.engine.settle(max_steps=2000)
    assert world.counters.loaded_chunks >= 0.9 * 400
    assert world.counters.promoted_chunks["below"] <= 1.1 * world.counters.loaded_chunks
    world.assert_quiet()


def test_more_in_one_step_than_fits(worlds: list[World]) -> None:
    """A prefix of the offer is stored; the request brings the rest another time."""
    world = make_world(16)
    worlds.append(world)
    keys = keys_of("a", 40)
    entry = world.engine.run(keys)
    assert entry.num_stored == 16
    assert world.engine.run(keys).num_hits == 16
    world.assert_quiet()


def test_reset_forgets_every_level(tier: MemoryTier, worlds: list[World]) -> None:
    """After a reset nothing old is served, from any level. (Stock: 4 hits of old weights.)"""
    keys = keys_of("a", 4)
    world = make_world(16, [tier])
    worlds.append(world)
    world.engine.run(keys)
    world.engine.version += 1
    world.engine.reset()
    assert world.engine.run(keys).num_hits == 0
    assert world.engine.run(keys).num_hits == 4
    again = make_world(16, [tier])
    worlds.append(again)
    again.engine.version = 1
    assert again.engine.run(keys).num_hits == 4
    world.assert_quiet()


def test_reset_with_stores_in_flight(tier: MemoryTier, worlds: list[World]) -> None:
    """A store that was under way at the reset is never served, and its slots come back."""
    keys = keys_of("a", 8)
    world = make_world(16, [tier])
    worlds.append(world)
    world.engine.submit(keys)
    world.engine.step()
    world.engine.version += 1
    world.engine.reset()
    assert world.hierarchy.pool.slots.num_pinned == 8
    world.engine.settle()
    world.assert_quiet()
    assert world.engine.run(keys).num_hits == 0


def test_another_replica_sees_the_reset(tier: MemoryTier, worlds: list[World]) -> None:
    """A replica that shares the tier drops what it has when another one resets."""
    keys = keys_of("a", 4)
    first, second = make_world(16, [tier]), make_world(16, [tier])
    worlds += [first, second]
    first.engine.run(keys)
    assert second.engine.run(keys).num_hits == 4
    first.engine.reset()
    second.engine.step()
    assert second.engine.run(keys).num_hits == 0


def test_a_hit_stays_until_it_is_loaded(worlds: list[World]) -> None:
    """Between HIT and prepare_load in one step nothing may take the slot away."""
    world = make_world(8)
    worlds.append(world)
    keys = keys_of("a", 8)
    world.engine.run(keys)
    reader, writer = Request("reader"), Request("writer")
    for key in keys:
        assert world.hierarchy.lookup(key, reader) is Lookup.HIT
    assert world.hierarchy.prepare_store(keys_of("b", 8), writer).keys == []
    slots = world.hierarchy.prepare_load(keys, reader)
    for key, slot in zip(keys, slots, strict=True):
        assert bytes(world.hierarchy.view(slot)) == content_of(key, CHUNK_BYTES)
    world.hierarchy.complete_load(keys, reader)
    world.hierarchy.finish_request(reader)
    assert len(world.hierarchy.prepare_store(keys_of("b", 8), writer).keys) == 8


def test_abandoned_hits_are_let_go(worlds: list[World]) -> None:
    """HIT does not imply a load: the next step may evict, and no pin stays behind."""
    world = make_world(8)
    worlds.append(world)
    keys = keys_of("a", 8)
    world.engine.run(keys)
    reader = Request("reader")
    for key in keys:
        world.hierarchy.lookup(key, reader)
    world.hierarchy.end_step()
    world.hierarchy.finish_request(reader)
    world.assert_quiet()
    assert world.engine.run(keys_of("b", 8)).num_stored == 8


def test_an_abort_while_promoting_leaves_nothing_pinned(
    tier: MemoryTier, worlds: list[World]
) -> None:
    """The chunk arrives, unpinned, and later requests have it."""
    keys = keys_of("a", 6)
    filled(tier, keys, worlds)
    world = make_world(8, [tier])
    worlds.append(world)
    entry = world.engine.submit(keys)
    world.engine.step()
    world.engine.abort(entry)
    world.engine.settle()
    world.assert_quiet()
    assert world.engine.run(keys).num_hits == 6


def test_what_was_voided_while_it_is_stored_is_not_stored_twice(worlds: list[World]) -> None:
    """Its store's end is told by key: until then nobody else may store that key."""
    world = make_world(8)
    worlds.append(world)
    hierarchy, keys = world.hierarchy, keys_of("a", 2)
    first, second = Request("first"), Request("second")
    plan = hierarchy.prepare_store(keys, first)
    hierarchy._forget_all()  # as when another engine has reset the level they share
    other = chunk_key("other")
    assert hierarchy.prepare_store([*keys, other], second).keys == [other]
    assert len(hierarchy.stores) == 3
    hierarchy.complete_store(set(keys), first)
    assert hierarchy.lookup(keys[0], second) is Lookup.MISS
    again = hierarchy.prepare_store(keys, second)
    assert again.keys == keys
    assert again.is_whole
    hierarchy.complete_store({*keys, other}, second)
    assert hierarchy.lookup(keys[0], second) is Lookup.HIT
    for request in (first, second):
        hierarchy.finish_request(request)
    assert len(hierarchy.stores) == 0
    assert len(plan.slots) == 2
    world.hierarchy.end_step()
    world.assert_quiet()


def test_stores_of_one_request_end_in_any_order_and_in_parts(worlds: list[World]) -> None:
    """What has not ended is not readable, whatever else has."""
    world = make_world(8)
    worlds.append(world)
    hierarchy, keys = world.hierarchy, keys_of("a", 6)
    request = Request("r")
    for part in (keys[:3], keys[3:]):
        hierarchy.prepare_store(part, request)
    ended: set[ChunkKey] = set()
    for part in ({keys[4]}, {keys[0], keys[2], keys[5]}, {keys[1], keys[3]}):
        hierarchy.complete_store(part, request)
        ended |= part
        found = {key for key in keys if hierarchy.lookup(key, Request("x")) is Lookup.HIT}
        assert found == ended
        assert len(hierarchy.stores) == request.num_storing == len(keys) - len(ended)
    hierarchy.finish_request(request)
    hierarchy.end_step()
    world.assert_quiet()


def test_a_plan_says_whether_it_is_whole(worlds: list[World]) -> None:
    """Not if something that is absent was left out; what is here already does not count."""
    world = make_world(8)
    worlds.append(world)
    hierarchy, keys = world.hierarchy, keys_of("a", 12)
    request = Request("r")
    assert hierarchy.prepare_store(keys[:4], request).is_whole
    assert hierarchy.prepare_store(keys[:5], request).is_whole
    plan = hierarchy.prepare_store(keys[4:], request)
    assert (len(plan.keys), plan.is_whole) == (3, False)
    assert not hierarchy.prepare_store(keys[8:], request).is_whole
    assert hierarchy.prepare_store(keys[:8], request).is_whole, "nothing to do is all done"


def test_a_hit_outlives_the_end_of_an_earlier_step(worlds: list[World]) -> None:
    """What is evicted ahead of the next store is never what a lookup has just promised."""
    world = make_world(2048)
    worlds.append(world)
    hierarchy = world.hierarchy
    for part in range(0, 2050, 205):
        request = Request(f"s{part}")
        plan = hierarchy.prepare_store([chunk_key(f"k{part + n}") for n in range(205)], request)
        hierarchy.complete_store(set(plan.keys), request)
        hierarchy.finish_request(request)
    hierarchy.step_ended()
    assert hierarchy.pool.slots.num_free(0) == 2, "kept free once it has been full"
    hierarchy.prepare_store([chunk_key("x"), chunk_key("y")], Request("taker"))
    oldest = next(iter(hierarchy.pool._policies[0].victims()))
    reader = Request("reader")
    assert hierarchy.lookup(oldest, reader) is Lookup.HIT
    hierarchy.step_ended()
    assert hierarchy.pool.slots.num_free(0) == 2
    assert len(hierarchy.prepare_load([oldest], reader)) == 1


def test_a_failed_copy_is_a_miss(worlds: list[World]) -> None:
    """A store the worker could not copy is never served."""
    world = make_world(8)
    worlds.append(world)
    keys = keys_of("a", 4)
    request = Request("r")
    plan = world.hierarchy.prepare_store(keys, request)
    world.hierarchy.stores._take_failed = lambda: frozenset({plan.store_id})
    world.hierarchy.complete_store(keys, request)
    assert world.hierarchy.lookup(keys[0], Request("s")) is Lookup.MISS
    assert world.counters.dropped_chunks["host", "copy_failed"] == 4
    world.assert_quiet()


def test_events_tell_of_every_level(tier: MemoryTier, worlds: list[World]) -> None:
    """Stored and removed events for level 0 and below; none when they are off."""
    world = make_world(4, [tier])
    worlds.append(world)
    world.engine.run(keys_of("a", 4))
    world.engine.run(keys_of("b", 4))
    events = world.hierarchy.events.take()
    stored = {(e.level, k) for e in events if not e.removed for k in e.keys}
    removed = {(e.level, k) for e in events if e.removed for k in e.keys}
    assert {k for level, k in stored if level == "below"} >= set(keys_of("a", 4))
    assert {k for level, k in removed if level == "host"} == set(keys_of("a", 4))
    silent = make_world(4, [tier], events=False)
    worlds.append(silent)
    silent.engine.run(keys_of("c", 4))
    assert silent.hierarchy.events.take() == []


def test_a_bounded_tier_evicts_by_its_policy(worlds: list[World]) -> None:
    """A full lower level makes room ahead of need and never exceeds its bound."""
    small = MemoryTier(capacity_bytes=40 * CHUNK_BYTES, name="below")
    world = make_world(64, [small])
    worlds.append(world)
    for n in range(12):
        world.engine.run(keys_of(f"r{n}-", 8))
        assert small.used_bytes() <= small.capacity_bytes
    assert all(small.has(key) for key in keys_of("r11-", 8))
    assert not any(small.has(key) for key in keys_of("r0-", 8))
    assert world.counters.evicted_chunks["below"] >= 50


def test_a_burst_waits_for_the_tier(tier: MemoryTier, worlds: list[World]) -> None:
    """More stored in one step than the movers' queue takes: all of it reaches the tier."""
    world = make_world(64, [tier], max_queued_write_bytes=4 * CHUNK_BYTES)
    worlds.append(world)
    keys = keys_of("a", 64)
    world.engine.run(keys)
    assert all(tier.has(key) for key in keys)
    assert not world.counters.declined_chunks


def test_hits_behind_a_gap_do_not_block_what_is_before(
    tier: MemoryTier, worlds: list[World]
) -> None:
    """Level 0 is full of a prompt's end, a lower level has its beginning: the beginning counts."""
    keys = keys_of("a", 24)
    filled(tier, keys[:12], worlds)
    world = make_world(16, [tier])
    worlds.append(world)
    request = Request("r")
    plan = world.hierarchy.prepare_store(keys[8:], request)
    for key, slot in zip(plan.keys, plan.slots, strict=True):
        world.hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
    world.hierarchy.complete_store(plan.keys, request)
    world.hierarchy.finish_request(request)
    entry = world.engine.run(keys)
    assert entry.num_hits == 16
    assert world.counters.promoted_chunks["below"] == 8
    world.assert_quiet()


@pytest.mark.parametrize("make_policy", [Lru, Arc, Hazard])
def test_a_long_prompt_keeps_its_beginning(worlds: list[World], make_policy: type[Lru]) -> None:
    """A prompt of twice level 0, again and again: it never evicts what it continues."""
    world = make_world(16, make_policy=make_policy)
    worlds.append(world)
    keys = keys_of("a", 32)
    hits = [world.engine.run(keys).num_hits for _ in range(5)]
    assert hits == [0, 16, 16, 16, 16]
    world.assert_quiet()


def test_a_request_whose_hits_were_of_no_use_is_forgotten(worlds: list[World]) -> None:
    """Its hits were let go to read what is before them, that failed: nothing of it stays."""
    keys = keys_of("a", 12)
    tier = FaultyTier(
        MemoryTier(64 * CHUNK_BYTES, name="below"), Injector(Effect.ERROR, on_verb("read_into"))
    )
    for key in keys[:8]:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    world = make_world(4, [tier], limits=Limits())  # it waits for room
    worlds.append(world)
    hierarchy, engine = world.hierarchy, world.engine
    engine.run(keys[8:10])
    busy = Request("busy")
    others = keys_of("b", 2)
    for key, slot in zip(others, hierarchy.prepare_store(others, busy).slots, strict=True):
        hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
    hierarchy.complete_store(others, busy)
    engine.step()
    assert all(hierarchy.lookup(key, busy) is Lookup.HIT for key in others)
    hierarchy.prepare_load(others, busy)
    assert engine.run(keys[:10]).num_hits == 0
    assert not hierarchy.holds.requests
    hierarchy.complete_load(others, busy)
    hierarchy.finish_request(busy)
    engine.settle()
    world.assert_quiet()
