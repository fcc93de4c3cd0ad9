"""Rare orders of events, each of which once went wrong or easily could."""

from __future__ import annotations

import threading

import pytest
from tests.hierarchy.invariants import check_all, check_no_orphans, check_quiet
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


def fill(world: World, slots: list[int], keys: list[ChunkKey]) -> None:
    for key, slot in zip(keys, slots, strict=True):
        world.hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)


def await_idle(world: World) -> None:
    """Until no tier has anything to do, and everything is booked."""
    for level in world.hierarchy.levels:
        assert level.transfers.drain(world.clock.now_s() + 60)
    world.hierarchy.poll()


def test_an_old_store_does_not_vouch_for_a_new_slot(worlds: list[World]) -> None:
    """Another replica resets while a store is under way, and the key is offered again: the first
    store's acknowledgement says nothing about the second slot, whose bytes have not come yet."""
    tier = MemoryTier(64 * CHUNK_BYTES, name="below")
    world = make_world(16, [tier])
    worlds.append(world)
    hierarchy, keys = world.hierarchy, keys_of("a", 2)
    first, second, reader = Request("first"), Request("second"), Request("reader")
    plan = hierarchy.prepare_store(keys, first)
    tier.raise_epoch()
    hierarchy.end_step()
    again = hierarchy.prepare_store(keys, second)
    fill(world, plan.slots, keys)
    hierarchy.complete_store(set(keys), first)
    for key in keys:
        if hierarchy.lookup(key, reader) is Lookup.HIT:
            (slot,) = hierarchy.prepare_load([key], reader)
            assert bytes(hierarchy.view(slot)) == content_of(key, CHUNK_BYTES)
            hierarchy.complete_load([key], reader)
    fill(world, again.slots, again.keys)
    hierarchy.complete_store(set(again.keys), second)
    for request in (first, second, reader):
        hierarchy.finish_request(request)
    world.engine.settle()
    check_quiet(hierarchy)


def test_a_failed_delete_leaves_no_orphan(worlds: list[World]) -> None:
    """A chunk that could not be deleted can be evicted another time; the level never fills up
    with chunks that nobody knows."""
    memory = MemoryTier(8 * CHUNK_BYTES, name="below")
    fault = Injector(Effect.ERROR, on_verb("delete"))
    tier = FaultyTier(memory, fault)
    world = make_world(64, [tier], transfer_limits=TransferLimits(retry_pause_s=0.001))
    worlds.append(world)
    for n in range(4):
        world.engine.run(keys_of(f"r{n}-", 4))
    assert fault.num_fired > 0
    fault.active = False
    await_idle(world)
    check_no_orphans(world.hierarchy)


def test_a_write_that_ends_late_leaves_no_orphan(worlds: list[World]) -> None:
    """A write given up at its deadline may still succeed: then the level can evict the chunk."""
    clock = ManualClock()
    memory = MemoryTier(8 * CHUNK_BYTES, name="below")
    tier = FaultyTier(memory, Injector(Effect.HANG, on_verb("write_from")))
    world = make_world(16, [tier], clock=clock, write_deadline_s=1.0)
    worlds.append(world)
    keys = keys_of("a", 1)
    world.engine.submit(keys)
    for _ in range(4):
        world.engine.step()
    tier.await_hung(1)
    clock.advance(1.5)
    world.engine.step()
    assert world.counters.dropped_chunks["below", "timeout"] == 1
    tier.release()
    await_idle(world)
    assert memory.has(keys[0])
    check_quiet(world.hierarchy)


class WithoutEpochs:
    """A stranger's tier: an index, and nothing else."""

    def __init__(self) -> None:
        self.name = "below"
        self.inner = MemoryTier(64 * CHUNK_BYTES)
        self.contains, self.has = self.inner.contains, self.inner.has
        self.read_into, self.write_from = self.inner.read_into, self.inner.write_from
        self.delete, self.close = self.inner.delete, self.inner.close
        self.evictable = self.inner.evictable


def test_a_reset_empties_a_tier_without_epochs(worlds: list[World]) -> None:
    """Nothing old is served from a tier that cannot be made void at once."""
    world = make_world(16, [WithoutEpochs()])
    worlds.append(world)
    keys = keys_of("a", 4)
    world.engine.run(keys)
    world.engine.version += 1
    world.engine.reset()
    assert world.engine.run(keys).num_hits == 0
    assert world.engine.run(keys).num_hits == 4


