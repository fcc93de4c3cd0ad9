"""Checks a whole store: every record against its entry, sizes, debris, the capacity.

Works beside running engines: what looks wrong is looked at again, since its owner may be writing
it. Only segments that nobody owns are repaired, by freeing what is bad: nothing is ever made up.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from undercroft.errors import CorruptChunk, FormatTooNew, TierUnavailable
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.records import RecordIo, record_bytes
from undercroft.tiers.disk.stored import (
    EPOCH_LOST,
    Store,
    StoredChunk,
    StoredNamespace,
    StoredSegment,
)
from undercroft.tiers.disk.table import index_bytes, parse_entries

__all__ = ["Finding", "Fsck", "Kind", "Report"]


class Kind(Enum):
    """What can be found."""

    RECORD = "record"
    ENTRY = "entry"
    SIZE = "size"
    SEGMENT = "segment"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    QUOTA = "quota"
    DEBRIS = "debris"
    NEWER = "newer"
    FOREIGN = "foreign"
    TWICE = "twice"


_NOTES = frozenset({Kind.DEBRIS, Kind.NEWER, Kind.FOREIGN, Kind.TWICE})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        kind: Which.
        path: The file or directory.
        what: In words.
        slot: Of which slot, or -1.
        chunk: The chunk that is lost by it, if it is one.
        segment: The segment it is in, if it is in one.
        namespace: The namespace it is in, if it is in one.
    """

    kind: Kind
    path: str
    what: str
    slot: int = -1
    chunk: StoredChunk | None = None
    segment: StoredSegment | None = None
    namespace: StoredNamespace | None = None

    @property
    def is_fault(self) -> bool:
        """Whether something is lost or wrong, rather than worth knowing."""
        return self.kind not in _NOTES


@dataclass(slots=True)
class Report:
    """What a check found, and how much it saw."""

    findings: list[Finding] = field(default_factory=list)
    num_namespaces: int = 0
    num_segments: int = 0
    num_chunks: int = 0
    num_void: int = 0
    num_bytes: int = 0

    @property
    def num_faults(self) -> int:
        """Findings that are faults."""
        return sum(finding.is_fault for finding in self.findings)


def _ignore(_done_bytes: int, _total_bytes: int) -> None:
    """Nobody watches."""


