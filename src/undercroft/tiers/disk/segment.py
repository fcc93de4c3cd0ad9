"""A segment: a preallocated slab of equal record slots, and its index file.

The index file's lock says who may write; the kernel drops it with the process. Everybody may read.
State here is guarded by the tier's lock; methods named `disk_*` do I/O and are called without it.
"""

from __future__ import annotations

import os
import stat
import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from undercroft.errors import Bug, CorruptChunk
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.table import (
    FREE_ENTRY,
    RING_ITEMS,
    Entries,
    IndexHeader,
    entry_offset,
    index_bytes,
    next_change,
    ring_runs,
)

__all__ = [
    "INDEX_SUFFIX",
    "SLAB_SUFFIX",
    "OpenSegment",
    "OwnSegment",
    "charge",
    "segment_bytes",
]

_MAX_UNTOLD = 16
SLAB_SUFFIX = ".slab"
INDEX_SUFFIX = ".index"


def segment_bytes(record_bytes: int, num_slots: int) -> int:
    """Size of slab and index together."""
    return record_bytes * num_slots + index_bytes(num_slots)


@dataclass(slots=True, eq=False)
class OpenSegment:
    """Two open files, and how many threads are using them.

    Descriptors are closed by whoever leaves last, never under a reader: a descriptor number that
    was given to another file meanwhile would be written to.
    """

    number: int
    header: IndexHeader
    slab_fd: int
    index_fd: int
    directory: str
    users: int = 0
    doomed: bool = False
    before_close: Callable[[int], None] | None = None
    """Told the number before the files are closed: who holds other descriptors of them."""

    def path(self, suffix: str) -> str:
        """Path of the slab or the index."""
        return f"{self.directory}/seg-{self.header.segment_id}{suffix}"

    def slab_offset(self, slot: int) -> int:
        """Where in the slab the record of `slot` begins."""
        return slot * self.header.record_bytes

    def place(self, slot: int) -> int:
        """Segment number and slot as the one integer that the tables hold."""
        return self.number << 32 | slot

    def check_length(self, record_bytes: int) -> None:
        """Raise `CorruptChunk` unless chunks here take `record_bytes`."""
        if record_bytes != self.header.record_bytes:
            raise CorruptChunk(
                f"a record of {record_bytes} bytes was asked for, one of "
                f"{self.header.record_bytes} is stored"
            )

    def doom(self) -> bool:
        """No more users; True if there are none now, so that the caller closes the files."""
        self.doomed = True
        return self.users == 0

    def leave(self) -> bool:
        """One user less; True if it was the last of a doomed segment: close the files."""
        self.users -= 1
        return self.doomed and self.users == 0

    def disk_close(self, files: Files) -> None:
        """Close both files, and with the index give up the lock."""
        if self.before_close is not None:
            self.before_close(self.number)
        fds, self.slab_fd, self.index_fd = (self.index_fd, self.slab_fd), -1, -1
        with ExitStack() as rest:
            for fd in fds:
                if fd >= 0:
                    rest.callback(files.close, fd)


