"""Chunks of a disk tier, in and out: slots found and kept, bytes moved, ends booked.

Each call has three parts. What is to be done is settled in memory. The bytes are moved by the mover
process if there is one and they lie in level 0, else here. Then each chunk's end is booked: the
table, the index's entry, what other processes have to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from undercroft.clock import Clock
from undercroft.errors import (
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    KvError,
    TierFull,
    TierUnavailable,
)
from undercroft.keys import MAX_KEY_BYTES
from undercroft.tiers.base import Ends
from undercroft.tiers.disk import wire
from undercroft.tiers.disk.files import translate
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.holdings import Reservation
from undercroft.tiers.disk.items import Free, Read, Stale, Write, error_of, fits
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.mover import MoverGone, MoverProcess
from undercroft.tiers.disk.records import record_bytes
from undercroft.tiers.disk.segment import OpenSegment, OwnSegment
from undercroft.tiers.disk.table import pack_entry
from undercroft.tiers.disk.upkeep import Upkeep
from undercroft.tiers.disk.wire import End, Status, Verb

__all__ = ["Chunks"]

_FULL_AGE_S = 0.1
_MAX_SUSPECTS = 1024
_MAX_GROWTHS = 8

_I = TypeVar("_I", Read, Write, Free)
_T = TypeVar("_T")


class Chunks:
    """Reads, writes and forgets chunks. Threads: any.

    Args:
        name: The tier's.
        keeper: Of its files.
        upkeep: To be asked before, and told of what fails.
        clock: Time.
        mover: The process that moves bytes, if there is one.
    """

    def __init__(
        self,
        name: str,
        keeper: Keeper,
        upkeep: Upkeep,
        clock: Clock,
        mover: MoverProcess | None = None,
    ) -> None:
        ground = keeper.ground
        self._name = name
        self._keeper = keeper
        self._upkeep = upkeep
        self._clock = clock
        self._mover = mover
        self._files = ground.files
        self._records = ground.records
        self._holdings = ground.holdings
        self._log = ground.log
        self.counts = {"corrupt_dropped": 0, "stale_reads": 0}
        self._suspects: set[bytes] = set()
        self._full: dict[int, tuple[float, int]] = {}

    # Reading

    def read(self, wanted: Sequence[tuple[bytes, memoryview]]) -> Iterator[Ends]:
        """See `Batched.read_many`."""
        if not self._upkeep.tend():
            yield [(index, False) for index in range(len(wanted))]
            return
        reads: dict[int, Read] = {}
        absent: Ends = []
        for index, (key, out) in enumerate(wanted):
            found = self._holdings.pin(key)
            if found is None:
                absent.append((index, False))
            else:
                reads[index] = Read(key, *found, _flat(out))
        yield from self._ended(absent, reads, Verb.READ, self._end_read)

    def _read_here(self, read: Read) -> None:
        segment, slot, key, out = read.segment, read.slot, read.key, read.buffer
        if isinstance(segment, ForeignSegment) and not segment.disk_holds(self._files, slot, key):
            raise Stale
        segment.check_length(record_bytes(len(out)))
        self._records.read(segment.slab_fd, segment.slab_offset(slot), key, read.epoch, out)

    def _end_read(self, read: Read, error: Exception | None) -> bool:
        try:
            return self._book_read(read, error)
        finally:
            self._leave(read.segment, read.slot)

    def _book_read(self, read: Read, error: Exception | None) -> bool:
        segment, slot, key = read.segment, read.slot, read.key
        if error is None:
            self._suspects.discard(key)
            return True
        if isinstance(error, Stale):
            self.counts["stale_reads"] += 1
            self._forget(segment, slot, key)
            return False
        if isinstance(error, CorruptChunk | FormatTooNew):
            self._drop_bad(segment, slot, key)
            error.tier, error.key = self._name, key
        elif isinstance(error, OSError):
            self._suspect(segment, slot, key)
            raise self._translate(error, "read a chunk", key) from error
        raise error

    def _drop_bad(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        own = isinstance(segment, OwnSegment)
        self.counts["corrupt_dropped" if own else "stale_reads"] += 1
        try:
            self._forget(segment, slot, key)
        except OSError as exc:
            self._log.warning(
                "disk tier %r cannot free the entry of a bad chunk: %s", self._name, str(exc)
            )

    def _suspect(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """A chunk that fails to read twice in a row is given up, so that it can be rewritten."""
        self._upkeep.distrust()
        if key in self._suspects:
            self._suspects.discard(key)
            self._drop_bad(segment, slot, key)
        elif len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(key)

    # Moving bytes

    def _ended(
        self,
        settled: Ends,
        items: Mapping[int, _I],
        verb: int,
        end: Callable[[_I, Exception | None], bool],
    ) -> Iterator[Ends]:
        """Move all, and book each with `end`; all are booked, also if nobody asks any more."""
        left = dict(items)
        try:
            if settled:
                yield settled
            for start in range(0, len(items), wire.MAX_ORDERS):
                some = dict(islice(items.items(), start, start + wire.MAX_ORDERS))
                for moved in self._moved(some, verb):
                    yield [(i, _value(end, left.pop(i), error)) for i, error in moved]
        finally:
            for item in left.values():
                with suppress(Exception):
                    end(item, TierUnavailable("given up", tier=self._name))

    def _moved(
        self, items: Mapping[int, Read | Write | Free], verb: int
    ) -> Iterator[list[tuple[int, Exception | None]]]:
        there = self._begun_there(list(items.values()), verb)
        if there is None:
            for index, item in items.items():
                yield [(index, self._moved_here(item))]
            return
        indices, left = list(items), dict.fromkeys(items)
        failure = MoverGone("it does not say how all ended")
        try:
            for ends in there:
                self._files.count_written(sum(end.written_bytes for end in ends))
                for end in ends:
                    del left[indices[end.number]]
                    self._note_moved(items[indices[end.number]], verb, end.status)
                yield [(indices[end.number], error_of(end)) for end in ends]
        except MoverGone as exc:
            failure = exc
        if left:
            error = TierUnavailable(f"{failure}; it is tried again", tier=self._name)
            for index in left:
                self._note_moved(items[index], verb, Status.FAILED)
            yield [(index, error) for index in left]

    def _note_moved(self, item: Read | Write | Free, verb: int, status: int) -> None:
        """The mover process may have changed an entry."""
        segment = item.segment
        if verb != Verb.READ and isinstance(segment, OwnSegment):
            segment.note_change(item.slot, is_free=verb == Verb.FREE and status == Status.DONE)

    def _moved_here(self, item: Read | Write | Free) -> Exception | None:
        try:
            if isinstance(item, Read):
                self._read_here(item)
            elif isinstance(item, Write):
                self._write_here(item)
            elif isinstance(item.segment, OwnSegment):
                item.segment.disk_invalidate(self._files, item.slot)
        except Exception as exc:  # noqa: BLE001 - each chunk has an end of its own
            return exc
        return None

    def _begun_there(
        self, items: Sequence[Read | Write | Free], verb: int
    ) -> Iterator[list[End]] | None:
        """Asked of the mover process; None if there is none, or some bytes are elsewhere."""
        mover = self._mover
        if mover is None:
            return None
        places = [0] * len(items)
        if verb != Verb.FREE:
            places = [mover.place_of(item.buffer) if fits(item) else -1 for item in items]
        if min(places) < 0:
            return None
        orders = [item.order(place) for item, place in zip(items, places, strict=True)]
        segments = [item.segment for item in items]
        try:
            return mover.move(verb, orders, segments, direct=self._records.direct)
        except MoverGone:
            return None

    # Writing

    def write(self, given: Sequence[tuple[bytes, memoryview, int | None]]) -> Iterator[Ends]:
        """See `Batched.write_many`."""
        settled: Ends = []
        writes: dict[int, Write] = {}
        for index, (key, data, epoch) in enumerate(given):
            planned = _value(self._plan_write, key, _flat(data), epoch)
            if isinstance(planned, Write):
                writes[index] = planned
            else:
                settled.append((index, planned))
        yield from self._ended(settled, writes, Verb.WRITE, self._end_write)

    def _plan_write(self, key: bytes, data: memoryview, epoch: int | None) -> Write | bool:
        """A slot for the chunk; True if it is there already, False if its epoch is over."""
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} fit the stored format",
                tier=self._name,
            )
        if not self._upkeep.tend(writing=True):
            raise TierUnavailable("the epoch cannot be read; it is tried again", tier=self._name)
        if epoch not in {None, self._holdings.epoch}:
            return False
        size = record_bytes(len(data))
        is_ours, taken = self._holdings.claim(key, size)
        if not is_ours:
            return True
        taken = taken or self._reserve(size, key)
        write = Write(key, taken, data)
        if epoch not in {None, taken.epoch}:  # raised since: the record would be of the new one
            self._abandon(write)
            return False
        return write

    def _reserve(self, size: int, key: bytes) -> Reservation:
        """Make room for `key`, which is claimed: until it is written, or this fails."""
        taken = None
        try:
            with self._keeper.shape:
                self._upkeep.check_open()
                # Others take slots without this lock: even a grown tier may have none left.
                for _ in range(_MAX_GROWTHS):
                    taken = self._holdings.reserve(size)
                    if taken:
                        return taken
                    self._grow(size, key)
        finally:
            if not taken:
                self._holdings.unclaim(key)
        raise TierFull("others took the last free slots", tier=self._name, key=key)

    def _grow(self, size: int, key: bytes) -> None:
        self._refuse_if_full(size, key)
        try:
            self._keeper.room.grow(size)
        except TierFull as exc:
            exc.tier, exc.key = self._name, key
            self._full[size] = (self._clock.now_s(), self._holdings.num_deletes)
            raise
        except OSError as exc:
            raise self._translate(exc, "make room", key) from exc

    def _refuse_if_full(self, size: int, key: bytes) -> None:
        """Do not look at the disk again for every chunk that a full tier is offered."""
        since, num_deletes = self._full.get(size, (float("-inf"), 0))
        if self._clock.now_s() - since < _FULL_AGE_S and num_deletes == self._holdings.num_deletes:
            raise TierFull(
                f"{self._name} is full, as it was a moment ago", tier=self._name, key=key
            )

    def _write_here(self, write: Write) -> None:
        """Free the slot's entry, write the record, then the entry that speaks of it."""
        segment, taken, key, data = write.segment, write.taken, write.key, write.buffer
        slot, stamp = taken.slot, (taken.epoch, taken.sequence)
        segment.disk_invalidate(self._files, slot)
        self._records.write(segment.slab_fd, segment.slab_offset(slot), key, stamp, data)
        entry = pack_entry(slot, key, *stamp, len(data), self._records.namespace)
        segment.disk_publish(self._files, slot, entry, taken.sequence)

    def _end_write(self, write: Write, error: Exception | None) -> bool:
        if error is None:
            if not self._holdings.settle(write.taken, write.key, len(write.buffer)):
                self._finish(write.segment)
            return True
        self._abandon(write)
        if isinstance(error, OSError):
            self._upkeep.distrust()
            raise self._translate(error, "write a chunk", write.key) from error
        raise error

    def _abandon(self, write: Write) -> None:
        if not self._holdings.abandon(write.taken, write.key):
            self._finish(write.segment)

    def _finish(self, segment: OwnSegment) -> None:
        """What `OwnSegment.end_write` left to be done."""
        try:
            self._tell(segment)
        finally:
            if self._holdings.leave(segment):
                segment.disk_close(self._files)

    # Forgetting

    def delete(self, keys: Sequence[bytes]) -> Iterator[Ends]:
        """See `Batched.delete_many`. What another process owns is forgotten here only."""
        absent: Ends = []
        frees: dict[int, Free] = {}
        for index, key in enumerate(keys):
            while (found := self._holdings.pin(key)) is not None:
                segment, slot, _ = found
                is_news = self._holdings.forget(key, segment, slot)
                if is_news and isinstance(segment, OwnSegment) and index not in frees:
                    frees[index] = Free(key, segment, slot)
                else:
                    self._leave(segment, slot)
            if index not in frees:
                absent.append((index, True))
        yield from self._ended(absent, frees, Verb.FREE, self._end_free)

    def _end_free(self, free: Free, error: Exception | None) -> bool:
        try:
            if isinstance(error, OSError):
                raise self._translate(error, "delete a chunk", free.key) from error
            if error is not None:
                raise error
            if free.segment.must_tell():
                self._tell(free.segment)
        finally:
            self._leave(free.segment, free.slot)
        return True

    def _forget(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """Take a pinned chunk out of the table, then out of the index on disk."""
        if self._holdings.forget(key, segment, slot) and isinstance(segment, OwnSegment):
            segment.disk_invalidate(self._files, slot)
            if segment.must_tell():
                self._tell(segment)

    def _tell(self, segment: OwnSegment) -> None:
        """Tell other processes what changed; not vital, and tried again with the next change."""
        try:
            segment.disk_tell(self._files)
        except OSError as exc:
            self._upkeep.distrust()
            # Not the exception: a kept log record would keep buffers.
            self._log.warning("disk tier %r cannot tell others: %s", self._name, str(exc))

    def _leave(self, segment: OpenSegment, slot: int) -> None:
        if self._holdings.unpin(segment, slot):
            segment.disk_close(self._files)

    def _translate(self, exc: OSError, what: str, key: bytes) -> KvError:
        return translate(exc, what, tier=self._name, key=key)


def _value(function: Callable[..., _T], *arguments: object) -> _T | Exception:
    """What it returned, or raised: each chunk has an end of its own."""
    try:
        return function(*arguments)
    except Exception as exc:  # noqa: BLE001 - passed on
        return exc


def _flat(buffer: memoryview) -> memoryview:
    """`buffer` as plain bytes."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