class Fsck:
    """Checks what a catalogue shows.

    Args:
        catalog: Of the store.
        num_threads: Records read at the same time.
        on_progress: Told of bytes read so far, and of all.

    Threads: one at a time. Cost: one read of everything, past the page cache where possible.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        num_threads: int = 4,
        on_progress: Callable[[int, int], None] = _ignore,
    ) -> None:
        self._catalog = catalog
        self._files = catalog.files
        self._num_threads = num_threads
        self._on_progress = on_progress
        self._pool = AlignedPool()
        self._done_bytes = self._total_bytes = 0

    def check(self, store: Store, *, capacity_bytes: int | None = None) -> Report:
        """Look at everything in `store`.

        Args:
            store: From the catalogue's `look`.
            capacity_bytes: What all of it must fit; None if that is not known.
        """
        report = Report(num_namespaces=len(store.namespaces))
        if capacity_bytes is not None and store.charged_bytes > capacity_bytes:
            what = f"{store.charged_bytes} bytes are used, {capacity_bytes} are allowed"
            report.findings.append(Finding(Kind.QUOTA, store.path, what))
        for piece in store.foreign:
            report.findings.append(
                Finding(Kind.FOREIGN, piece.path, f"not ours; {piece.charged_bytes} bytes")
            )
        slabs = [s.slab for n in store.namespaces for s in n.segments if s.slab and s.header]
        self._done_bytes, self._total_bytes = 0, sum(slab.num_bytes for slab in slabs)
        for namespace in store.namespaces:
            self._check_namespace(namespace, report, is_settled=store.is_settled)
        return report

    def _check_namespace(
        self, namespace: StoredNamespace, report: Report, *, is_settled: bool
    ) -> None:
        directory = namespace.directory.path
        if namespace.problem:
            kind = Kind.EPOCH if namespace.problem == EPOCH_LOST else Kind.NAMESPACE
            report.findings.append(Finding(kind, directory, namespace.problem, namespace=namespace))
        if is_settled:
            report.findings += [
                Finding(Kind.DEBRIS, piece.path, "left by a crash", namespace=namespace)
                for piece in namespace.temporaries
            ]
        times: Counter[bytes] = Counter()
        for segment in namespace.segments:
            self._check_segment(segment, namespace, (report, times), is_settled=is_settled)
        report.findings += [
            Finding(Kind.TWICE, directory, f"chunk {key.hex()} is stored {count} times")
            for key, count in times.items()
            if count > 1
        ]

    def _check_segment(
        self,
        segment: StoredSegment,
        namespace: StoredNamespace,
        into: tuple[Report, Counter[bytes]],
        *,
        is_settled: bool,
    ) -> None:
        report, times = into
        report.num_segments += 1

        def find(kind: Kind, what: str, slot: int = -1, chunk: StoredChunk | None = None) -> None:
            path = segment.index_path if kind is Kind.ENTRY else segment.slab_path
            report.findings.append(Finding(kind, path, what, slot, chunk, segment, namespace))

        if segment.header is None:
            if segment.is_too_new:
                find(Kind.NEWER, segment.problem)
            elif is_settled:
                find(Kind.SEGMENT, segment.problem)
            return
        for what in _wrong_sizes(segment):
            find(Kind.SIZE, what)
        entries = self._catalog.entries(segment)
        if entries is None:
            return  # removed meanwhile
        for slot in entries.damaged_slots.tolist():
            find(Kind.ENTRY, "the entry is damaged: its chunk is lost, its slot free", slot)
        chunks = list(self._catalog.chunks_of(segment, namespace.epoch))
        current = [chunk for chunk in chunks if chunk.is_current]
        report.num_void += len(chunks) - len(current)
        report.num_chunks += len(current)
        times.update(chunk.key for chunk in current)
        before = self._done_bytes
        for chunk, what in self._verified(segment, current):
            report.num_bytes += chunk.payload_bytes
            if what:
                find(Kind.RECORD, what, chunk.slot, chunk)
        self._done_bytes = before + (segment.slab.num_bytes if segment.slab else 0)
        self._on_progress(self._done_bytes, self._total_bytes)

    # --- records ------------------------------------------------------------------------------

    def _verified(
        self, segment: StoredSegment, chunks: list[StoredChunk]
    ) -> Iterator[tuple[StoredChunk, str]]:
        """Each chunk with what is wrong with it; empty if nothing is."""
        if not chunks:
            return
        with self._reader(segment) as read, ThreadPoolExecutor(self._num_threads) as threads:
            try:
                for chunk, what in zip(chunks, threads.map(read, chunks), strict=True):
                    self._done_bytes += record_bytes(chunk.payload_bytes)
                    self._on_progress(self._done_bytes, self._total_bytes)
                    yield chunk, what
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def verify(self, chunk: StoredChunk) -> str:
        """What is wrong with one chunk's record; empty if nothing is."""
        with self._reader(chunk.segment) as read:
            return read(chunk)

    @contextmanager
    def _reader(self, segment: StoredSegment) -> Iterator[Callable[[StoredChunk], str]]:
        header = segment.header
        if header is None:
            raise TierUnavailable(f"{segment.index_path}: {segment.problem}")
        try:
            fd, is_direct = self._open(segment.slab_path)
        except OSError as exc:
            reason = f"the slab cannot be opened: {exc.strerror}"
            yield lambda chunk: reason if self._is_there(chunk) else ""
            return
        records = RecordIo(self._files, header.namespace, self._pool, is_direct)

        def read(chunk: StoredChunk) -> str:
            what = self._read(records, fd, chunk, header.record_bytes)
            if what and self._is_there(chunk):
                what = self._read(records, fd, chunk, header.record_bytes)
            return what if what and self._is_there(chunk) else ""

        try:
            yield read
        finally:
            self._files.close(fd)

    def _open(self, path: str) -> tuple[int, bool]:
        """The slab, and whether past the page cache: the file system says so by taking a read."""
        try:
            fd = self._files.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return self._files.open(path, os.O_RDONLY), False
        page = self._pool.take(PAGE_BYTES)
        try:
            self._files.preadv(fd, [page], 0)
        except OSError as exc:
            self._files.close(fd)
            if exc.errno != errno.EINVAL:
                raise
            return self._files.open(path, os.O_RDONLY), False
        finally:
            self._pool.give(page)
        return fd, True

    def _read(self, records: RecordIo, fd: int, chunk: StoredChunk, size: int) -> str:
        if record_bytes(chunk.payload_bytes) != size:
            return f"the entry says {chunk.payload_bytes} bytes, which no slot of {size} holds"
        try:
            whole = self._pool.take(size)
        except OSError as exc:
            return f"there is no memory for its {size} bytes: {exc.strerror}"
        try:
            out = whole[: chunk.payload_bytes]
            records.read(fd, chunk.slot * size, chunk.key, chunk.epoch, out)
        except (CorruptChunk, FormatTooNew) as exc:
            return str(exc)
        except OSError as exc:
            return f"the record cannot be read: {exc.strerror}"
        finally:
            self._pool.give(whole)
        return ""

    def _is_there(self, chunk: StoredChunk) -> bool:
        """Whether the entry on disk is still the one that was seen."""
        header = chunk.segment.header
        entry = self._catalog.entry(chunk.segment, chunk.slot)
        if header is None or not entry:
            return False
        now = parse_entries(entry, header.namespace, chunk.slot)
        seen = [(chunk.key, chunk.epoch, chunk.sequence)]
        return list(zip(now.keys, now.epochs.tolist(), now.sequences.tolist(), strict=True)) == seen


def _wrong_sizes(segment: StoredSegment) -> Iterator[str]:
    header, slab, index = segment.header, segment.slab, segment.index
    if header is None or slab is None or index is None:
        return
    for name, piece, wanted in (
        ("slab", slab, header.num_slots * header.record_bytes),
        ("index", index, index_bytes(header.num_slots)),
    ):
        if piece.num_bytes < wanted:
            yield f"the {name} is cut: {piece.num_bytes} of {wanted} bytes are there"
        elif piece.num_bytes > wanted:
            yield f"the {name} has grown: {piece.num_bytes} bytes, {wanted} are ours"