@dataclass(slots=True, eq=False)
class OwnSegment(OpenSegment):
    """A segment this process writes.

    A slot is free (in `_free`), live (in the tier's table), or busy (in `_busy`: being written or
    read). A busy slot that is deleted becomes free when its last user leaves.

    Followers are told of changes by the ring, in one write for several: whoever ends the last store
    that is under way tells all, and so does whoever makes `_MAX_UNTOLD` of them. Entries do not
    wait: they are on disk when a store returns.
    """

    charged_bytes: int = 0
    live: int = 0
    num_writes: int = 0
    dirty: bool = False
    newest: int = 0
    sequences: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    payload_bytes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    _free: array[int] | None = None
    _busy: dict[int, int] = field(default_factory=dict)
    _leaving: set[int] = field(default_factory=set)
    _untold: list[int] = field(default_factory=list)
    _next_change: int = 1
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def start(self, entries: Entries | None, epoch: int) -> list[int]:
        """Take over what the index holds; returns the indices of `entries` that are current.

        A slot's `sequences` item is not zero while its entry on disk may be in use.
        """
        slots = self.header.num_slots
        self.sequences = np.zeros(slots, np.uint64)
        self.payload_bytes = np.zeros(slots, np.uint64)
        if entries is None:
            self._free = array("q", range(slots - 1, -1, -1))
            return []
        self.sequences[entries.damaged_slots] = 1
        self.sequences[entries.slots] = np.maximum(entries.sequences, np.uint64(1))
        most = np.uint64(
            self.header.record_bytes - PAGE_BYTES
        )  # one that says more fails to be read
        self.payload_bytes[entries.slots] = np.minimum(entries.payload_bytes, most)
        current = np.flatnonzero(entries.epochs == np.uint64(epoch))
        taken = np.zeros(slots, bool)
        taken[entries.slots[current]] = True
        self._free = array("q", np.flatnonzero(~taken)[::-1].tolist())
        self.live = len(current)
        self.newest = int(entries.sequences.max(initial=0))
        return current.tolist()

    @property
    def num_free(self) -> int:
        """Slots that a write may take now."""
        return self.header.num_slots - len(self._busy) if self._free is None else len(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether it holds no chunk and nobody uses it."""
        return self.live == 0 and not self._busy and self.users == 0

    def take_slot(self) -> int:
        """A free slot, busy from now on; -1 if there is none."""
        if self._free is None:
            self._free = array(
                "q", (s for s in range(self.header.num_slots - 1, -1, -1) if s not in self._busy)
            )
        if not self._free:
            return -1
        slot = self._free.pop()
        self._busy[slot] = 1
        self.users += 1
        self.num_writes += 1
        return slot

    def pin(self, slot: int) -> None:
        """One more reader of `slot`, which must be live."""
        self._busy[slot] = self._busy.get(slot, 0) + 1
        self.users += 1

    def unpin(self, slot: int) -> bool:
        """One user of `slot` less; True if the caller must close the files."""
        self._leave_slot(slot)
        return self.leave()

    def end_write(self, slot: int) -> bool:
        """The writer of `slot` is done with it; True if it is done with the segment, too.

        Otherwise it has to call `disk_tell`, and then `leave`.
        """
        self.num_writes -= 1
        self._leave_slot(slot)
        if self.doomed or self.must_tell():
            return False
        self.users -= 1
        return True

    @property
    def num_untold(self) -> int:
        """Changes that followers were not told of."""
        return len(self._untold)

    def must_tell(self) -> bool:
        """Whether it is time for `disk_tell`."""
        untold = len(self._untold)
        return untold > 0 and (self.num_writes == 0 or untold >= _MAX_UNTOLD)

    def _leave_slot(self, slot: int) -> None:
        left = self._busy[slot] - 1
        if left:
            self._busy[slot] = left
        else:
            del self._busy[slot]
            if slot in self._leaving:
                self._leaving.discard(slot)
                self._release(slot)

    def settle(self, slot: int, sequence: int) -> bool:
        """The write of `slot` has ended; whether the chunk became live rather than void."""
        if slot in self._leaving or self.doomed:
            return False
        self.live += 1
        self.newest = max(self.newest, sequence)
        self.dirty = True
        return True

    def abandon(self, slot: int) -> None:
        """The write of `slot` failed: free it once its writer leaves."""
        self._leaving.add(slot)

    def kill(self, slot: int) -> None:
        """The chunk in `slot`, live until now, is no longer in the table."""
        self.live -= 1
        if self.live < 0:
            raise Bug(f"segment {self.header.segment_id} counts {self.live} live chunks")
        if slot in self._busy:
            self._leaving.add(slot)
        else:
            self._release(slot)

    def void(self) -> None:
        """All that it holds is void: every slot is free, busy ones once their users leave."""
        self.live = 0
        self._leaving = set(self._busy)
        self._free = None

    def _release(self, slot: int) -> None:
        if self._free is not None:
            self._free.append(slot)

    def expect(self, slot: int, sequence: int) -> bool:
        """Somebody else is about to write `slot` and its entry; whether that has to be freed."""
        may_be_in_use = bool(self.sequences[slot])
        self.sequences[slot] = sequence
        return may_be_in_use

    def note_change(self, slot: int, *, is_free: bool) -> None:
        """The entry of `slot` was changed by somebody else, or may have been: it is to be told."""
        if is_free:
            self.sequences[slot] = 0
        self._untold.append(slot)

    def disk_invalidate(self, files: Files, slot: int) -> None:
        """Free the entry of `slot` on disk, if it may be in use."""
        if self.sequences[slot]:
            files.pwrite(self.index_fd, FREE_ENTRY, entry_offset(slot))
            self._untold.append(slot)
            self.sequences[slot] = 0

    def disk_publish(self, files: Files, slot: int, entry: bytes, sequence: int) -> None:
        """Say on disk that `slot` holds a chunk."""
        self.sequences[slot] = sequence
        files.pwrite(self.index_fd, entry, entry_offset(slot))
        self._untold.append(slot)

    def disk_tell(self, files: Files) -> None:
        """Tell other processes of all changes so far. If that fails, they stay to be told."""
        with self._telling:
            untold = self._untold[:]
            if untold:  # else another thread told them just now
                for place, items in ring_runs(self._next_change, untold):
                    files.pwrite(self.index_fd, items, place)
                self._next_change += len(untold)
                del self._untold[: len(untold)]

    def disk_begin(self, files: Files) -> None:
        """Go on with the ring of the owner before us, so that followers read everything anew.

        That owner may have died between an entry and its ring item.
        """
        page = files.pread(self.index_fd, PAGE_BYTES, 0)
        self._next_change = next_change(page) + RING_ITEMS
        self._untold = [0]
        self.disk_tell(files)

    def disk_sync(self, files: Files) -> None:
        """Make payloads durable, then the entries that speak of them."""
        files.fdatasync(self.slab_fd)
        files.fdatasync(self.index_fd)

    def disk_is_linked(self, files: Files) -> bool:
        """Whether both files still have a name; refreshes what they are charged."""
        slab, index = files.fstat(self.slab_fd), files.fstat(self.index_fd)
        self.charged_bytes = charge(slab) + charge(index)
        return slab.st_nlink > 0 and index.st_nlink > 0


def charge(found: os.stat_result) -> int:
    """What a file counts against the capacity: its size, or its blocks if more.

    Of a directory only the blocks: its size is a fiction on some file systems.
    """
    blocks = found.st_blocks * 512
    return blocks if stat.S_ISDIR(found.st_mode) else max(found.st_size, blocks)