class BrokenEpoch(MemoryTier):
    """Cannot raise its epoch, and says so in its own words."""

    broken = True

    def raise_epoch(self) -> int:
        if self.broken:
            raise OSError(30, "read-only")
        return super().raise_epoch()


def test_a_tier_that_cannot_be_voided_stays_unused(worlds: list[World]) -> None:
    """While the epoch cannot be raised nothing is read from the tier; then it is used again."""
    tier = BrokenEpoch(64 * CHUNK_BYTES, name="below")
    world = make_world(16, [tier], limits=Limits(drain_deadline_s=0.2))
    worlds.append(world)
    keys = keys_of("a", 4)
    world.engine.run(keys)
    world.engine.version += 1
    assert not world.hierarchy.reset()
    assert world.engine.run(keys).num_hits == 0
    assert not world.hierarchy.levels[0].usable
    tier.broken = False
    assert world.hierarchy.levels[0].wait_void(60.0)
    assert world.hierarchy.levels[0].usable
    check_all(world.hierarchy)


def test_nothing_old_is_written_into_the_epoch_of_another(worlds: list[World]) -> None:
    """Between another replica's reset and the moment we see it, writes of ours may come that are
    older than the reset: the tier refuses them, and what comes later is written."""
    tier = MemoryTier(64 * CHUNK_BYTES, name="below")
    world = make_world(16, [tier])
    worlds.append(world)
    keys = keys_of("a", 3)
    world.engine.run(keys)
    tier.raise_epoch()
    for key in keys:
        assert world.hierarchy.levels[0].offer(key, memoryview(content_of(key, CHUNK_BYTES)))
    await_idle(world)
    assert not any(tier.has(key) for key in keys)
    assert world.counters.declined_chunks["below", "before_reset"] == 3
    world.engine.step()
    assert world.engine.run(keys).num_hits == 0
    assert all(tier.has(key) for key in keys)
    check_quiet(world.hierarchy)


def test_after_a_rest_nothing_from_before_anothers_reset_is_served(worlds: list[World]) -> None:
    """An idle engine makes no steps, so it has not seen the reset when the next request comes."""
    tier = MemoryTier(64 * CHUNK_BYTES, name="below")
    world = make_world(16, [tier])
    worlds.append(world)
    keys = keys_of("a", 4)
    world.engine.run(keys)
    tier.raise_epoch()
    world.engine.version += 1
    assert world.engine.run(keys).num_hits == 0
    assert world.engine.run(keys).num_hits == 4
    check_quiet(world.hierarchy)


def test_a_write_asked_for_before_anothers_reset_is_void(worlds: list[World]) -> None:
    """Queued, or in the tier already, when the other replica raises the epoch: it leaves nothing
    behind, however late it ends, and the level is used again at once."""
    memory = MemoryTier(64 * CHUNK_BYTES, name="below")
    tier = FaultyTier(
        memory, Injector(Effect.HANG, lambda call: call.verb == "write_from" and call.index < 2)
    )
    world = make_world(32, [tier], num_threads=3)
    worlds.append(world)
    old, new = keys_of("old", 6), keys_of("new", 3)
    world.engine.submit(old)
    for _ in range(3):
        world.engine.step()
    tier.await_hung(2)
    memory.raise_epoch()
    tier.release()
    await_idle(world)
    assert not any(memory.has(key) for key in old)
    world.engine.version += 1
    world.engine.step()
    world.engine.run(new)
    assert all(memory.has(key) for key in new)
    assert world.engine.run(old).num_hits == 0
    check_quiet(world.hierarchy)


class CountedEpoch(MemoryTier):
    """Cannot raise its epoch while told so."""

    num_raised = 0
    is_stuck = False

    def raise_epoch(self) -> int:
        if self.is_stuck:
            raise OSError(5, "injected")
        self.num_raised += 1
        return super().raise_epoch()


def test_a_hung_tier_is_voided_at_once_and_once(worlds: list[World]) -> None:
    """Without waiting for the hung write, which comes too late for the new epoch: each raise makes
    every other replica forget everything."""
    clock = ManualClock()
    memory = CountedEpoch(64 * CHUNK_BYTES, name="below")
    tier = FaultyTier(memory, Injector(Effect.HANG, on_verb("write_from")))
    world = make_world(16, [tier], clock=clock, limits=Limits(drain_deadline_s=0.05))
    worlds.append(world)
    world.engine.submit(keys_of("a", 1))
    for _ in range(3):
        world.engine.step()
    tier.await_hung(1)
    assert world.hierarchy.reset()
    assert world.hierarchy.levels[0].usable
    clock.advance(1.1)
    tier.release()
    await_idle(world)
    world.engine.step()  # publishes what was dropped
    assert memory.num_raised == 1
    assert memory.used_bytes() == 0
    check_quiet(world.hierarchy)


