"""Learns what other processes of the same namespace hold."""

from __future__ import annotations

import os
from contextlib import suppress

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import NotOurs
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.ground import Ground
from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX
from undercroft.tiers.disk.table import parse_header_of

__all__ = ["Follower"]


class Follower:
    """The foreign segments of one tier. Threads: callers hold `Keeper.shape`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._listed_ns = (-1, -1)
        self._settled = False

    def restart(self) -> None:
        """Forget when the directory was last listed."""
        self._listed_ns = (-1, -1)

    def follow(self) -> None:
        """See what other processes did: new segments, gone ones, changed ones."""
        now_s = self._ground.clock.now_s()
        stat, root = self._ground.files.stat, self._ground.root
        listed_ns = (stat(root.path).st_mtime_ns, stat(root.directory).st_mtime_ns)
        if listed_ns != self._listed_ns or not self._settled:
            # Time stamps are coarse: list again at the next call, when the tick has passed.
            self._settled = listed_ns == self._listed_ns
            self._listed_ns = listed_ns
            self._ground.look()
            self._list_foreign()
        for segment in self._ground.holdings.foreign.values():
            try:
                sighting = segment.disk_look(self._ground.files, now_s)
            except (CorruptChunk, FormatTooNew):
                segment.stale = True
                continue
            if sighting:
                self._ground.holdings.see(segment, sighting)
        self._compare_one(now_s)

    def _compare_one(self, now_s: float) -> None:
        """Read one table for what its ring left out: the one that changed last, of those due.

        One a call bounds what a start beside many segments costs.
        """
        files, foreign = self._ground.files, self._ground.holdings.foreign
        due = [s for s in foreign.values() if s.disk_is_due(files, now_s)]
        if due:
            segment = max(due, key=lambda s: s.settled_s)
            sighting = segment.disk_compare(files, now_s)
            if sighting:
                self._ground.holdings.see(segment, sighting)

    def _list_foreign(self) -> None:
        there = {segment.segment_id for segment in self._ground.namespace.segments}
        known = {s.header.segment_id for s in self._ground.holdings.own.values()}
        for segment in self._ground.holdings.foreign.values():
            if segment.header.segment_id in there:
                known.add(segment.header.segment_id)
            else:
                self.drop(segment)
        for segment_id in sorted(there - known):
            with suppress(FileNotFoundError, NotOurs, CorruptChunk, FormatTooNew):
                self._open_foreign(segment_id)

    def _open_foreign(self, segment_id: str) -> None:
        files, records = self._ground.files, self._ground.records
        base = f"{self._ground.root.directory}/seg-{segment_id}"
        index_fd = files.open(base + INDEX_SUFFIX, os.O_RDONLY)
        try:
            page = files.pread(index_fd, PAGE_BYTES, 0)
            header = parse_header_of(page, segment_id, records.namespace)
            self._ground.check_fits(header)
            slab_fd = files.open(base + SLAB_SUFFIX, os.O_RDONLY | records.open_flags())
        except BaseException:
            files.close(index_fd)
            raise
        number = self._ground.holdings.next_number()
        self._ground.holdings.add_foreign(
            ForeignSegment(number, header, slab_fd, index_fd, self._ground.root.directory)
        )

    def drop(self, segment: ForeignSegment) -> None:
        """Stop following `segment` and close its files."""
        if self._ground.holdings.drop_foreign(segment):
            segment.disk_close(self._ground.files)

    def stop(self, segment_id: str) -> None:
        """Stop following the segment of that id, if it is followed."""
        for segment in self._ground.holdings.foreign.values():
            if segment.header.segment_id == segment_id:
                self.drop(segment)
