"""Takes things out of a store from outside: chunks, segments, namespaces, debris.

The rules are those of the engines: files go only under the root's lock, and only what nobody has
locked is touched. What a running engine owns stays, and the caller is told who that is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.names import EPOCH_NAME, MANIFEST_NAME, is_ours
from undercroft.tiers.disk.root import remove_segment
from undercroft.tiers.disk.segment import OwnSegment
from undercroft.tiers.disk.stored import (
    Piece,
    StoredChunk,
    StoredNamespace,
    StoredSegment,
    Users,
)
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    FREE_ENTRY,
    Entries,
    IndexHeader,
    entry_offset,
    index_bytes,
    parse_entries,
    parse_header_of,
)

__all__ = ["Removal", "used_by"]

_WRITE = os.O_RDWR


def used_by(users: Users) -> str:
    """Who has it, in words."""
    if not users.pids:
        return "an engine has it open"
    return f"process {', '.join(map(str, users.pids))} has it open"


class Removal:
    """Removes what a catalogue shows. Every method answers why it did not; empty if it did.

    Threads: one at a time. `OSError` and `TierUnavailable` pass.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._files = catalog.files

    # --- whole files --------------------------------------------------------------------------

    def remove_segment(self, segment: StoredSegment, *, if_bad: bool = False) -> str:
        """Remove both files; their space is free at once.

        Args:
            segment: Which.
            if_bad: Only if it is still found to serve nothing: one read that went wrong must not
                cost a good segment.
        """
        with self._catalog.locked():
            if segment.index is not None:
                with self._catalog.lock_of(segment.index_path) as fd:
                    if fd is None and self._files.exists(segment.index_path):
                        return used_by(segment.users)
                    if if_bad and self._catalog.again(segment).header is not None:
                        return "it is good by now"
                    remove_segment(self._files, segment.directory, segment.segment_id)
            elif self._files.exists(segment.index_path):
                return "it has become whole meanwhile"
            else:
                remove_segment(self._files, segment.directory, segment.segment_id)
        return ""

    def remove_namespace(self, namespace: StoredNamespace) -> str:
        """Remove all its segments, one by one, then its directory."""
        if namespace.users.is_held:
            return used_by(namespace.users)
        for segment in namespace.segments:
            if left := self.remove_segment(segment):
                return left
        with self._catalog.locked():
            return self._remove_directory(namespace)

    def _remove_directory(self, namespace: StoredNamespace) -> str:
        directory = namespace.directory.path
        if not self._files.exists(directory):
            return ""
        with self._catalog.lock_of(f"{directory}/{MANIFEST_NAME}") as fd:
            if fd is None and self._files.exists(f"{directory}/{MANIFEST_NAME}"):
                return used_by(namespace.users)
            names = self._files.list(directory)
            others = [name for name in names if not is_ours(name)]
            if others:
                return f"{len(others)} files that are not ours, or are new, lie in {directory}"
            for name in names:
                self._files.unlink(f"{directory}/{name}")
            try:
                self._files.remove_directory(directory)
            except OSError as exc:
                if exc.errno != errno.ENOTEMPTY:
                    raise
                return f"something new lies in {directory}"
        return ""

    def remove_debris(self, piece: Piece) -> str:
        """Remove a temporary file: whoever makes one holds the root's lock meanwhile."""
        with self._catalog.locked():
            self._files.unlink(piece.path)
        return ""

    def remove_history(self, piece: Piece) -> str:
        """Remove a history that no engine writes."""
        with self._catalog.locked(), self._catalog.lock_of(piece.path) as fd:
            if fd is None and self._files.exists(piece.path):
                return "an engine goes on with it by now"
            self._files.unlink(piece.path)
        return ""

    # --- single slots -------------------------------------------------------------------------

    def free_chunks(self, segment: StoredSegment, chunks: Iterable[StoredChunk]) -> str:
        """Free the entries of chunks, durably, where they still are what was seen."""
        with self._catalog.owning(segment.index_path) as fd:
            if fd is None:
                return used_by(segment.users)
            header = self._header(fd, segment)
            if header is None:
                return "its index has changed meanwhile"
            slots = []
            for chunk in chunks:
                now = self._entry(fd, header, chunk.slot)
                if now.keys == [chunk.key] and now.sequences.tolist() == [chunk.sequence]:
                    slots.append(chunk.slot)
            self._free(fd, header, segment, slots)
        return ""

    def free_damaged(self, segment: StoredSegment) -> str:
        """Free every damaged entry of a segment, durably."""
        with self._catalog.owning(segment.index_path) as fd:
            if fd is None:
                return used_by(segment.users)
            return self._free_damaged(fd, segment)

    def _free_damaged(self, fd: int, segment: StoredSegment) -> str:
        header = self._header(fd, segment)
        if header is None:
            return "its index has changed meanwhile"
        table = self._files.pread(fd, header.num_slots * ENTRY_BYTES, PAGE_BYTES)
        damaged = parse_entries(table, header.namespace).damaged_slots.tolist()
        # Read once more: one read that went wrong must not cost a good chunk.
        still = [slot for slot in damaged if self._entry(fd, header, slot).damaged_slots.size]
        self._free(fd, header, segment, still)
        return ""

    def _entry(self, fd: int, header: IndexHeader, slot: int) -> Entries:
        entry = self._files.pread(fd, ENTRY_BYTES, entry_offset(slot))
        return parse_entries(entry, header.namespace, slot)

    def _header(self, fd: int, segment: StoredSegment) -> IndexHeader | None:
        if segment.header is None:
            return None
        page = self._files.pread(fd, PAGE_BYTES, 0)
        with suppress(CorruptChunk, FormatTooNew):
            return parse_header_of(page, segment.segment_id, segment.header.namespace)
        return None

    def _free(self, fd: int, header: IndexHeader, segment: StoredSegment, slots: list[int]) -> None:
        """Write free entries, then have every follower read the table anew."""
        own = OwnSegment(0, header, -1, fd, segment.directory)
        for slot in slots:
            self._files.pwrite(fd, FREE_ENTRY, entry_offset(slot))
        if slots:
            own.disk_begin(self._files)
            self._files.fdatasync(fd)

    # --- sizes, epochs ------------------------------------------------------------------------

    def mend_sizes(self, segment: StoredSegment, room_bytes: int | None) -> str:
        """Cut what has grown; fill up what was cut, if that is known to fit.

        Args:
            segment: Whose files.
            room_bytes: What may be added within the capacity; None if that is not known.
        """
        header = segment.header
        with self._catalog.locked(), self._catalog.lock_of(segment.index_path) as fd:
            if fd is None or header is None:
                return used_by(segment.users)
            slab_fd = self._files.open(segment.slab_path, _WRITE)
            try:
                left = self._mend(
                    (
                        (slab_fd, header.num_slots * header.record_bytes),
                        (fd, index_bytes(header.num_slots)),
                    ),
                    room_bytes,
                )
                # An entry that was cut in two is whole again, and damaged.
                return left or self._free_damaged(fd, segment)
            finally:
                self._files.close(slab_fd)

    def _mend(self, sizes: Iterable[tuple[int, int]], room_bytes: int | None) -> str:
        for fd, size in sizes:
            found = self._files.fstat(fd).st_size
            if found > size:
                self._files.truncate(fd, size)
            elif found < size and room_bytes is None:
                return "its next engine fills it up; with --capacity it can be done now"
            elif found < size and size - found > (room_bytes or 0):
                return "filling it up would exceed the capacity"
            elif found < size:
                self._files.allocate(fd, size)
        return ""

    def mend_epoch(self, namespace: StoredNamespace) -> str:
        """Make the epoch later than any that a chunk carries, as the next engine would."""
        if self._files.stat(self._catalog.path).st_uid != self._files.user_id():
            return "it would belong to another user than the store: run this as the store's"
        latest = max((chunk.epoch for chunk in self._catalog.chunks(namespace)), default=0)
        directory = namespace.directory.path
        with (
            self._catalog.locked(),
            self._catalog.lock_of(f"{directory}/{MANIFEST_NAME}") as fd,
        ):
            if fd is None:
                return used_by(namespace.users)
            file = EpochFile(self._files, f"{directory}/{EPOCH_NAME}")
            try:
                file.open(read_only=False)
                if file.read() is None:
                    file.write(latest + 1)
            finally:
                file.close()
        return ""