def test_a_hung_tier_without_epochs_is_emptied_once_more(worlds: list[World]) -> None:
    """Nobody can tell it that the hung write is late, so what that wrote is deleted after it."""
    clock = ManualClock()
    bare = WithoutEpochs()
    tier = FaultyTier(bare, Injector(Effect.HANG, on_verb("write_from")))
    world = make_world(16, [tier], clock=clock, limits=Limits(drain_deadline_s=0.05))
    worlds.append(world)
    world.engine.submit(keys_of("a", 1))
    for _ in range(3):
        world.engine.step()
    tier.await_hung(1)
    assert not world.hierarchy.reset()
    for _ in range(6):
        clock.advance(1.1)
        threading.Event().wait(0.12)
    assert not world.hierarchy.levels[0].usable
    tier.release()
    assert world.hierarchy.levels[0].wait_void(60.0)
    assert not list(bare.evictable())


def test_a_reset_that_is_due_is_not_forgotten_over_that_of_another(worlds: list[World]) -> None:
    """Our epoch cannot be raised yet, and a replica resets another level: ours stays unused."""
    due, other = CountedEpoch(64 * CHUNK_BYTES, name="due"), MemoryTier(64 * CHUNK_BYTES)
    world = make_world(16, [due, other], limits=Limits(drain_deadline_s=0.2))
    worlds.append(world)
    world.engine.run(keys_of("a", 3))
    due.is_stuck = True
    assert not world.hierarchy.reset()
    other.raise_epoch()
    world.engine.step()
    threading.Event().wait(0.1)
    assert not world.hierarchy.levels[0].usable
    due.is_stuck = False
    assert world.hierarchy.levels[0].wait_void(60.0)
    world.engine.step()
    assert due.num_raised == 1
    assert world.hierarchy.levels[0].usable
    check_quiet(world.hierarchy)


def test_a_late_read_of_the_old_does_not_disturb_the_new(worlds: list[World]) -> None:
    """After a reset the key is read again from another level; the old read's end changes nothing,
    and whoever waits keeps waiting for the right one."""
    clock = ManualClock()
    near = FaultyTier(
        MemoryTier(64 * CHUNK_BYTES, name="near"), Injector(Effect.HANG, on_verb("read_into"))
    )
    keys = keys_of("a", 2)
    for key in keys:
        near.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    far_hang = Injector(Effect.HANG, on_verb("read_into"))
    far_hang.active = False
    far = FaultyTier(MemoryTier(64 * CHUNK_BYTES, name="far"), far_hang)
    world = make_world(16, [near, far], clock=clock, limits=Limits(drain_deadline_s=0.05))
    worlds.append(world)
    world.engine.submit(keys)
    world.engine.step()
    near.await_hung(2)
    world.engine.reset()
    assert all(level.wait_void(60.0) for level in world.hierarchy.levels)
    for key in keys:
        far.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    far_hang.active = True
    for _ in range(2):
        world.engine.step()
    promotions = dict(world.hierarchy.restores._by_key)
    near.release()
    assert world.hierarchy.levels[0].transfers.drain(clock.now_s() + 10)
    world.hierarchy.poll()
    assert world.hierarchy.restores._by_key == promotions
    far.release()
    await_idle(world)
    world.engine.settle()
    assert world.counters.loaded_chunks == 2
    check_all(world.hierarchy)


def test_a_request_behind_a_store_waits_for_its_turn(worlds: list[World]) -> None:
    """Having met a chunk that is being filled first does not cost a request its place in line."""
    clock = ManualClock()
    tier = MemoryTier(64 * CHUNK_BYTES, name="below")
    keys = keys_of("a", 9)
    for key in keys[1:]:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    world = make_world(9, [tier], clock=clock)
    worlds.append(world)
    hierarchy = world.hierarchy
    writer = Request("writer")
    plan = hierarchy.prepare_store([keys[0], *keys_of("other", 4)], writer)
    entry = world.engine.submit(keys)
    world.engine.step()
    assert entry.request.admit_by_s == clock.now_s() + hierarchy.restores.waits.deadline_s / 2
    assert not entry.request.denied
    fill(world, plan.slots, plan.keys)
    hierarchy.complete_store(set(plan.keys), writer)
    hierarchy.finish_request(writer)
    world.engine._between_steps = lambda: await_idle(world)
    world.engine.settle()
    assert entry.num_hits == 9
