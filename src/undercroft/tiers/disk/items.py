"""What a disk tier is about to do with one chunk, its slot kept; as an order, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from undercroft.errors import Bug, CorruptChunk, FormatTooNew
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.holdings import Reservation
from undercroft.tiers.disk.records import record_bytes
from undercroft.tiers.disk.segment import OpenSegment, OwnSegment
from undercroft.tiers.disk.wire import End, Order, Status

__all__ = ["Free", "Read", "Stale", "Write", "error_of", "fits"]

_NOTHING = memoryview(b"")


class Stale(Exception):
    """The entry of a foreign slot is of another chunk by now."""


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk to read, its slot pinned."""

    key: bytes
    segment: OpenSegment
    slot: int
    epoch: int
    buffer: memoryview

    def order(self, place: int) -> Order:
        """To be done with the bytes at `place` of the memory."""
        return Order(
            segment=self.segment.number,
            slot=self.slot,
            place=place,
            num_bytes=len(self.buffer),
            epoch=self.epoch,
            sequence=0,
            checks_entry=isinstance(self.segment, ForeignSegment),
            key=self.key,
        )


@dataclass(frozen=True, slots=True)
class Write:
    """A chunk to write, its slot reserved."""

    key: bytes
    taken: Reservation
    buffer: memoryview

    @property
    def segment(self) -> OwnSegment:
        """Where it goes."""
        return self.taken.segment

    @property
    def slot(self) -> int:
        """Where in it."""
        return self.taken.slot

    def order(self, place: int) -> Order:
        """To be done with the bytes at `place` of the memory."""
        taken = self.taken
        return Order(
            segment=taken.segment.number,
            slot=taken.slot,
            place=place,
            num_bytes=len(self.buffer),
            epoch=taken.epoch,
            sequence=taken.sequence,
            checks_entry=taken.segment.expect(taken.slot, taken.sequence),
            key=self.key,
        )


@dataclass(frozen=True, slots=True)
class Free:
    """A chunk that is forgotten, its slot still pinned: the entry is to be freed."""

    key: bytes
    segment: OwnSegment
    slot: int
    buffer: memoryview = _NOTHING

    def order(self, place: int) -> Order:
        """To be done with the bytes at `place` of the memory."""
        return Order(
            segment=self.segment.number,
            slot=self.slot,
            place=place,
            num_bytes=0,
            epoch=0,
            sequence=0,
            checks_entry=False,
            key=self.key,
        )


def fits(item: Read | Write | Free) -> bool:
    """Whether the slot is of the right size for the buffer."""
    return record_bytes(len(item.buffer)) == item.segment.header.record_bytes


def error_of(end: End) -> Exception | None:
    """What this process would have met with, had it moved the bytes itself."""
    if end.status == Status.DONE:
        return None
    if end.status == Status.FAILED:
        return OSError(end.code, end.text)
    if end.status == Status.CORRUPT:
        return CorruptChunk(end.text)
    if end.status == Status.TOO_NEW:
        return FormatTooNew(end.text)
    if end.status == Status.STALE:
        return Stale()
    return Bug(f"in the mover process: {end.text}")
