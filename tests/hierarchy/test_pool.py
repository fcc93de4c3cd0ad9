"""Level 0's table: what it does ahead of time, and what it does not."""

from __future__ import annotations

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots
from undercroft.keys import ChunkKey
from undercroft.policies.lru import Lru

NUM = 8192
AHEAD = NUM // 1024


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(8, "big") * 4)


def full_pool(num_slots: int, told: list[ChunkKey]) -> Pool:
    """All slots READY, the smallest number the oldest."""
    slots = Slots(num_slots * 4096, [4096])
    slots.set_ready_bytes(num_slots * 4096)
    pool = Pool(slots, make_policy=Lru, class_of=lambda _: 0, on_evict=told.extend)
    add(pool, range(num_slots))
    return pool


def add(pool: Pool, numbers: range) -> int:
    """Store these; how many found room."""
    keys = [key_of(number) for number in numbers]
    slots = pool.allocate(keys)
    pool.slots.make_fresh(slots)
    pool.list_fresh(keys[: len(slots)], slots)
    return len(slots)


def test_some_slots_are_free_before_they_are_asked_for() -> None:
    """From the first eviction on, and the oldest go first."""
    told: list[ChunkKey] = []
    pool = full_pool(NUM, told)
    pool.evict_ahead()
    assert pool.slots.num_free(0) == 0, "nobody has lacked room yet"
    assert add(pool, range(NUM, NUM + 1)) == 1
    pool.evict_ahead()
    assert pool.slots.num_free(0) == AHEAD
    assert told == [key_of(number) for number in range(1 + AHEAD)]
    assert pool.absent(told) == told
    pool.evict_ahead()
    assert pool.slots.num_free(0) == AHEAD
    assert add(pool, range(NUM + 1, NUM + 1 + AHEAD)) == AHEAD
    assert len(told) == 1 + AHEAD, "these had their slots waiting"
    policy_keys = list(pool._policies[0].victims())
    assert len(policy_keys) == len(pool.table) == NUM


def test_a_small_pool_keeps_nothing_free() -> None:
    """A thousand chunks are too few to leave one out."""
    told: list[ChunkKey] = []
    pool = full_pool(1000, told)
    add(pool, range(1000, 1001))
    pool.evict_ahead()
    assert (len(told), pool.slots.num_free(0)) == (1, 0)


def test_what_is_pinned_stays() -> None:
    """A call passes over a bounded number of pinned chunks, and the next goes on behind them."""
    told: list[ChunkKey] = []
    pool = full_pool(NUM, told)
    pinned = [pool.find(key_of(number)) for number in range(700)]
    pool.slots.pin_all(pinned)
    assert add(pool, range(NUM, NUM + 1)) == 0
    assert pool.is_behind_pins
    pool.evict_ahead()
    assert not pool.is_behind_pins
    assert told == [key_of(number) for number in range(700, 700 + AHEAD)]
    assert [pool.find(key_of(number)) for number in range(700)] == pinned
    assert add(pool, range(NUM, NUM + 1)) == 1
