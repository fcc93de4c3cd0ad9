"""Stores under way: which slots the workers fill for whom, and which of them failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.fresh import MAX_LISTED_AT_ONCE, Fresh
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["LEVEL_0", "StorePlan", "Stores", "failed_chunk"]

LEVEL_0 = "host"
"""The name of level 0 in events, counters and metrics."""

_STORE_ID_BITS = 40
_DRAINING = int(SlotState.DRAINING)
_SEARCHES = (1, 4)
"""How much is made evictable, in turn, until it suffices, in twice what lacks, and
`MAX_LISTED_AT_ONCE` at least: others may still use most of what a request lets go of. Bounded, as
the call is."""


def failed_chunk(store_id: int, chunk_index: int) -> int:
    """What workers report when only one chunk of a store failed; its plain id fails it all."""
    return (chunk_index + 1) << _STORE_ID_BITS | store_id


class StorePlan(NamedTuple):
    """What to store and where.

    Args:
        keys: The accepted keys, in the order offered.
        slots: One slot index for each.
        store_id: Names this store in failure reports from the workers; 0 if `keys` is empty.
        is_whole: Nothing that was offered and is absent was left out.
    """

    keys: list[ChunkKey]
    slots: list[int]
    store_id: int
    is_whole: bool


@dataclass(slots=True)
class _Store:
    id: int
    request: Request
    keys: list[ChunkKey]
    """As planned, in the engine's order."""
    slots: dict[ChunkKey, int]
    """What has not ended yet, in prefix order."""
    failed: set[ChunkKey] = field(default_factory=set)


