"""Who uses how much of a root, and how large the next segment may be. Arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.segment import segment_bytes
from undercroft.tiers.disk.table import MAX_SLOTS

__all__ = [
    "NAMESPACE_BYTES",
    "NamespaceUsage",
    "SegmentUsage",
    "Usage",
    "Wanted",
    "created_bytes",
    "plan_slots",
    "reserve_bytes",
]

NAMESPACE_BYTES = 4 * PAGE_BYTES
_TINY_SPARE = 32
_MIN_SLOTS = 8
_CHEAP_SLOTS = 32
_FEWEST_SEGMENTS = 8
_NAMES_BYTES = 256
_MAX_SEGMENTS = 256
_SEGMENTS_WANTED = 64
_MAX_SEGMENT_BYTES = 256 << 20


def reserve_bytes(slab_bytes: int) -> int:
    """What the file system may later take for a slab's block map.

    Out-of-order first writes split a preallocated extent; on ext4 a block of the map holds 340.
    """
    return PAGE_BYTES * (1 + (slab_bytes >> 20))


def created_bytes(record_bytes: int, num_slots: int) -> int:
    """What a new segment must find room for: its files, and what they may come to cost."""
    files = segment_bytes(record_bytes, num_slots)
    return files + reserve_bytes(record_bytes * num_slots) + _NAMES_BYTES


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    """One segment's files as found on disk."""

    segment_id: str
    directory: str
    slab_bytes: int
    file_bytes: int
    charged_bytes: int
    modified_ns: int

    @property
    def planned_bytes(self) -> int:
        """Charged now, or once its block map has grown."""
        return max(self.charged_bytes, self.file_bytes + reserve_bytes(self.slab_bytes))


@dataclass(slots=True)
class NamespaceUsage:
    """One namespace's directory as found on disk."""

    directory: str
    directory_bytes: int = 0
    segments: list[SegmentUsage] = field(default_factory=list)

    @property
    def planned_bytes(self) -> int:
        """Of all its segments, and the room their names may come to need."""
        names = max(0, _NAMES_BYTES * len(self.segments) + PAGE_BYTES - self.directory_bytes)
        return names + sum(segment.planned_bytes for segment in self.segments)


@dataclass(slots=True)
class Usage:
    """Everything under a root."""

    namespaces: dict[str, NamespaceUsage] = field(default_factory=dict)
    fixed_bytes: int = 0
    foreign_names: list[str] = field(default_factory=list)

    @property
    def planned_bytes(self) -> int:
        """All that must fit the capacity."""
        return self.fixed_bytes + sum(n.planned_bytes for n in self.namespaces.values())

    @property
    def charged_bytes(self) -> int:
        """All that is there now, as `du` counts."""
        return self.fixed_bytes + sum(
            s.charged_bytes for n in self.namespaces.values() for s in n.segments
        )

    def share_bytes(self, capacity_bytes: int, newcomers: int = 0) -> int:
        """What each namespace, and of `newcomers` more each, is entitled to for its segments."""
        num_shares = max(1, len(self.namespaces) + newcomers)
        return max(0, capacity_bytes - self.fixed_bytes) // num_shares


@dataclass(frozen=True, slots=True)
class Wanted:
    """Limits that decide how large segments are."""

    capacity_bytes: int
    num_replicas: int

    def target_slots(self, record_bytes: int) -> int:
        """Slots of an ordinary segment: 1/64 of the capacity, and few enough to keep open.

        Where that is few slots, up to 32, so that the index costs little, but at most 1/8 of the
        capacity, so that sizes can share it.
        """
        largest = max(_MAX_SEGMENT_BYTES, self.capacity_bytes // _MAX_SEGMENTS)
        target = min(self.capacity_bytes // _SEGMENTS_WANTED, largest)
        cheap = min(_CHEAP_SLOTS, self.capacity_bytes // _FEWEST_SEGMENTS // record_bytes)
        return min(MAX_SLOTS, max(_MIN_SLOTS, cheap, target // record_bytes))

    def room_bytes(self, usage: Usage, namespace: str, own_planned_bytes: int) -> int:
        """How much this process may add: within the capacity, its namespace's share, its own.

        Room for the directory of one more namespace is left, so that a newcomer can make itself
        known to those who hold everything; where the capacity is tiny, for a part of it only.
        """
        spare = min(NAMESPACE_BYTES, self.capacity_bytes // _TINY_SPARE)
        share = usage.share_bytes(self.capacity_bytes)
        mine = usage.namespaces.get(namespace)
        return min(
            self.capacity_bytes - usage.planned_bytes - spare,
            share - (mine.planned_bytes if mine else 0),
            share // self.num_replicas - own_planned_bytes,
        )


def plan_slots(room_bytes: int, record_bytes: int, target_slots: int) -> int:
    """The most slots, up to `target_slots`, whose segment fits `room_bytes`; 0 if none does."""
    slots = min(target_slots, room_bytes // record_bytes)
    while slots > 0:
        if created_bytes(record_bytes, slots) <= room_bytes:
            return slots
        slots -= 1
    return 0
