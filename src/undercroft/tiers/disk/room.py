"""Room for another chunk: creates, re-cuts and removes segments within the capacity."""

from __future__ import annotations

import os
from contextlib import suppress

from undercroft.errors import TierFull
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import NotOurs
from undercroft.tiers.disk.ground import Ground
from undercroft.tiers.disk.orphans import Orphans
from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX, OwnSegment
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    IndexHeader,
    index_bytes,
    pack_header,
    parse_entries,
)
from undercroft.tiers.disk.usage import (
    SegmentUsage,
    Wanted,
    created_bytes,
    plan_slots,
    reserve_bytes,
)

__all__ = ["Room"]


class Room:
    """Makes slots. Threads: callers hold `Keeper.shape`."""

    def __init__(self, ground: Ground, orphans: Orphans) -> None:
        self._ground = ground
        self._orphans = orphans
        self._wanted = Wanted(ground.limits.capacity_bytes, ground.limits.num_replicas)
        self._creatable: dict[int, tuple[tuple[int, int, int], int]] = {}

    def grow(self, record_bytes: int) -> None:
        """Make at least one slot of `record_bytes` free.

        Raises:
            TierFull: Not without deleting chunks of that size, or not at all.
        """
        with self._ground.root.locked():
            self._ground.look()
            while not self._has_slot(record_bytes):
                if self._create(record_bytes):
                    break
                if not self._make_room(record_bytes):
                    raise TierFull(self._why_full(record_bytes))
            self._ground.look()

    def _has_slot(self, record_bytes: int) -> bool:
        return any(
            s.num_free and s.header.record_bytes == record_bytes
            for s in self._ground.holdings.own.values()
        )

    def _why_full(self, record_bytes: int) -> str:
        slots = sum(
            s.header.num_slots
            for s in self._ground.holdings.own.values()
            if s.header.record_bytes == record_bytes
        )
        ground, limits = self._ground, self._ground.limits
        return (
            f"{ground.root.path} is full: {ground.usage.charged_bytes} of {limits.capacity_bytes} "
            f"bytes are used, {slots} slots of this size ({record_bytes} bytes with header) are "
            f"held; the file system has {ground.free_bytes} bytes free, of which "
            f"{limits.free_space_floor_bytes} are to stay so: delete chunks, raise the capacity, "
            "or free space"
        )

    def own_planned_bytes(self) -> int:
        """What this process's segments count against its share."""
        return sum(
            max(s.charged_bytes, slab + index_bytes(s.header.num_slots) + reserve_bytes(slab))
            for s in self._ground.holdings.own.values()
            for slab in (s.header.num_slots * s.header.record_bytes,)
        )

    def room_bytes(self) -> int:
        """What may still be created, by the last look at the disk."""
        ground = self._ground
        return min(
            self._wanted.room_bytes(ground.usage, ground.namespace_name, self.own_planned_bytes()),
            ground.free_bytes - ground.limits.free_space_floor_bytes,
        )

    def creatable_slots(self, record_bytes: int, idle_bytes: int) -> int:
        """How many slots fit the room, with `idle_bytes` more, in as many segments as it takes.

        Remembered until the disk is looked at again: the scheduler thread asks often.
        """
        state = (self._ground.num_looks, idle_bytes, len(self._ground.holdings.own))
        known, total = self._creatable.get(record_bytes, ((-1, 0, 0), 0))
        if known != state:
            total = self._count_creatable(record_bytes, self.room_bytes() + idle_bytes)
            self._creatable[record_bytes] = (state, total)
        return total

    def _count_creatable(self, record_bytes: int, room_bytes: int) -> int:
        total, target = 0, self._wanted.target_slots(record_bytes)
        while slots := plan_slots(room_bytes, record_bytes, target):
            size = created_bytes(record_bytes, slots)
            times = max(1, room_bytes // size) if slots == target else 1
            total += times * slots
            room_bytes -= times * size
        return total

    def _create(self, record_bytes: int) -> bool:
        slots = plan_slots(self.room_bytes(), record_bytes, self._wanted.target_slots(record_bytes))
        if not slots:
            return False
        header = IndexHeader(
            self._ground.files.random_hex(), self._ground.records.namespace, record_bytes, slots
        )
        self._ground.holdings.add_own(self._create_files(header), None)
        self._ground.names_changed = True
        return True

    def _create_files(self, header: IndexHeader) -> OwnSegment:
        """Slab first, then the index under a temporary name: the rename is the birth."""
        base = f"{self._ground.root.directory}/seg-{header.segment_id}"
        number = self._ground.holdings.next_number()
        segment = OwnSegment(number, header, -1, -1, self._ground.root.directory)
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            slab = base + SLAB_SUFFIX
            segment.slab_fd = self._ground.files.open(slab, new | self._ground.records.open_flags())
            self._ground.files.allocate(segment.slab_fd, header.num_slots * header.record_bytes)
            segment.index_fd = self._ground.files.open(f"{base}{INDEX_SUFFIX}.tmp", new)
            self._ground.files.lock(segment.index_fd)
            self._ground.files.allocate(segment.index_fd, index_bytes(header.num_slots))
            self._ground.files.pwrite(segment.index_fd, pack_header(header), 0)
            self._ground.files.rename(f"{base}{INDEX_SUFFIX}.tmp", base + INDEX_SUFFIX)
            segment.disk_is_linked(self._ground.files)
        except OSError:
            segment.disk_close(self._ground.files)
            for suffix in (INDEX_SUFFIX, f"{INDEX_SUFFIX}.tmp", SLAB_SUFFIX):
                with suppress(OSError):
                    self._ground.files.unlink(base + suffix)
            raise
        return segment

    def _make_room(self, record_bytes: int) -> bool:
        """One step towards room; False if nothing may go."""
        own = self._ground.holdings.own.values()
        others = [s for s in own if s.header.record_bytes != record_bytes]
        idle = [s for s in others if s.is_idle]
        if idle:
            self.release(idle[0])
            return True
        if self._adopt_one() or self.remove_stranger():
            return True
        unused = [s for s in others if s.users == 0]
        if unused and len(others) == len(own):
            self.release(min(unused, key=lambda s: s.newest))
            return True
        return False

    def _adopt_one(self) -> bool:
        left = self._ground.share_bytes - self.own_planned_bytes()
        orphans = self._orphans.lock_all()
        fitting = [orphan for orphan in orphans if orphan.usage.planned_bytes <= left]
        self._orphans.let_go([orphan for orphan in orphans if orphan not in fitting[:1]])
        for orphan in fitting[:1]:
            prepared = self._orphans.prepare(orphan)
            if prepared:
                self._orphans.adopt(*prepared)
                self._ground.holdings.note_adopted(prepared[0])
            self._ground.look()
        return bool(fitting)

    def remove_stranger(self, newcomers: int = 0) -> bool:
        """Remove the coldest unowned segment of a namespace that holds more than its share.

        Args:
            newcomers: Namespaces to come, for which shares are to be kept.
        """
        usage = self._ground.usage
        share = usage.share_bytes(self._ground.limits.capacity_bytes, newcomers)
        for name, namespace in usage.namespaces.items():
            if name == self._ground.namespace_name:
                continue
            for segment in sorted(namespace.segments, key=lambda s: s.modified_ns):
                if namespace.planned_bytes - segment.planned_bytes < share:
                    break
                if self._remove_if_orphan(segment):
                    self._ground.look()
                    return True
        return False

    def _remove_if_orphan(self, segment: SegmentUsage) -> bool:
        path = f"{segment.directory}/seg-{segment.segment_id}{INDEX_SUFFIX}"
        try:
            fd = self._ground.files.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotOurs):
            return False
        try:
            if not self._ground.files.lock(fd):
                return False
            self._ground.root.remove_segment(segment.segment_id, segment.directory)
        finally:
            self._ground.files.close(fd)
        return True

    def release(self, segment: OwnSegment) -> None:
        """Remove one of our segments with all it holds. Needs the root's lock."""
        files, header = self._ground.files, segment.header
        table = files.pread(segment.index_fd, header.num_slots * ENTRY_BYTES, PAGE_BYTES)
        unused = self._ground.holdings.drop_own(
            segment, parse_entries(table, header.namespace).keys, "given_up"
        )
        try:
            self._ground.root.remove_segment(header.segment_id, segment.directory)
        finally:
            if unused:
                segment.disk_close(files)
        self._ground.look()

    def give_up_excess(self) -> None:
        """Shrink to our share after another namespace has come."""
        if len(self._ground.usage.namespaces) == 1:
            return
        while self.own_planned_bytes() > self._ground.share_bytes:
            unused = [s for s in self._ground.holdings.own.values() if s.users == 0]
            if not unused:
                return
            with self._ground.root.locked():
                self.release(min(unused, key=lambda s: s.newest))