class Stores:
    """The stores whose end has not been told. Threads: the scheduler's. Cost: O(1) a key.

    Args:
        take_failed: Store ids, or `failed_chunk`s, that the workers could not copy, since the last
            call; None means reports were lost, and every open store counts as failed.
    """

    def __init__(
        self,
        pool: Pool,
        fresh: Fresh,
        *,
        counters: Counters,
        take_failed: Callable[[], frozenset[int] | None],
    ) -> None:
        self._pool = pool
        self._fresh = fresh
        self._counters = counters
        self._take_failed = take_failed
        self._next_id = 1
        self._open: dict[int, _Store] = {}
        self._of_request: dict[str, list[_Store]] = {}
        self._num_chunks = 0
        self._voided: set[ChunkKey] = set()
        """Keys that were voided while they were stored; such a store's end is told by key."""

    def __len__(self) -> int:
        """Chunks under way."""
        return self._num_chunks

    def requests(self) -> list[Request]:
        """Those with chunks under way."""
        return [stores[0].request for stores in self._of_request.values()]

    def prepare(self, keys: Sequence[ChunkKey], request: Request) -> StorePlan:
        """See `Hierarchy.prepare_store`."""
        pool = self._pool
        offered = pool.absent(keys)
        if self._voided:
            offered = [key for key in offered if key not in self._voided]
        absent = pool.admitted(keys, offered)
        if len(absent) < len(offered):
            admitted = set(absent)
            self._decline("not_admitted", [key for key in offered if key not in admitted])
        if not absent:
            return StorePlan([], [], 0, is_whole=not offered)
        in_order = request.in_order(absent)
        slots = pool.allocate(in_order, keep=request.loaded)
        if len(slots) < len(in_order):
            self._search(in_order, slots, request)
        is_whole = len(slots) == len(offered)
        if len(slots) < len(in_order):
            self._decline("full", in_order[len(slots) :])
            in_order = in_order[: len(slots)]
            absent = [key for key in absent if pool.find(key) >= 0]
        if not slots:
            return StorePlan([], [], 0, is_whole=False)
        store_id = self._begin(request, absent, dict(zip(in_order, slots, strict=True)))
        if in_order != absent:
            slot_of = self._open[store_id].slots
            slots = [slot_of[key] for key in absent]
        return StorePlan(absent, slots, store_id, is_whole)

    def _search(self, keys: list[ChunkKey], slots: list[int], request: Request) -> None:
        """Make more evictable until `slots` are as many as `keys`, or for as long as one may."""
        for times_more in _SEARCHES:
            num_lacking = len(keys) - len(slots)
            num_wanted = max(MAX_LISTED_AT_ONCE, times_more * 2 * num_lacking)
            if not (num_lacking and self._fresh.make_room(request.id, num_wanted)):
                break
            slots += self._pool.allocate(keys[len(slots) :], keep=request.loaded)

    def _begin(self, request: Request, keys: list[ChunkKey], slots: dict[ChunkKey, int]) -> int:
        store_id = self._next_id
        self._next_id += 1
        self._open[store_id] = store = _Store(store_id, request, keys, slots)
        self._of_request.setdefault(request.id, []).append(store)
        self._num_chunks += len(slots)
        request.num_storing += len(slots)
        return store_id

    def _decline(self, reason: str, keys: Sequence[ChunkKey]) -> None:
        self._counters.declined_chunks[LEVEL_0, reason] += len(keys)
        self._counters.note(LEVEL_0, "declined", reason, *keys)

    def complete(
        self, keys: AbstractSet[ChunkKey], request: Request, *, success: bool
    ) -> tuple[list[ChunkKey], list[int]]:
        """Book the end of the stores of `keys`; those that worked and their slots, FILLING."""
        self._note_failures()
        ready: list[ChunkKey] = []
        ready_slots: list[int] = []
        for store in list(self._of_request.get(request.id, ())):
            if store.slots.keys().isdisjoint(keys):
                continue
            ended = self._end(store, keys)
            request.num_storing -= len(ended)
            if not success:
                store.failed.update(store.keys)
            self._book(ended, store.failed, ready, ready_slots)
        self._counters.stored_chunks += len(ready)
        self._counters.stored_bytes += self._pool.slots.bytes_of(ready_slots)
        return ready, ready_slots

    def _end(self, store: _Store, keys: AbstractSet[ChunkKey]) -> dict[ChunkKey, int]:
        """Take those of `keys` out of `store`."""
        if store.slots.keys() <= keys:
            ended, store.slots = store.slots, {}
            del self._open[store.id]
            of_request = self._of_request[store.request.id]
            of_request.remove(store)
            if not of_request:
                del self._of_request[store.request.id]
        else:
            ended = {key: slot for key, slot in store.slots.items() if key in keys}
            for key in ended:
                del store.slots[key]
        self._num_chunks -= len(ended)
        if self._voided:
            self._voided.difference_update(ended)
        return ended

    def _book(
        self,
        ended: dict[ChunkKey, int],
        failed: set[ChunkKey],
        ready: list[ChunkKey],
        ready_slots: list[int],
    ) -> None:
        states, slots = self._pool.slots.states, list(ended.values())
        if not failed and _DRAINING not in [states[slot] for slot in slots]:
            ready += ended
            ready_slots += slots
            return
        for key, slot in ended.items():
            if states[slot] == _DRAINING:
                self._pool.slots.give_back(slot)
            elif key in failed:
                self._pool.abandon(key, slot, buffer_free=True)
                self._counters.dropped_chunks[LEVEL_0, "copy_failed"] += 1
                self._counters.note(LEVEL_0, "dropped", "copy_failed", key)
            else:
                ready.append(key)
                ready_slots.append(slot)

    def void_all(self) -> None:
        """What is under way was voided: no key may be stored anew before its store has ended."""
        for store in self._open.values():
            self._voided.update(store.slots)

    def _note_failures(self) -> None:
        reports = self._take_failed()
        if reports is None:  # some were lost
            for store in self._open.values():
                store.failed.update(store.keys)
            return
        for report in reports:
            store_id, number = report & ((1 << _STORE_ID_BITS) - 1), report >> _STORE_ID_BITS
            if store_id in self._open:
                store = self._open[store_id]
                store.failed.update(store.keys[number - 1 : number] if number else store.keys)

    def forget_all(self) -> list[int]:
        """At the engine's reset, after which no end is told: the slots, each pinned once more.

        Their keys are void, if they aren't yet: nobody will say that the bytes are there.
        """
        held: list[int] = []
        for store in self._open.values():
            held.extend(store.slots.values())
            store.request.num_storing = 0
            for key, slot in store.slots.items():
                self._pool.slots.pin(slot)
                if self._pool.find(key) == slot:
                    self._pool.void(key, slot)
        self._open.clear()
        self._of_request.clear()
        self._voided.clear()
        self._num_chunks = 0
        return held
