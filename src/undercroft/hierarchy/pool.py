"""Level 0: which key is in which slot, who may be evicted, and who goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Reversible, Sequence
from itertools import islice

import numpy as np

from undercroft.admission.base import Admission, Observing
from undercroft.hierarchy.slots import Slots, SlotState
from undercroft.key_table import SHARD_SHIFT, KeyTable
from undercroft.keys import ChunkKey
from undercroft.policies.base import Evicting, EvictionPolicy, InRuns, InsertingMany, Learning

__all__ = ["Pool"]

_DRAINING, _READY, _FRESH = map(int, (SlotState.DRAINING, SlotState.READY, SlotState.FRESH))

_MAX_SKIPPED = 512
"""Pinned keys one search for a victim may pass over; keeps a single call short. They are moved out
of the way, so the next search goes on behind them."""
_MAX_SKIPPED_BEFORE_RUNS = 256
"""The same, of a policy that can be looked through by runs afterwards."""
_WALKS = ((1, 64), (16, 256))
"""Then: of so many runs each first key is looked at, of every run and then of every nth."""
_MAX_AHEAD, _AHEAD_SHARE, _AHEAD_AT_ONCE = 1024, 1024, 512
"""Slots that are kept free once the pool is full: so many, but only this part of all, and so many
more a call. What one step stores then seldom waits for an eviction."""
_MAX_RECLAIMED = 64
"""Extents that one call may take from other size classes."""


class Pool:
    """The slot table of level 0.

    A key is in the table from the moment its slot is FILLING until the slot is evicted, dropped or
    drained. Policies know READY keys only.

    Args:
        slots: Geometry, states and pins.
        make_policy: Called once per size class with the number of slots the class could have.
        class_of: The size class of a key.
        on_evict: Told the keys that leave by choice of a policy.
        admission: Asked once per offer of a key; None admits everything.

    Threads: one (the scheduler's). Cost: O(1) per call, amortized.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        make_policy: Callable[[int], EvictionPolicy],
        class_of: Callable[[ChunkKey], int],
        on_evict: Callable[[Sequence[ChunkKey]], None],
        admission: Admission | None = None,
    ) -> None:
        self.slots = slots
        self._admission = admission
        self.table = KeyTable()
        self.class_of = class_of
        self._on_evict = on_evict
        # Who is in a slot is asked for only when an extent changes its class. An object array,
        # because the garbage collector does not walk through one.
        self._many = len(slots.slot_bytes) > 1
        self._owners = np.full(len(slots.states) if self._many else 0, None, dtype=object)
        self._num_ahead = 0 if self._many else min(_MAX_AHEAD, len(slots.states) // _AHEAD_SHARE)
        self._was_full = False
        self._policies = [make_policy(slots.capacity(c)) for c in range(len(slots.slot_bytes))]
        self._learning = [each if isinstance(each, Learning) else None for each in self._policies]
        self.learns = any(self._learning)
        """Whether a policy wants to be told of requests."""
        self._evicting = [each if isinstance(each, Evicting) else None for each in self._policies]
        first = self._policies[0]
        self._inserting_many = first if isinstance(first, InsertingMany) else None
        self._in_runs = [each if isinstance(each, InRuns) else None for each in self._policies]

    def find(self, key: ChunkKey) -> int:
        """The slot that holds or awaits `key`; -1 if there is none."""
        return self.table.get(key)

    def absent(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of `keys` that are not here, each once, in the order given."""
        shards = self.table.shards
        return [key for key in dict.fromkeys(keys) if key not in shards[hash(key) >> SHARD_SHIFT]]

    def admitted(self, offered: Sequence[ChunkKey], absent: list[ChunkKey]) -> list[ChunkKey]:
        """Those of `absent` that may come in. Chunks `offered` that are here count as seen, too."""
        admission = self._admission
        if admission is None:
            return absent
        slot_bytes, shards = self.slots.slot_bytes, self.table.shards
        observing = admission if isinstance(admission, Observing) else None
        if observing is not None:
            observing.on_begin()
        allowed = {}
        for key in dict.fromkeys(offered):
            if observing is not None and key in shards[hash(key) >> SHARD_SHIFT]:
                observing.on_use(key)
            else:
                allowed[key] = admission.admit(key, slot_bytes[self.class_of(key)])
        return [key for key in absent if allowed[key]]

    def available(self, size_class: int) -> int:
        """Slots of `size_class` that `allocate` could hand out now, stealing left aside."""
        return self.slots.num_free(size_class) + self.slots.num_evictable(size_class)

    def allocate(self, keys: Sequence[ChunkKey], keep: Container[ChunkKey] = ()) -> list[int]:
        """A FILLING slot for each of `keys`, evicting if need be, but none of `keep`.

        Returns:
            Shorter than `keys` when everything left is pinned or filling: the first ones got one.
        """
        if not self._many:
            slots = self.slots.take_all(0, len(keys))
            if len(slots) < len(keys):
                self._was_full = True
                slots += self._evict(0, len(keys) - len(slots), keep)
            shards = self.table.shards
            for key, slot in zip(keys, slots, strict=False):
                shards[hash(key) >> SHARD_SHIFT][key] = slot
            return slots
        reuse = self._make_room(keys, keep)
        slots = []
        for key in keys:
            slot = self._take_or_steal(self.class_of(key), reuse)
            if slot < 0:
                break
            self.table.set(key, slot)
            self._owners[slot] = key
            slots.append(slot)
        for spare in reuse.values():
            for slot in spare:
                self.slots.give_back(slot)
        return slots

    def evict_ahead(self) -> None:
        """Once a step: of a pool that has been full, evict some before a store waits for it.

        Cost: some 0.8 ms at most.
        """
        if self._was_full and self._num_ahead:
            count = min(_AHEAD_AT_ONCE, self._num_ahead - self.slots.num_free(0))
            if count > 0:
                self.slots.give_back_all(self._evict(0, count, ()))

    def _take_or_steal(self, size_class: int, reuse: dict[int, list[int]]) -> int:
        spare = reuse.get(size_class)
        slot = spare.pop() if spare else self.slots.take(size_class)
        if slot < 0 and self._steal_extent(size_class):
            return self.slots.take(size_class)
        return slot

    def _make_room(
        self, keys: Sequence[ChunkKey], keep: Container[ChunkKey]
    ) -> dict[int, list[int]]:
        """Evict as many chunks of each size class as `keys` lack slots; their slots, by class."""
        counts: Counter[int] = Counter(map(self.class_of, keys))
        slots = self.slots
        needed = self._extents_needed(counts)
        left = slots.num_spare_extents - sum(needed.values())
        room: dict[int, list[int]] = {}
        for size_class, count in counts.items():
            # Extents go first to those that have nothing to evict; the others share the rest.
            lacking = count - slots.num_owned_free(size_class)
            more = min(max(0, left), slots.extents_for(size_class, lacking) - needed[size_class])
            left -= more
            missing = lacking - (needed[size_class] + more) * slots.per_extent(size_class)
            if missing > 0:
                room[size_class] = self._evict(size_class, missing, keep)
        return room

    def _extents_needed(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Extents each class lacks for `counts` when it has evicted what it can."""
        slots = self.slots
        return {
            c: slots.extents_for(c, n - slots.num_owned_free(c) - slots.num_evictable(c))
            for c, n in counts.items()
        }

    def fits(self, counts: Mapping[int, int]) -> bool:
        """Whether `allocate` has so many slots of each size class at once, without stealing."""
        return sum(self._extents_needed(counts).values()) <= self.slots.num_spare_extents

    def reclaim(self, counts: Mapping[int, int]) -> bool:
        """Take unused extents from other classes until `counts` fit; whether any was taken.

        Bounded: what is still missing is for another call.
        """
        for num_taken in range(_MAX_RECLAIMED):
            short = [c for c, n in self._extents_needed(counts).items() if n]
            if self.fits(counts) or not any(map(self._steal_extent, short)):
                return num_taken > 0
        return True

    def make_ready(self, key: ChunkKey, slot: int) -> None:
        """The bytes of `key` are in its slot, and its policy may name it as a victim."""
        self.slots.set_state(slot, SlotState.READY)
        self._policies[self.class_of(key)].on_insert(key)

    def list_fresh(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Those of `keys` whose `slots` are FRESH may be evicted from now on, in this order."""
        states, class_of, policies = self.slots.states, self.class_of, self._policies
        if [slot for slot in slots if states[slot] != _FRESH]:
            listed = [i for i, slot in enumerate(slots) if states[slot] == _FRESH]
            keys, slots = [keys[i] for i in listed], [slots[i] for i in listed]
        self.slots.make_ready(slots)
        if not self._many:
            if self._inserting_many is not None:
                self._inserting_many.on_insert_all(keys)
                return
            on_insert = policies[0].on_insert
            for key in keys:
                on_insert(key)
            return
        for key in keys:
            policies[class_of(key)].on_insert(key)

    def learn(self, keys: Sequence[ChunkKey], now_s: float, *, kind: int, num_told: int) -> None:
        """See `undercroft.hierarchy.telling.Learner`."""
        policy = self._learning[self.class_of(keys[0])]
        if policy is not None:
            policy.on_request(keys, now_s, kind, num_told)

    def list_told(self, keys: Collection[ChunkKey]) -> None:
        """`undercroft.hierarchy.fresh.Fresh` does that, a bounded number at once."""

    def touch(self, keys: Reversible[ChunkKey]) -> None:
        """`keys`, a prefix from the root on, were used; the deepest ends up the oldest of them."""
        if all(self._learning):
            return  # `learn` has said so
        shards, states = self.table.shards, self.slots.states
        for key in reversed(keys):
            slot = shards[hash(key) >> SHARD_SHIFT].get(key, -1)
            if slot >= 0 and states[slot] == _READY:
                self._policies[self.class_of(key) if self._many else 0].on_hit(key)

    def abandon(self, key: ChunkKey, slot: int, *, buffer_free: bool) -> None:
        """The fill of `slot` failed. It drains first if somebody may still write into it."""
        self.table.pop(key)
        if buffer_free:
            self.slots.give_back(slot)
        else:
            self.slots.set_state(slot, SlotState.DRAINING)

    def void(self, key: ChunkKey, slot: int) -> None:
        """`key` must not be served again; its slot drains until its last user is gone."""
        self.table.pop(key)
        self._policies[self.class_of(key)].on_drop(key)
        filling = self.slots.states[slot] == SlotState.FILLING
        self.slots.set_state(slot, SlotState.DRAINING)
        if not filling and self.slots.pins[slot] == 0:
            self.slots.give_back(slot)

    def unpin(self, slot: int) -> None:
        """Take a pin away; a draining slot goes back with its last pin."""
        if self.slots.unpin(slot) == 0 and self.slots.states[slot] == SlotState.DRAINING:
            self.slots.give_back(slot)

    def unpin_all(self, slots: Sequence[int]) -> None:
        """`unpin` each of `slots`."""
        states = self.slots.states
        for slot in self.slots.unpin_all(slots):
            if states[slot] == _DRAINING:
                self.slots.give_back(slot)

    def keys(self) -> Iterator[tuple[ChunkKey, int]]:
        """Every key in the table with its slot. O(keys)."""
        for key, slot in self.table.items():
            yield ChunkKey(key), slot

    def residency(self) -> tuple[int, int]:
        """Bytes of taken slots, bytes of all slots."""
        slots = self.slots
        used = sum(slots.num_taken(c) * size for c, size in enumerate(slots.slot_bytes))
        return used, slots.num_extents * slots.extent_bytes

    def _evict(self, size_class: int, count: int, keep: Container[ChunkKey]) -> list[int]:
        """Evict up to `count` unpinned chunks, coldest first; their slots, FILLING by now."""
        slots, policy, in_runs = self.slots, self._policies[size_class], self._in_runs[size_class]
        if slots.num_evictable(size_class) == 0:
            return []
        if (evicting := self._evicting[size_class]) is not None:
            return self._let_evict(evicting, count, keep)
        max_skipped = _MAX_SKIPPED if in_runs is None else _MAX_SKIPPED_BEFORE_RUNS
        shards, pins = self.table.shards, slots.pins
        victims: list[ChunkKey] = []
        skipped: list[ChunkKey] = []
        freed: list[int] = []
        for key in policy.victims():
            shard = shards[hash(key) >> SHARD_SHIFT]
            slot = shard[key]
            if pins[slot] or key in keep:
                skipped.append(key)
                if len(skipped) == max_skipped:
                    break
                continue
            del shard[key]
            victims.append(key)
            freed.append(slot)
            if len(victims) == count:
                break
        for key in skipped:
            policy.on_hit(key)
        self._tell(victims, policy)
        if in_runs is not None and len(skipped) == max_skipped and len(victims) < count:
            beyond = self._find_beyond(in_runs, count - len(victims), keep)
            freed += [shards[hash(key) >> SHARD_SHIFT].pop(key) for key in beyond]
            self._tell(beyond, policy)
        slots.recycle(freed)
        return freed

    def _let_evict(self, policy: Evicting, count: int, keep: Container[ChunkKey]) -> list[int]:
        """The same, of a policy that does it by itself."""
        pins, shards = self.slots.pins, self.table.shards
        victims = policy.evict(
            count, lambda key: pins[shards[hash(key) >> SHARD_SHIFT][key]] > 0 or key in keep
        )
        freed = [shards[hash(key) >> SHARD_SHIFT].pop(key) for key in victims]
        if victims:
            self._on_evict(victims)
        self.slots.recycle(freed)
        return freed

    def _find_beyond(self, policy: InRuns, count: int, keep: Container[ChunkKey]) -> list[ChunkKey]:
        """Victims from further on, where the oldest are pinned: the first run that has some.

        Cost: 3 us a run that is looked at, 1 ms at most; no objects are kept, so that no garbage
        collection is due.
        """
        find, pins = self.table.get, self.slots.pins
        for stride, num_runs in _WALKS:
            found: list[ChunkKey] = []
            for run in islice(policy.runs(stride), num_runs):
                for key in run:
                    if pins[find(key)] or key in keep:
                        break
                    found.append(key)
                    if len(found) == count:
                        return found
            if found:
                return found
        return []

    def _tell(self, victims: Sequence[ChunkKey], policy: EvictionPolicy) -> None:
        """`victims` have left the table."""
        on_evict = policy.on_evict
        for key in victims:
            on_evict(key)
        if victims:
            self._on_evict(victims)

    def _steal_extent(self, size_class: int) -> bool:
        """Free a whole extent of the class that holds most, coldest first; rare."""
        slots = self.slots
        others = [c for c in range(len(slots.slot_bytes)) if c != size_class]
        others.sort(key=lambda c: slots.num_taken(c) * slots.slot_bytes[c], reverse=True)
        for other in others:
            tried: set[int] = set()
            for key in self._policies[other].victims():
                extent = slots.extent_slots(self.table.get(key))
                if extent.start in tried:
                    continue
                tried.add(extent.start)
                if self._empty_extent(extent, other):
                    return True
                if len(tried) == 16:  # noqa: PLR2004 - bounds the work of one call
                    break
        return False

    def _empty_extent(self, extent: range, size_class: int) -> bool:
        slots = self.slots
        taken = [slot for slot in extent if slots.states[slot]]
        if any(slots.pins[s] or slots.states[s] != SlotState.READY for s in taken):
            return False
        victims = [self._owners[slot] for slot in taken]
        for key in victims:
            self.table.pop(key)
        self._tell(victims, self._policies[size_class])
        for slot in taken:
            slots.give_back(slot)
        return True
