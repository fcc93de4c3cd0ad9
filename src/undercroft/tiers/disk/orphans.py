"""Segments whose owner is gone: found by their lock being free, taken over with what they hold."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import NotOurs
from undercroft.tiers.disk.follower import Follower
from undercroft.tiers.disk.ground import Ground
from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX, OwnSegment
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    IndexHeader,
    index_bytes,
    parse_entries,
    parse_header_of,
)
from undercroft.tiers.disk.usage import SegmentUsage

__all__ = ["Orphan", "Orphans"]


@dataclass(frozen=True, slots=True)
class Orphan:
    """A segment whose lock we took: nobody else writes it."""

    usage: SegmentUsage
    header: IndexHeader
    index_fd: int


class Orphans:
    """Finds, reads and adopts orphans. Threads: callers hold `Keeper.shape` and the root's lock."""

    def __init__(self, ground: Ground, follower: Follower) -> None:
        self._ground = ground
        self._follower = follower

    def lock_all(self) -> list[Orphan]:
        """Segments of this namespace that nobody owns, last written first, locked."""
        found: list[Orphan] = []
        taken = {segment.header.segment_id for segment in self._ground.holdings.own.values()}
        for segment in sorted(self._ground.namespace.segments, key=lambda s: -s.modified_ns):
            if segment.segment_id not in taken:
                orphan = self._lock(segment)
                if orphan:
                    found.append(orphan)
        return found

    def _lock(self, segment: SegmentUsage) -> Orphan | None:
        path = f"{segment.directory}/seg-{segment.segment_id}{INDEX_SUFFIX}"
        try:
            fd = self._ground.files.open(path, os.O_RDWR)
        except (FileNotFoundError, NotOurs):
            return None
        orphan = None
        try:
            if self._ground.files.lock(fd):
                orphan = self._read(segment, fd)
        finally:
            if orphan is None:
                self._ground.files.close(fd)
        return orphan

    def _read(self, segment: SegmentUsage, fd: int) -> Orphan | None:
        try:
            header = parse_header_of(
                self._ground.files.pread(fd, PAGE_BYTES, 0),
                segment.segment_id,
                self._ground.records.namespace,
            )
            self._ground.check_fits(header)
        except FormatTooNew as exc:
            self._ground.num_too_new += 1
            self._ground.log.warning("segment %s is left alone: %s", segment.segment_id, exc)
            return None
        except CorruptChunk as exc:
            self._ground.num_damaged += 1
            self._ground.log.warning("segment %s is removed: %s", segment.segment_id, exc)
            self.note_lost(fd, "vanished")
            self._ground.root.remove_segment(segment.segment_id, segment.directory)
            self._ground.look()
            return None
        return Orphan(segment, header, fd)

    def let_go(self, orphans: list[Orphan]) -> None:
        """Unlock orphans that are not adopted."""
        for orphan in orphans:
            self._ground.files.close(orphan.index_fd)

    def note_lost(self, index_fd: int, why: str, first_slot: int = 0) -> None:
        """Tell what a segment holds, from `first_slot` on, before it goes."""
        entries = self._ground.read_table(index_fd, first_slot)
        chunks = zip(entries.keys, entries.epochs.tolist(), strict=True)
        self._ground.holdings.note_lost(chunks, why)

    def latest_epoch(self) -> int:
        """The latest epoch that any chunk of this namespace carries; 0 if there is none."""
        latest = 0
        for segment in self._ground.root.usage().namespaces[self._ground.namespace_name].segments:
            path = f"{segment.directory}/seg-{segment.segment_id}{INDEX_SUFFIX}"
            with suppress(FileNotFoundError, NotOurs):
                fd = self._ground.files.open(path, os.O_RDONLY)
                try:
                    epochs = self._ground.read_table(fd).epochs
                finally:
                    self._ground.files.close(fd)
                latest = max(latest, int(epochs.max(initial=0)))
        return latest

    def prepare(self, orphan: Orphan) -> tuple[OwnSegment, int] | None:
        """Open the slab and mend the sizes of both files; None if the segment had to go.

        Returns:
            The segment, and how many of its slots were really there.
        """
        files, header, usage = self._ground.files, orphan.header, orphan.usage
        segment = OwnSegment(
            self._ground.holdings.next_number(), header, -1, orphan.index_fd, usage.directory
        )
        try:
            flags = os.O_RDWR | self._ground.records.open_flags()
            segment.slab_fd = files.open(segment.path(SLAB_SUFFIX), flags)
            slots = files.fstat(segment.slab_fd).st_size // header.record_bytes
            if not self._mend(segment):
                self.note_lost(segment.index_fd, "given_up")
                self._ground.root.remove_segment(header.segment_id, usage.directory)
                segment.disk_close(files)
                return None
            segment.disk_is_linked(files)
        except NotOurs as exc:
            self._ground.log.warning("%s is left alone: %s", exc.filename, exc.strerror)
            segment.disk_close(files)
            return None
        except BaseException:
            segment.disk_close(files)
            raise
        return segment, min(slots, header.num_slots)

    def _mend(self, segment: OwnSegment) -> bool:
        """Cut or fill both files to their sizes; False if the capacity does not allow it."""
        files, header = self._ground.files, segment.header
        for fd, size in (
            (segment.slab_fd, header.num_slots * header.record_bytes),
            (segment.index_fd, index_bytes(header.num_slots)),
        ):
            found = files.fstat(fd).st_size
            if found > size:
                files.truncate(fd, size)
            elif found < size:
                missing = size - found
                if self._ground.usage.planned_bytes + missing > self._ground.limits.capacity_bytes:
                    return False
                files.allocate(fd, size)
            if found != size:
                self._ground.look()
        return True

    def adopt(self, segment: OwnSegment, num_slots: int) -> None:
        """Make a prepared segment ours: read its table, tell followers of the new owner."""
        files, header = self._ground.files, segment.header
        try:
            table = files.pread(segment.index_fd, num_slots * ENTRY_BYTES, PAGE_BYTES)
            entries = parse_entries(table, header.namespace)
            if num_slots < header.num_slots:
                self.note_lost(segment.index_fd, "vanished", num_slots)
            segment.disk_begin(files)
        except BaseException:
            segment.disk_close(files)
            raise
        self._follower.stop(header.segment_id)
        self._ground.holdings.add_own(segment, entries)
        self._ground.num_adopted += 1
        self._ground.num_damaged += len(entries.damaged_slots)
