"""Cut one buffer into slots of a few sizes. Bytes and integers only: no keys, no policy.

The buffer is cut into equal *extents*. An extent belongs to one size class at a time: it is handed
to a class on demand and comes back when its last slot is given back, so that groups of different
chunk sizes share the bytes. With one size class an extent is exactly one slot and nothing is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

from undercroft.errors import Bug, ConfigError

__all__ = ["SLOT_ALIGNMENT_BYTES", "SlotState", "Slots", "slot_bytes_for"]

SLOT_ALIGNMENT_BYTES = 4096
"""Slots start and end on this boundary, so that O_DIRECT reads and writes them in place."""

_EXTENT_TARGET_BYTES = 4 << 20
_NO_CLASS = -1


class SlotState(IntEnum):
    """What a slot is doing. Pins are a count beside it. From READY on, its bytes can be read."""

    FREE = 0
    FILLING = 1
    DRAINING = 2
    READY = 3
    FRESH = 4
    """Readable, but its policy does not know it yet: not evictable."""


# A global's name costs half of an enum member's on the paths taken per key.
_FILLING, _READY, _FRESH = map(int, (SlotState.FILLING, SlotState.READY, SlotState.FRESH))


def slot_bytes_for(payload_bytes: int) -> int:
    """Bytes of a slot that holds `payload_bytes`, rounded up to the slot alignment."""
    return -(-payload_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _extent_bytes(total_bytes: int, sizes: Sequence[int]) -> int:
    """The extent size that wastes least over all classes and still leaves room to share."""
    largest = max(sizes)
    if len(sizes) == 1:
        return largest
    most = max(1, min(_EXTENT_TARGET_BYTES * 4, total_bytes // (4 * len(sizes))) // largest)
    best, best_waste = largest, 1.0
    for multiple in range(1, most + 1):
        extent = multiple * largest
        waste = max((extent % size) / extent for size in sizes)
        if waste < best_waste - 1e-9:
            best, best_waste = extent, waste
    return best


class Slots:
    """Slot geometry, states and pins of one buffer.

    Args:
        total_bytes: Length of the buffer.
        slot_bytes: Bytes of one slot of each size class; multiples of `SLOT_ALIGNMENT_BYTES`.

    Raises:
        ConfigError: The buffer does not hold one slot of every class.

    Threads: one. Cost: O(1) per call; about 25 bytes a slot, none of them tracked by the garbage
    collector one by one.
    """

    def __init__(self, total_bytes: int, slot_bytes: Sequence[int]) -> None:
        for size in slot_bytes:
            if size <= 0 or size % SLOT_ALIGNMENT_BYTES:
                raise Bug(f"slot size {size} is not a positive multiple of {SLOT_ALIGNMENT_BYTES}")
        needed = sum(slot_bytes)
        if total_bytes < needed:
            raise ConfigError(
                f"host memory of {total_bytes} bytes cannot hold one chunk of every group: "
                f"{needed} bytes are needed at least; raise `host`"
            )
        self.slot_bytes = tuple(slot_bytes)
        self.extent_bytes = _extent_bytes(total_bytes, slot_bytes)
        self.num_extents = total_bytes // self.extent_bytes
        self._per_extent = tuple(self.extent_bytes // size for size in slot_bytes)
        self._stride = max(self._per_extent)
        num_slots = self.num_extents * self._stride
        self.states = bytearray(num_slots)
        self.pins = array("i", bytes(4 * num_slots))
        self._extent_class = array("b", [_NO_CLASS]) * self.num_extents
        self._free_mask: list[int] = []
        self._partial: list[dict[int, None]] = [{} for _ in slot_bytes]
        self._free_extents = array("i")
        self._next_fresh = 0
        self._usable_extents = 0
        self._owned_extents = [0] * len(slot_bytes)
        self.num_pinned = 0
        """Slots with at least one pin."""
        self._num_taken = [0] * len(slot_bytes)
        self._num_ready_unpinned = [0] * len(slot_bytes)
        if self._stride > 1:
            self._free_mask = [0] * self.num_extents

    def set_ready_bytes(self, ready_bytes: int) -> None:
        """Only the first `ready_bytes` of the buffer may be handed out. Never shrinks."""
        self._usable_extents = max(
            self._usable_extents, min(self.num_extents, ready_bytes // self.extent_bytes)
        )

    def capacity(self, size_class: int) -> int:
        """How many slots of `size_class` the whole buffer would hold."""
        return self.num_extents * self._per_extent[size_class]

    def class_of(self, slot: int) -> int:
        """The size class of a slot that is not FREE."""
        return self._extent_class[slot // self._stride]

    def offset(self, slot: int) -> int:
        """Byte offset of the slot in the buffer."""
        extent, index = divmod(slot, self._stride)
        return extent * self.extent_bytes + index * self.slot_bytes[self._extent_class[extent]]

    def offsets(self, slots: Sequence[int]) -> list[int]:
        """`offset` of each of `slots`."""
        if self._stride > 1:
            return list(map(self.offset, slots))
        size = self.extent_bytes
        return [slot * size for slot in slots]

    def size(self, slot: int) -> int:
        """Bytes of a slot that is not FREE."""
        return self.slot_bytes[self._extent_class[slot // self._stride]]

    def num_free(self, size_class: int) -> int:
        """Slots of `size_class` that `take` can hand out without an eviction."""
        fresh = self._usable_extents - self._next_fresh
        whole = (fresh + len(self._free_extents)) * self._per_extent[size_class]
        owned = self._owned_extents[size_class] * self._per_extent[size_class]
        return whole + owned - self._num_taken[size_class]

    @property
    def num_spare_extents(self) -> int:
        """Extents that any class may still take."""
        return self._usable_extents - self._next_fresh + len(self._free_extents)

    def num_owned_free(self, size_class: int) -> int:
        """Free slots in the extents that `size_class` has."""
        owned = self._owned_extents[size_class] * self._per_extent[size_class]
        return owned - self._num_taken[size_class]

    def per_extent(self, size_class: int) -> int:
        """Slots of `size_class` in one extent."""
        return self._per_extent[size_class]

    def extents_for(self, size_class: int, num_slots: int) -> int:
        """Extents that hold `num_slots` of `size_class`; 0 for none or less."""
        return max(0, -(-num_slots // self._per_extent[size_class]))

    def num_evictable(self, size_class: int) -> int:
        """READY slots of `size_class` without a pin."""
        return self._num_ready_unpinned[size_class]

    def num_taken(self, size_class: int) -> int:
        """Slots of `size_class` in any state but FREE."""
        return self._num_taken[size_class]

    def take(self, size_class: int) -> int:
        """A slot, now FILLING; -1 if none is free."""
        partial = self._partial[size_class]
        if partial:
            extent = next(iter(partial))
        else:
            extent = self._take_extent(size_class)
            if extent < 0:
                return -1
        slot = extent * self._stride
        if self._stride > 1:
            mask = self._free_mask[extent]
            low = mask & -mask
            self._free_mask[extent] = mask ^ low
            if mask == low:
                partial.pop(extent, None)
            slot += low.bit_length() - 1
        self.states[slot] = SlotState.FILLING
        self._num_taken[size_class] += 1
        return slot

    def take_all(self, size_class: int, count: int) -> list[int]:
        """Up to `count` free slots, now FILLING."""
        count = min(count, self.num_free(size_class))
        if not count:
            return []
        if self._stride > 1:
            return [self.take(size_class) for _ in range(count)]
        # A slot is an extent: `take` without its bookkeeping of parts, since a fill is many.
        num_used = min(count, len(self._free_extents))
        slots = [self._free_extents.pop() for _ in range(num_used)]
        first, self._next_fresh = self._next_fresh, self._next_fresh + count - num_used
        slots += range(first, self._next_fresh)
        states, classes = self.states, self._extent_class
        for slot in slots:
            states[slot] = _FILLING
            classes[slot] = size_class
        self._owned_extents[size_class] += count
        self._num_taken[size_class] += count
        return slots

    def _take_extent(self, size_class: int) -> int:
        if self._free_extents:
            extent = self._free_extents.pop()
        elif self._next_fresh < self._usable_extents:
            extent = self._next_fresh
            self._next_fresh += 1
        else:
            return -1
        self._extent_class[extent] = size_class
        self._owned_extents[size_class] += 1
        if self._stride > 1:
            self._free_mask[extent] = (1 << self._per_extent[size_class]) - 1
            self._partial[size_class][extent] = None
        return extent

    def recycle(self, slots: Sequence[int]) -> None:
        """Make unpinned READY slots FILLING, for other chunks of the same sizes."""
        states, pins = self.states, self.pins
        for slot in slots:
            if states[slot] != _READY or pins[slot]:
                raise Bug(f"slot {slot} recycled in state {states[slot]}")
            states[slot] = _FILLING
        self._add_ready(slots, -1)

    def _add_ready(self, slots: Sequence[int], sign: int) -> None:
        """Count `slots` as READY without a pin from now on, or no longer as that."""
        num_ready = self._num_ready_unpinned
        if len(num_ready) == 1:
            num_ready[0] += sign * len(slots)
            return
        classes, stride = self._extent_class, self._stride
        for slot in slots:
            num_ready[classes[slot // stride]] += sign

    def give_back(self, slot: int) -> None:
        """Make a slot FREE. It must be unpinned."""
        state = self.states[slot]
        if state == SlotState.FREE or self.pins[slot]:
            raise Bug(f"slot {slot} given back in state {state} with {self.pins[slot]} pins")
        extent, index = divmod(slot, self._stride)
        size_class = self._extent_class[extent]
        if state == SlotState.READY:
            self._num_ready_unpinned[size_class] -= 1
        self.states[slot] = SlotState.FREE
        self._num_taken[size_class] -= 1
        if self._stride > 1:
            self._free_mask[extent] |= 1 << index
            if self._free_mask[extent].bit_count() < self._per_extent[size_class]:
                self._partial[size_class][extent] = None
                return
            self._partial[size_class].pop(extent, None)
        self._extent_class[extent] = _NO_CLASS
        self._owned_extents[size_class] -= 1
        self._free_extents.append(extent)

    def give_back_all(self, slots: Sequence[int]) -> None:
        """`give_back` each of `slots`, of which none is READY."""
        if self._stride > 1:
            for slot in slots:
                self.give_back(slot)
            return
        states, pins, classes = self.states, self.pins, self._extent_class
        for slot in slots:
            if not states[slot] or states[slot] == _READY or pins[slot]:
                raise Bug(f"slot {slot} given back in state {states[slot]}, pins {pins[slot]}")
            size_class, classes[slot] = classes[slot], _NO_CLASS
            states[slot] = 0
            self._num_taken[size_class] -= 1
            self._owned_extents[size_class] -= 1
        self._free_extents.extend(slots)

    def set_state(self, slot: int, state: SlotState) -> None:
        """Move a taken slot to another state than FREE."""
        if self.pins[slot] == 0:
            size_class = self.class_of(slot)
            was_ready = self.states[slot] == SlotState.READY
            self._num_ready_unpinned[size_class] += (state == SlotState.READY) - was_ready
        self.states[slot] = state

    def make_fresh(self, slots: Sequence[int]) -> None:
        """FILLING slots can be read now; the policy is told later."""
        states = self.states
        for slot in slots:
            states[slot] = _FRESH

    def make_ready(self, slots: Sequence[int]) -> None:
        """FRESH slots may be evicted once nothing pins them."""
        states, pins = self.states, self.pins
        for slot in slots:
            states[slot] = _READY
        self._add_ready([slot for slot in slots if not pins[slot]], 1)

    def bytes_of(self, slots: Sequence[int]) -> int:
        """Bytes of `slots` together; none is FREE."""
        if len(self.slot_bytes) == 1:
            return len(slots) * self.slot_bytes[0]
        return sum(map(self.size, slots))

    def pin(self, slot: int) -> None:
        """Forbid eviction once more."""
        if self.pins[slot] == 0:
            self.num_pinned += 1
            if self.states[slot] == _READY:
                self._num_ready_unpinned[self.class_of(slot)] -= 1
        self.pins[slot] += 1

    def pin_all(self, slots: Iterable[int]) -> None:
        """`pin` each of `slots`."""
        states, pins = self.states, self.pins
        unlisted = []
        for slot in slots:
            num_before = pins[slot]
            pins[slot] = num_before + 1
            if not num_before:
                self.num_pinned += 1
                if states[slot] == _READY:
                    unlisted.append(slot)
        self._add_ready(unlisted, -1)

    def unpin_all(self, slots: Iterable[int]) -> list[int]:
        """`unpin` each of `slots`; returns those without a pin now."""
        states, pins = self.states, self.pins
        unpinned = []
        for slot in slots:
            left = pins[slot] - 1
            if left < 0:
                raise Bug(f"slot {slot} unpinned more often than pinned")
            pins[slot] = left
            if not left:
                unpinned.append(slot)
        self.num_pinned -= len(unpinned)
        self._add_ready([slot for slot in unpinned if states[slot] == _READY], 1)
        return unpinned

    def unpin(self, slot: int) -> int:
        """Take one pin away; returns how many are left."""
        left = self.pins[slot] - 1
        if left < 0:
            raise Bug(f"slot {slot} unpinned more often than pinned")
        self.pins[slot] = left
        if left == 0:
            self.num_pinned -= 1
            if self.states[slot] == _READY:
                self._num_ready_unpinned[self.class_of(slot)] += 1
        return left

    def extent_slots(self, slot: int) -> range:
        """All slot indices of the extent `slot` lies in."""
        first = slot // self._stride * self._stride
        return range(first, first + self._per_extent[self.class_of(slot)])

    def taken(self) -> list[int]:
        """Every slot that is not FREE. O(slots): for reset and checks."""
        return [slot for slot, state in enumerate(self.states) if state]
