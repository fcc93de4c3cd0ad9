"""Segments that other processes write and this one only reads.

Followed by reading one page of the index: nothing changed, or these slots changed, or too much
did and the table is read again. A read may race the owner's next write; verification settles it.
An owner that is killed between an entry and its ring item tells nobody of the entry. So when a ring
has been quiet for a second, and the file was written to since, the table is read and compared with
what is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from undercroft.errors import CorruptChunk
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.segment import OpenSegment
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    Entries,
    changed_slots,
    entry_offset,
    index_bytes,
    next_change,
    parse_entries,
    parse_header_of,
)

__all__ = ["ForeignSegment", "Sighting"]


_QUIET_S = 1.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a look at a foreign index showed: `entries` of `slots`, or of all when None."""

    slots: list[int] | None
    entries: list[Entries]


@dataclass(slots=True, eq=False)
class ForeignSegment(OpenSegment):
    """Somebody else's segment, and what we last saw in it.

    `keys` is an array of objects because the garbage collector does not walk those.
    """

    keys: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, object))
    bad: set[int] = field(default_factory=set)
    stale: bool = True
    settled_s: float = 0.0
    """When the ring told something last, or nothing was found to be missing in it."""
    _compared_ns: int = -1
    _page: bytes = b""
    _next: int = 0

    def disk_look(self, files: Files, now_s: float) -> Sighting | None:
        """What has changed since the last look; None for nothing.

        Args:
            files: The system calls.
            now_s: The time.

        Raises:
            CorruptChunk, FormatTooNew: The header is no longer that of this segment.
            OSError: The index cannot be read.
        """
        page = files.pread(self.index_fd, PAGE_BYTES, 0)
        if page == self._page and not self.stale:
            return None
        # Taken back before anything is read: what is made void meanwhile sets it again.
        is_stale, self.stale = self.stale, False
        try:
            return self._disk_changes(files, page, now_s, is_stale=is_stale)
        except BaseException:
            self.stale = True
            raise

    def _disk_changes(self, files: Files, page: bytes, now_s: float, *, is_stale: bool) -> Sighting:
        header = parse_header_of(
            page.ljust(PAGE_BYTES, b"\0"), self.header.segment_id, self.header.namespace
        )
        if header != self.header:
            raise CorruptChunk("the index of a segment has changed its geometry")
        # A change without the item that should come next: items were lost, or the owner is new.
        slots = None if is_stale else (changed_slots(page, self._next) or None)
        if slots is None or max(slots) >= header.num_slots:  # a ring item carries no check
            sighting = Sighting(None, [self._disk_entries(files, 0, header.num_slots)])
            self._next = next_change(page)
        else:
            # Not `next_change`: an item may show up after later ones that were written with it.
            self._next += len(slots)
            slots = sorted(set(slots))
            sighting = Sighting(slots, [self._disk_entries(files, slot, 1) for slot in slots])
        self._page = page
        self.settled_s = now_s
        return sighting

    def disk_is_due(self, files: Files, now_s: float) -> bool:
        """Whether the ring is quiet for long, and the table may have what it left out."""
        if self.stale or now_s - self.settled_s < _QUIET_S:
            return False
        if files.fstat(self.index_fd).st_mtime_ns != self._compared_ns:
            return True
        self.settled_s = now_s
        return False

    def disk_compare(self, files: Files, now_s: float) -> Sighting | None:
        """What the table says and the ring did not; None for nothing. Cost: 1 us an entry."""
        written_ns = files.fstat(self.index_fd).st_mtime_ns
        entries = self._disk_entries(files, 0, self.header.num_slots)
        self.settled_s, self._compared_ns = now_s, written_ns
        there = np.full(self.header.num_slots, None, object)
        there[entries.slots] = np.array(entries.keys, object)
        if len(self.keys) != len(there):
            return None  # nothing was made known yet
        changed = there != self.keys
        if not changed.any():
            return None
        found = np.flatnonzero(changed[entries.slots])
        news = Entries(
            entries.slots[found],
            [entries.keys[index] for index in found.tolist()],
            entries.epochs[found],
            entries.sequences[found],
            entries.payload_bytes[found],
            entries.damaged_slots,
        )
        return Sighting(np.flatnonzero(changed).tolist(), [news])

    def disk_holds(self, files: Files, slot: int, key: bytes) -> bool:
        """Whether the entry on disk still says that `slot` holds `key`."""
        return self._disk_entries(files, slot, 1).keys == [key]

    def _disk_entries(self, files: Files, slot: int, count: int) -> Entries:
        wanted = min(count * ENTRY_BYTES, index_bytes(self.header.num_slots))
        table = files.pread(self.index_fd, wanted, entry_offset(slot))
        return parse_entries(table, self.header.namespace, slot)
