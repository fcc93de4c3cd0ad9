"""What this process knows to be on disk: which key is where, which slots are free or in use.

Memory only, under one lock held for microseconds; whoever needs I/O does it outside and pins the
slot meanwhile. Reads of the tables by the scheduler thread take no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from undercroft.key_table import KeyTable
from undercroft.tiers.disk.foreign import ForeignSegment, Sighting
from undercroft.tiers.disk.segment import OpenSegment, OwnSegment
from undercroft.tiers.disk.table import Entries

__all__ = ["Holdings", "Reservation"]

_SLOT_MASK = 0xFFFFFFFF
_BATCH = 2048
_MAX_TAKEN = 1024
"""Lost chunks that one call tells of: the scheduler thread books them."""


@dataclass(slots=True)
class Reservation:
    """A slot taken for one write, and what to stamp it with."""

    segment: OwnSegment
    slot: int
    epoch: int
    sequence: int


class Holdings:
    """Tables and segments of one tier. Threads: any; every method takes the lock itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.epoch = 0
        # Replaced under the lock, never changed in place: any thread may go through them meanwhile.
        self.own: Mapping[int, OwnSegment] = {}
        self.foreign: Mapping[int, ForeignSegment] = {}
        self.num_deletes = 0
        self._own_keys = KeyTable()
        self._foreign_keys = KeyTable()
        self._sequence = 0
        self._number = 0
        self._writing: set[bytes] = set()
        self._roomy: dict[int, dict[OwnSegment, None]] = {}
        self._adopted: list[tuple[bytes, int]] = []
        self._lost: deque[tuple[bytes, int, str]] = deque()

    def __contains__(self, key: bytes) -> bool:
        return key in self._own_keys or (bool(self.foreign) and key in self._foreign_keys)

    def __len__(self) -> int:
        return len(self._own_keys)

    def next_number(self) -> int:
        """A number for a segment that no other of this process has had."""
        with self.lock:
            self._number += 1
            return self._number

    def claim(self, key: bytes, record_bytes: int) -> tuple[bool, Reservation | None]:
        """Be the one who writes `key`, and `reserve`; False if it is here or being written."""
        with self.lock:
            if key in self._writing or key in self._own_keys.shard(key):
                return False, None
            if self.foreign and key in self._foreign_keys:
                return False, None
            self._writing.add(key)
            return True, self._take(record_bytes)

    def unclaim(self, key: bytes) -> None:
        """There was no slot for `key`."""
        with self.lock:
            self._writing.discard(key)

    def reserve(self, record_bytes: int) -> Reservation | None:
        """A free slot of that size, pinned, to be settled or abandoned; None if there is none."""
        with self.lock:
            return self._take(record_bytes)

    def _take(self, record_bytes: int) -> Reservation | None:
        """Where there was one lately, or else the first of the oldest segment that has one."""
        roomy = self._roomy.get(record_bytes)
        while roomy:
            segment = next(reversed(roomy))
            slot = -1 if segment.doomed else segment.take_slot()
            if slot >= 0:
                self._sequence += 1
                return Reservation(segment, slot, self.epoch, self._sequence)
            del roomy[segment]
        for segment in self.own.values():
            if segment.header.record_bytes == record_bytes and segment.num_free:
                self._note_room(segment)
                return self._take(record_bytes)
        return None

    def _note_room(self, segment: OwnSegment) -> None:
        size = segment.header.record_bytes
        roomy = self._roomy.get(size)
        if roomy is None:
            roomy = self._roomy[size] = {}
        roomy[segment] = None

    def settle(self, taken: Reservation, key: bytes, payload_bytes: int) -> bool:
        """The write of `key` has reached the disk: it is here, unless voided meanwhile.

        Returns:
            Whether all is done; else see `OwnSegment.end_write`.
        """
        segment, slot = taken.segment, taken.slot
        with self.lock:
            if segment.settle(slot, taken.sequence):
                shard = self._own_keys.shard(key)
                place = shard.get(key, -1)
                if place >= 0:
                    self.own[place >> 32].kill(place & _SLOT_MASK)
                segment.payload_bytes[slot] = payload_bytes
                shard[key] = segment.place(slot)
            self._writing.discard(key)
            return segment.end_write(slot)

    def abandon(self, taken: Reservation, key: bytes) -> bool:
        """The write failed. Returns: as `settle`."""
        with self.lock:
            taken.segment.abandon(taken.slot)
            self._writing.discard(key)
            return taken.segment.end_write(taken.slot)

    def unpin(self, segment: OpenSegment, slot: int) -> bool:
        """One user less; True if the caller must close the segment's files."""
        with self.lock:
            return segment.unpin(slot) if isinstance(segment, OwnSegment) else segment.leave()

    def leave(self, segment: OpenSegment) -> bool:
        """One user less that uses no slot; True if the caller must close the segment's files."""
        with self.lock:
            return segment.leave()

    def pin(self, key: bytes) -> tuple[OpenSegment, int, int] | None:
        """Segment, slot and epoch of `key`, protected from reuse until `unpin`; None if absent."""
        with self.lock:
            place = self._own_keys.get(key)
            if place >= 0:
                own = self.own[place >> 32]
                own.pin(place & _SLOT_MASK)
                return own, place & _SLOT_MASK, self.epoch
            place = self._foreign_keys.get(key)
            if place < 0:
                return None
            segment = self.foreign[place >> 32]
            segment.users += 1
            return segment, place & _SLOT_MASK, self.epoch

    def forget(self, key: bytes, segment: OpenSegment, slot: int) -> bool:
        """`key` is no longer there; False if that was known already. The slot must be pinned."""
        place = segment.place(slot)
        with self.lock:
            if isinstance(segment, OwnSegment):
                if self._own_keys.get(key) != place:
                    return False
                self._own_keys.pop(key)
                segment.kill(slot)
                self._note_room(segment)
                self.num_deletes += 1
                return True
            if self._foreign_keys.get(key) != place:
                return False
            self._foreign_keys.pop(key)
            if isinstance(segment, ForeignSegment):
                segment.bad.add(slot)
            return True

    def void(self, epoch: int) -> None:
        """Everything stored before `epoch` is gone. Never goes back: late news is ignored."""
        with self.lock:
            if epoch <= self.epoch:
                return
            self.epoch = epoch
            self._own_keys, self._foreign_keys = KeyTable(), KeyTable()
            for own in self.own.values():
                own.void()
            for foreign in self.foreign.values():
                foreign.stale = True
                foreign.bad.clear()

    def drop_all(self) -> list[OpenSegment]:
        """Let every segment go, and every key; those whose files may be closed at once.

        In one piece: a chunk stored in between would be left without its segment.
        """
        with self.lock:
            dropped: list[OpenSegment] = [*self.own.values(), *self.foreign.values()]
            for own in self.own.values():
                own.void()
            self._own_keys, self._foreign_keys = KeyTable(), KeyTable()
            self._roomy.clear()
            self.own, self.foreign = {}, {}
            return [segment for segment in dropped if segment.doom()]

    def add_own(self, segment: OwnSegment, entries: Entries | None) -> None:
        """Take `segment` in with what its index holds. Where a key is twice, the later wins."""
        with self.lock:
            epoch = self.epoch
            current = segment.start(entries, epoch)
            self.own = {**self.own, segment.number: segment}
            self._sequence = max(self._sequence, segment.newest)
        if entries is None:
            return
        slots = entries.slots[current]
        places = (slots + (segment.number << 32)).tolist()
        keys = [entries.keys[index] for index in current]
        for start in range(0, len(current), _BATCH):
            with self.lock:
                if self.epoch != epoch or segment.doomed:
                    return
                batch = slice(start, start + _BATCH)
                self._enter(segment, keys[batch], places[batch])

    def note_adopted(self, segment: OwnSegment) -> None:
        """Remember what a segment adopted while running brought, for `take_adopted`."""
        with self.lock:
            for key, place in self._own_keys.items():
                if place >> 32 == segment.number:
                    self._adopted.append((key, int(segment.payload_bytes[place & _SLOT_MASK])))

    def take_adopted(self) -> list[tuple[bytes, int]]:
        """Chunks of segments adopted since the last call, with their lengths."""
        if not self._adopted:
            return []
        with self.lock:
            adopted, self._adopted = self._adopted, []
        return adopted

    def note_lost(self, chunks: Iterable[tuple[bytes, int]], why: str) -> None:
        """Remember chunks, each with its epoch, that went with their files, for `take_lost`."""
        with self.lock:
            self._lost.extend((key, epoch, why) for key, epoch in chunks)

    def take_lost(self) -> list[tuple[bytes, str]]:
        """Some chunks of ours that were lost otherwise than by `forget`, and why."""
        if not self._lost:
            return []
        with self.lock:
            taken = [self._lost.popleft() for _ in range(min(_MAX_TAKEN, len(self._lost)))]
            return [
                (key, why)
                for key, epoch, why in taken
                if epoch == self.epoch and key not in self._own_keys
            ]

    def own_chunks(self) -> list[tuple[bytes, int]]:
        """The keys of all own chunks, with the epoch."""
        with self.lock:
            return [(key, self.epoch) for key, _ in self._own_keys.items()]

    def _enter(self, segment: OwnSegment, keys: list[bytes], places: list[int]) -> None:
        get, put = self._own_keys.get, self._own_keys.set
        for key, place in zip(keys, places, strict=True):
            old = get(key)
            if old < 0:
                put(key, place)
                continue
            other, at, slot = self.own[old >> 32], old & _SLOT_MASK, place & _SLOT_MASK
            if other.sequences[at] >= segment.sequences[slot]:
                segment.kill(slot)
            else:
                other.kill(at)
                put(key, place)

    def drop_own(self, segment: OwnSegment, keys: Iterable[bytes], why: str) -> bool:
        """Let `segment` go with all it holds; True if its files may be closed at once.

        Args:
            segment: Which.
            keys: What its index was seen to hold; spares a look through all keys.
            why: For `take_lost`.
        """
        with self.lock:
            if self._pop_of(segment, keys, why) < segment.live:  # stored since it was looked at
                self._pop_of(segment, [key for key, _ in self._own_keys.items()], why)
            segment.void()
            self._roomy.clear()
            self.own = {n: s for n, s in self.own.items() if s is not segment}
            return segment.doom()

    def _pop_of(self, segment: OwnSegment, keys: Iterable[bytes], why: str) -> int:
        """Forget those of `keys` that are in `segment`; how many those were."""
        get, number = self._own_keys.get, segment.number
        gone = [key for key in dict.fromkeys(keys) if get(key) >> 32 == number]
        for key in gone:
            self._own_keys.pop(key)
        self._lost.extend((key, self.epoch, why) for key in gone)
        return len(gone)

    def add_foreign(self, segment: ForeignSegment) -> None:
        """Take in a segment to follow; it shows nothing until it was looked at."""
        with self.lock:
            self.foreign = {**self.foreign, segment.number: segment}

    def drop_foreign(self, segment: ForeignSegment) -> bool:
        """Stop following `segment`; True if its files may be closed at once."""
        with self.lock:
            for slot in np.flatnonzero(segment.keys != None).tolist():  # noqa: E711 - elementwise
                self._clear(segment, slot)
            self.foreign = {n: s for n, s in self.foreign.items() if s is not segment}
            return segment.doom()

    def see(self, segment: ForeignSegment, sighting: Sighting) -> None:
        """Bring what is known of `segment` up to what was seen."""
        with self.lock:
            if segment.number not in self.foreign:
                return
            if sighting.slots is None:
                for slot in np.flatnonzero(segment.keys != None).tolist():  # noqa: E711 - the same
                    self._clear(segment, slot)
                segment.keys = np.full(segment.header.num_slots, None, object)
            for slot in sighting.slots or ():
                self._clear(segment, slot)
                segment.bad.discard(slot)
            for entries in sighting.entries:
                self._show(segment, entries)

    def _clear(self, segment: ForeignSegment, slot: int) -> None:
        key = segment.keys[slot]
        if key is not None and self._foreign_keys.get(key) == segment.place(slot):
            self._foreign_keys.pop(key)
        segment.keys[slot] = None

    def _show(self, segment: ForeignSegment, entries: Entries) -> None:
        slots = entries.slots.tolist()
        for index in np.flatnonzero(entries.epochs == np.uint64(self.epoch)).tolist():
            slot, key = slots[index], entries.keys[index]
            segment.keys[slot] = key
            if slot not in segment.bad:
                self._foreign_keys.set(key, segment.place(slot))

    def coldest_first(self) -> list[tuple[bytes, int]]:
        """Every own chunk with its length, by the order of writing."""
        with self.lock:
            keys = [key for key, _ in self._own_keys.items()]
            places = np.fromiter((p for _, p in self._own_keys.items()), np.int64, len(keys))
            sequences, lengths = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint64)
            for number, segment in self.own.items():
                mine = np.flatnonzero(places >> 32 == number)
                sequences[mine] = segment.sequences[places[mine] & _SLOT_MASK]
                lengths[mine] = segment.payload_bytes[places[mine] & _SLOT_MASK]
        order = np.argsort(sequences, kind="stable")
        return list(zip([keys[i] for i in order.tolist()], lengths[order].tolist(), strict=True))
