"""What the parts of the disk tier's upkeep share: files, root, tables, limits, the last look."""

from __future__ import annotations

from dataclasses import dataclass, field

from undercroft.clock import Clock
from undercroft.errors import CorruptChunk
from undercroft.log import SparingLog
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.holdings import Holdings
from undercroft.tiers.disk.owed import OwedResets
from undercroft.tiers.disk.records import RecordIo
from undercroft.tiers.disk.root import Root
from undercroft.tiers.disk.segment import OpenSegment, segment_bytes
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    MAX_SLOTS,
    Entries,
    IndexHeader,
    entry_offset,
    parse_entries,
)
from undercroft.tiers.disk.usage import NamespaceUsage, Usage

__all__ = ["Ground", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows."""

    capacity_bytes: int
    free_space_floor_bytes: int
    num_replicas: int
    direct: bool | None


@dataclass(slots=True)
class Ground:
    """Shared by keeper, orphans, follower and room. `usage` is the last look at the disk."""

    files: Files
    root: Root
    records: RecordIo
    holdings: Holdings
    limits: Limits
    clock: Clock
    log: SparingLog
    owed: OwedResets
    usage: Usage = field(default_factory=Usage)
    num_looks: int = 0
    free_bytes: int = 0
    num_adopted: int = 0
    num_damaged: int = 0
    num_too_new: int = 0
    names_changed: bool = False

    def look(self) -> None:
        """Look at the disk anew."""
        self.usage = self.root.usage()
        self.free_bytes = self.files.free_bytes(self.root.path)
        self.num_looks += 1  # last: who remembers something by this number has used what was seen

    @property
    def namespace_name(self) -> str:
        """The directory name of our namespace."""
        return self.root.directory.rpartition("/")[2]

    @property
    def namespace(self) -> NamespaceUsage:
        """Our namespace at the last look."""
        return self.usage.namespaces.get(self.namespace_name) or NamespaceUsage(self.root.directory)

    @property
    def share_bytes(self) -> int:
        """What this process may hold in segments."""
        share = self.usage.share_bytes(self.limits.capacity_bytes)
        return share // self.limits.num_replicas

    def check_fits(self, header: IndexHeader) -> None:
        """Refuse a segment that says it is larger than all that may be here: nothing is read of it.

        Raises:
            CorruptChunk: It does.
        """
        size = segment_bytes(header.record_bytes, header.num_slots)
        if size > self.limits.capacity_bytes:
            raise CorruptChunk(
                f"the index header says {header.num_slots} slots of {header.record_bytes} bytes, "
                f"more than the capacity of {self.limits.capacity_bytes}"
            )

    def read_table(self, index_fd: int, first_slot: int = 0) -> Entries:
        """The entries of an index whose header may be damaged: as far as its slab could hold them.

        A file may say any size, at no cost to whoever made it: no more is read than the capacity
        has records for.
        """
        at = entry_offset(first_slot)
        most = min(MAX_SLOTS, self.limits.capacity_bytes // (2 * PAGE_BYTES)) * ENTRY_BYTES
        size = max(0, min(self.files.fstat(index_fd).st_size - at, most))
        return parse_entries(
            self.files.pread(index_fd, size, at), self.records.namespace, first_slot
        )

    def enter(self, segment: OpenSegment) -> bool:
        """Keep the segment's files open; False if they are already closed."""
        with self.holdings.lock:
            if not segment.doomed:
                segment.users += 1
            return not segment.doomed

    def leave(self, segment: OpenSegment) -> None:
        """The other half of `enter`."""
        if self.holdings.leave(segment):
            segment.disk_close(self.files)
