"""Room is found wherever there is some, however many pinned chunks are the oldest."""

from __future__ import annotations

import pytest

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots
from undercroft.keys import ChunkKey
from undercroft.policies.arc import Arc
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.lru import Lru
from undercroft.testing.mini_engine import chunk_key

NUM_SLOTS, NUM_PINNED = 6000, 5000


def filled(policy: type[EvictionPolicy]) -> tuple[Pool, list[ChunkKey], list[ChunkKey]]:
    """A pool whose oldest chunks are pinned, its keys, and where evicted ones are told."""
    evicted: list[ChunkKey] = []
    slots = Slots(NUM_SLOTS * 4096, (4096,))
    slots.set_ready_bytes(NUM_SLOTS * 4096)
    pool = Pool(slots, make_policy=policy, class_of=lambda _key: 0, on_evict=evicted.extend)
    keys = [chunk_key(f"k{number}") for number in range(NUM_SLOTS)]
    taken = pool.allocate(keys)
    for key, slot in zip(keys, taken, strict=True):
        pool.make_ready(key, slot)
    for slot in taken[:NUM_PINNED]:
        slots.pin(slot)
    return pool, keys, evicted


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_single_stores_find_room_behind_many_pinned_chunks(policy: type[EvictionPolicy]) -> None:
    """Nothing is declined as long as anything can be evicted, and nothing pinned goes."""
    pool, keys, evicted = filled(policy)
    for number in range(NUM_SLOTS - NUM_PINNED):
        assert len(pool.allocate([chunk_key(f"new{number}")])) == 1, f"store {number} declined"
    assert set(evicted) == set(keys[NUM_PINNED:])
    assert pool.allocate([chunk_key("one more")]) == []
    assert len(evicted) == NUM_SLOTS - NUM_PINNED


def test_what_is_behind_goes_in_the_order_of_the_policy() -> None:
    """The oldest of those that can go, nearly: a run of some hundred is taken as a whole."""
    pool, keys, evicted = filled(Lru)
    slots = pool.allocate([chunk_key(f"new{number}") for number in range(200)])
    assert len(slots) == 200
    assert set(evicted) <= set(keys[NUM_PINNED : NUM_PINNED + 400])
    assert len(set(slots)) == 200


def test_what_the_same_call_wants_to_keep_stays() -> None:
    """Neither what is pinned nor `keep` goes, also where the search goes on in strides."""
    pool, keys, evicted = filled(Lru)
    keep = set(keys[NUM_PINNED : NUM_PINNED + 900])
    slots = pool.allocate([chunk_key(f"new{number}") for number in range(100)], keep)
    assert len(slots) == len(evicted)
    assert not keep & set(evicted)
    assert set(evicted) <= set(keys[NUM_PINNED + 900 :])
    assert evicted


def test_one_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many strides and no more: a call stays short, and the next one gets further."""
    monkeypatch.setattr("undercroft.hierarchy.pool._WALKS", ((1, 3),))
    pool, _, evicted = filled(Lru)
    answers = [len(pool.allocate([chunk_key(f"new{number}")])) for number in range(80)]
    assert answers[0] == 0
    assert answers[-20:] == [1] * 20
    assert len(evicted) == sum(answers)


# --- ahead of time -----------------------------------------------------------------------------

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
