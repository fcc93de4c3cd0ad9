"""What must hold of a hierarchy between any two calls. Recounts everything; for tests."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from undercroft.hierarchy.hierarchy import Hierarchy
from undercroft.hierarchy.slots import SlotState


def check_all(hierarchy: Hierarchy) -> None:
    check_slots(hierarchy)
    check_policies(hierarchy)
    check_pins(hierarchy)
    check_levels(hierarchy)


def check_slots(hierarchy: Hierarchy) -> None:
    """Derived counts equal a recount; no slot has two keys; used <= capacity."""
    slots, table = hierarchy.pool.slots, hierarchy.pool.table
    taken = slots.taken()
    for size_class in range(len(slots.slot_bytes)):
        of_class = [slot for slot in taken if slots.class_of(slot) == size_class]
        evictable = [
            s for s in of_class if slots.states[s] == SlotState.READY and not slots.pins[s]
        ]
        assert slots.num_taken(size_class) == len(of_class)
        assert slots.num_evictable(size_class) == len(evictable)
        assert slots.num_free(size_class) >= 0
    assert slots.num_pinned == sum(1 for pins in slots.pins if pins)
    assert {slot for slot, pins in enumerate(slots.pins) if pins} <= set(taken)
    ranges = sorted((slots.offset(slot), slots.offset(slot) + slots.size(slot)) for slot in taken)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "slots overlap"
    used, capacity = hierarchy.pool.residency()
    assert used <= capacity <= len(hierarchy._buffer)
    in_table = [slot for _, slot in table.items()]
    assert len(in_table) == len(set(in_table)), "two keys in one slot"
    for slot in taken:
        assert (slot in set(in_table)) == (slots.states[slot] != SlotState.DRAINING)


def check_policies(hierarchy: Hierarchy) -> None:
    """Each READY key is in exactly its policy; FILLING and FRESH ones are in none."""
    pool = hierarchy.pool
    listed = [set(policy.victims()) for policy in pool._policies]
    ready = [set() for _ in listed]
    for key, slot in pool.table.items():
        if pool.slots.states[slot] == SlotState.READY:
            ready[pool.class_of(key)].add(key)
    assert listed == ready


def check_pins(hierarchy: Hierarchy) -> None:
    """Each pin belongs to a hold, a load, a running request, a cascade, or the quarantine."""
    expected: Counter[int] = Counter()
    assert all(request.holds for request in hierarchy.holds.requests.values()), "holds nothing"
    for request in hierarchy.holds.requests.values():
        expected.update(request.holds.keys())
    for request in hierarchy.loads.requests.values():
        expected.update(request.loading.values())
    expected.update(slot for slot, _ in hierarchy.cascade._by_ticket.values())
    expected.update(hierarchy.cascade._late.values())
    for _, held in hierarchy._draining_until:
        expected.update(held)
    expected.update(hierarchy.fresh.kept_slots())
    pins = Counter({slot: n for slot, n in enumerate(hierarchy.pool.slots.pins) if n})
    assert pins == expected
    loaders = hierarchy.loads.requests.values()
    assert len(hierarchy.loads) == sum(len(r.loading) for r in loaders)


def check_levels(hierarchy: Hierarchy) -> None:
    """A level's tier stays within its bound; every ticket is known to whoever must book it."""
    for level in hierarchy.levels:
        assert level.tier.used_bytes() <= level.tier.capacity_bytes
        booked = {t for name, t in hierarchy.cascade._by_ticket if name == level.name}
        booked |= {t for name, t in hierarchy.restores._by_ticket if name == level.name}
        assert booked <= level.transfers.open
        late = {t for name, t in hierarchy.cascade._late if name == level.name}
        late |= {t for name, t in hierarchy.restores._late if name == level.name}
        assert late == level.transfers.late
        assert all(n >= 0 for n in level._num_writing + level._num_deleting)
        assert sum(level._num_writing) == len(level._writing)
        for size_class, policy in enumerate(level._policies):
            unlisted = level._unlisted.of(size_class)
            assert unlisted.isdisjoint(policy.victims())
            assert all(map(hierarchy.telling.is_untold, unlisted)), "nobody will name it"


def check_no_orphans(hierarchy: Hierarchy) -> None:
    """With nothing under way: whatever a tier holds its level can evict, or its checks delete."""
    for level in hierarchy.levels:
        assert not level.transfers.open
        assert not any(level._num_deleting + level._num_writing)
        stored = {key for key, _ in level.tier.evictable()}
        listed = {key for policy in level._policies for key in policy.victims()}
        stored -= set(getattr(level.tier, "suspects", ()))  # deleted with the next writes
        assert stored <= listed, f"{level.name}: {len(stored - listed)} chunks that nobody evicts"


def check_quiet(hierarchy: Hierarchy, *, orphans: bool = False) -> None:
    """With all requests ended: nothing pinned, filling, draining or waited for.

    `orphans`: the tiers wrote chunks under keys that nobody gave them.
    """
    check_all(hierarchy)
    if not orphans:
        check_no_orphans(hierarchy)
    slots = hierarchy.pool.slots
    assert slots.num_pinned == 0
    states = {SlotState(slots.states[slot]) for slot in slots.taken()}
    assert states <= {SlotState.READY}, f"slots left in states {states}"
    assert not hierarchy.has_pending_work()
    assert not hierarchy.stores._open
    assert not hierarchy.stores._of_request
    assert not hierarchy.stores._voided
    assert not len(hierarchy.stores)
    assert not hierarchy.restores.num_waiting
    assert not hierarchy.fresh._entries
    assert not hierarchy.fresh.is_listing
    assert not hierarchy.telling._untold
    assert not hierarchy.telling._stored
