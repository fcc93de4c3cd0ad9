"""Slots: one buffer, several sizes; derived counts equal what a recount finds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from undercroft.errors import Bug, ConfigError
from undercroft.hierarchy.slots import Slots, SlotState, slot_bytes_for


def ready(slots: Slots, total: int) -> Slots:
    slots.set_ready_bytes(total)
    return slots


def test_one_size_loses_no_byte() -> None:
    """With one size class, n slots of memory hold n chunks."""
    slots = ready(Slots(16 * 8192, [8192]), 16 * 8192)
    taken = [slots.take(0) for _ in range(16)]
    assert sorted(slots.offset(s) for s in taken) == [i * 8192 for i in range(16)]
    assert slots.take(0) == -1


def test_payload_is_rounded_to_pages() -> None:
    """A slot is a whole number of 4 KiB pages."""
    assert [slot_bytes_for(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_memory_that_does_not_exist_yet_is_not_handed_out() -> None:
    """Only the ready prefix of the buffer is used, and it grows."""
    slots = Slots(8 * 4096, [4096])
    assert slots.take(0) == -1
    slots.set_ready_bytes(2 * 4096 + 100)
    assert [slots.take(0) >= 0 for _ in range(3)] == [True, True, False]
    slots.set_ready_bytes(8 * 4096)
    assert slots.num_free(0) == 6


def test_too_small_a_buffer_says_both_numbers() -> None:
    """A buffer must hold a chunk of each class; the message has both numbers."""
    with pytest.raises(ConfigError, match=r"8192 bytes .*20480 bytes"):
        Slots(8192, [4096, 16384])


def test_misuse_is_a_bug() -> None:
    """Giving back a free or pinned slot, or unpinning an unpinned one, is our fault."""
    slots = ready(Slots(4 * 4096, [4096]), 4 * 4096)
    slot = slots.take(0)
    slots.pin(slot)
    with pytest.raises(Bug):
        slots.give_back(slot)
    slots.unpin(slot)
    with pytest.raises(Bug):
        slots.unpin(slot)
    slots.give_back(slot)
    with pytest.raises(Bug):
        slots.give_back(slot)


def test_an_empty_extent_serves_another_class() -> None:
    """Bytes one class returned are there for the other."""
    total = 64 * 36864
    slots = ready(Slots(total, [36864, 4096]), total)
    large = []
    while (slot := slots.take(0)) >= 0:
        large.append(slot)
    assert slots.take(1) == -1
    for slot in large:
        slots.give_back(slot)
    small = []
    while (slot := slots.take(1)) >= 0:
        small.append(slot)
    assert len(small) * 4096 >= 0.9 * total


@pytest.mark.parametrize("sizes", [[4096], [4096, 12288]], ids=["one size", "two sizes"])
def test_many_at_once_are_as_one_by_one(sizes: list[int]) -> None:
    """Taking, listing, pinning, unpinning and recycling: the same states and counts."""
    total = 64 * 12288
    one, many = (ready(Slots(total, sizes), total) for _ in range(2))
    taken = [one.take(0) for _ in range(20)]
    assert many.take_all(0, 20) == taken
    for slots in (one, many):
        for slot in taken[3:9]:
            slots.make_fresh([slot])
            slots.make_ready([slot])
            slots.give_back(slot)
    again = [one.take(0) for _ in range(10)]
    assert many.take_all(0, 10) == again
    live = taken[:3] + taken[9:] + again
    for slot in live:
        one.set_state(slot, SlotState.READY)
        one.pin(slot)
        one.pin(slot)
    many.make_fresh(live)
    many.make_ready(live)
    many.pin_all(live)
    many.pin_all(live)
    left = [slot for slot in live[:8] if not one.unpin(slot) and not one.unpin(slot)]
    assert left == []
    for slot in live[:4]:
        one.unpin(slot)
    many.unpin_all(live[:8])
    assert many.unpin_all(live[:4]) == live[:4]
    assert (one.states, one.pins, one.num_pinned) == (many.states, many.pins, many.num_pinned)
    assert one.num_evictable(0) == many.num_evictable(0) == 4
    many.recycle(live[:4])
    assert many.num_evictable(0) == 0
    with pytest.raises(Bug):
        many.unpin_all(live[:1])


@pytest.mark.parametrize("sizes", [[4096], [4096, 12288]], ids=["one size", "two sizes"])
def test_many_go_back_as_one_by_one(sizes: list[int]) -> None:
    """What is given back together can be taken again, and nothing else can."""
    total = 64 * 12288
    one, many = (ready(Slots(total, sizes), total) for _ in range(2))
    live = [one.take(0) for _ in range(20)]
    assert many.take_all(0, 20) == live
    many.give_back_all(live[:4])
    for slot in live[:4]:
        one.give_back(slot)
    for size_class in range(len(sizes)):
        assert one.num_free(size_class) == many.num_free(size_class)
    many.pin(live[4])
    for wrong in live[:1], live[4:5]:
        with pytest.raises(Bug):
            many.give_back_all(wrong)
    everything = many.take_all(0, 10**6)
    assert len(everything) == len(set(everything))
    assert not set(everything) & set(live[4:])
    assert (many.num_free(0), many.take_all(0, 1)) == (0, [])
    assert many.num_taken(0) == 16 + len(everything)
    assert many.offsets(everything) == [many.offset(slot) for slot in everything]


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_what_a_recount_finds(seed: int) -> None:
    """No overlap of slots ever; free, evictable and pinned counts match a recount."""
    rng = random.Random(seed)
    sizes = [36864, 4096, 12288]
    total = 40 * sum(sizes)
    slots = ready(Slots(total, sizes), total)
    live: dict[int, int] = {}
    for _ in range(3000):
        kind = rng.random()
        if kind < 0.5:
            size_class = rng.randrange(3)
            free = slots.num_free(size_class)
            slot = slots.take(size_class)
            assert (slot >= 0) == (free > 0)
            if slot >= 0:
                live[slot] = size_class
        elif live:
            slot = rng.choice(list(live))
            if kind < 0.65:
                slots.set_state(slot, rng.choice([SlotState.READY, SlotState.DRAINING]))
            elif kind < 0.75:
                slots.pin(slot)
            elif slots.pins[slot]:
                slots.unpin(slot)
            else:
                slots.give_back(slot)
                del live[slot]
        for size_class in range(3):
            mine = [s for s, c in live.items() if c == size_class]
            assert slots.num_taken(size_class) == len(mine)
            unpinned = [s for s in mine if slots.states[s] == SlotState.READY and not slots.pins[s]]
            assert slots.num_evictable(size_class) == len(unpinned)
    assert slots.num_pinned == sum(1 for s in live if slots.pins[s])
    spans = sorted((slots.offset(s), slots.offset(s) + sizes[c]) for s, c in live.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert not spans or spans[-1][1] <= total
