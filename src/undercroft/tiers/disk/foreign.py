"""Segments that other processes write and this one only reads.

Followed by reading one page of the index: nothing changed, or these slots changed, or too much
did and the table is read again. A read may race the owner's next write; verification settles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.segment import OpenSegment
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    Entries,
    changed_slots,
    index_bytes,
    next_change,
    parse_entries,
    parse_header_of,
)

__all__ = ["ForeignSegment", "Sighting"]


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
    _page: bytes = b""
    _next: int = 0

    def disk_look(self, files: Files) -> Sighting | None:
        """What has changed since the last look; None for nothing.

        Raises:
            CorruptChunk, FormatTooNew: The header is no longer that of this segment.
        """
        page = files.pread(self.index_fd, PAGE_BYTES, 0)
        if page == self._page and not self.stale:
            return None
        header = parse_header_of(
            page.ljust(PAGE_BYTES, b"\0"), self.header.segment_id, self.header.namespace
        )
        # A change without the item that should come next: items were lost, or the owner is new.
        slots = None if self.stale else (changed_slots(page, self._next) or None)
        if slots is None:
            sighting = Sighting(None, [self._disk_entries(files, 0, header.num_slots)])
            self._next = next_change(page)
        else:
            # Not `next_change`: an item may show up after later ones that were written with it.
            self._next += len(slots)
            slots = sorted(set(slots))
            sighting = Sighting(slots, [self._disk_entries(files, slot, 1) for slot in slots])
        self.header, self._page, self.stale = header, page, False
        return sighting

    def disk_holds(self, files: Files, slot: int, key: bytes) -> bool:
        """Whether the entry on disk still says that `slot` holds `key`."""
        return self._disk_entries(files, slot, 1).keys == [key]

    def _disk_entries(self, files: Files, slot: int, count: int) -> Entries:
        wanted = min(count * ENTRY_BYTES, index_bytes(self.header.num_slots))
        table = files.pread(self.index_fd, wanted, self.entry_offset(slot))
        return parse_entries(table, self.header.namespace, slot)
