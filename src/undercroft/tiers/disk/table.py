"""The index file of a segment: a header page, a ring of recent changes, one entry per slot.

Header page, little-endian: 512 bytes that never change, their last eight a checksum (`xxh3-64`);
then 448 ring items of eight bytes, `change number << 32 | slot`. Change `n` stands at place
`n % 448`, so a follower knows by the number whether an item is the next one, an old one, or one
that overwrote what it missed. A new owner goes on 448 numbers later, so that every follower
believes to have missed something and reads the table again.

Entry, sixteen 64-bit words: 0 key length, slot in the upper half; 1-8 key, zero-padded; 9 epoch;
10 sequence; 11 payload bytes; 12 the first eight bytes of the namespace digest; 13, 14 zero;
15 `fold` of the others. All zero: free. Anything else whose fold differs: damaged, hence free.
A fixed table rather than a log: the quota is true to the byte, nothing ever has to be compacted,
and a million entries are checked by a few array operations.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.keys import MAX_KEY_BYTES
from undercroft.tiers.disk.buffers import PAGE_BYTES, padded

__all__ = [
    "ENTRY_BYTES",
    "FORMAT_VERSION",
    "FREE_ENTRY",
    "MAX_RECORD_BYTES",
    "MAX_SLOTS",
    "RING_AT",
    "RING_ITEMS",
    "Entries",
    "IndexHeader",
    "changed_slots",
    "entry_offset",
    "fold",
    "fold_rows",
    "index_bytes",
    "next_change",
    "pack_entry",
    "pack_header",
    "parse_entries",
    "parse_header",
    "parse_header_of",
    "ring_runs",
]

FORMAT_VERSION = 1
ENTRY_BYTES = 128
MAX_SLOTS = 1 << 22
"""Of a segment: an index of 512 MiB. Nobody makes larger ones, and none is read."""
MAX_RECORD_BYTES = 1 << 36
"""The same of a record, header and all."""
FREE_ENTRY = bytes(ENTRY_BYTES)
RING_AT = 512
RING_ITEMS = (PAGE_BYTES - RING_AT) // 8
_CHANGE_MASK = 0xFFFFFFFF
_MAGIC = b"UNDRINDX"
_HEADER = struct.Struct("<8sHHIQQ32s16s")
_CHECK = struct.Struct("<Q")
_CHECK_AT = RING_AT - _CHECK.size
_ENTRY = struct.Struct("<Q64sQQQ8sQQ")
_BODY = struct.Struct("<15Q")
_WORDS = ENTRY_BYTES // 8
_SEED = 0x9E3779B97F4A7C15
_PRIME = 0xC2B2AE3D27D4EB4F
_SHIFT = 29
_MASK = 0xFFFFFFFFFFFFFFFF
_ROWS_AT_ONCE = 4096
_MAX_NUMBER = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index file says about its segment."""

    segment_id: str
    namespace: bytes
    record_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Entries:
    """Whole entries of an index, by ascending slot, and how many were damaged."""

    slots: npt.NDArray[np.int64]
    keys: list[bytes]
    epochs: npt.NDArray[np.uint64]
    sequences: npt.NDArray[np.uint64]
    payload_bytes: npt.NDArray[np.uint64]
    damaged_slots: npt.NDArray[np.int64]


def index_bytes(num_slots: int) -> int:
    """Size of an index file."""
    return PAGE_BYTES + padded(num_slots * ENTRY_BYTES)


def entry_offset(slot: int) -> int:
    """Where in an index file the entry of `slot` begins."""
    return PAGE_BYTES + slot * ENTRY_BYTES


def pack_header(header: IndexHeader) -> bytes:
    """The first 512 bytes of an index file."""
    fields = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        ENTRY_BYTES,
        PAGE_BYTES,
        header.record_bytes,
        header.num_slots,
        header.namespace,
        header.segment_id.encode(),
    ).ljust(_CHECK_AT, b"\0")
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def parse_header(page: bytes) -> IndexHeader:
    """Read what `pack_header` wrote.

    Raises:
        CorruptChunk: Damaged, or not an index.
        FormatTooNew: Written by a later version.
    """
    if len(page) < RING_AT or page[:8] != _MAGIC:
        raise CorruptChunk("the index header is damaged")
    if _CHECK.unpack_from(page, _CHECK_AT)[0] != xxhash.xxh3_64_intdigest(page[:_CHECK_AT]):
        raise CorruptChunk("the index header's checksum differs")
    _, version, entry_bytes, size, record_bytes, num_slots, space, name = _HEADER.unpack_from(page)
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"the segment is of format version {version}; this release reads up to "
            f"{FORMAT_VERSION}: upgrade, or use another directory"
        )
    if (version, entry_bytes, size) != (FORMAT_VERSION, ENTRY_BYTES, PAGE_BYTES):
        raise CorruptChunk(f"the index header says version {version}, entries of {entry_bytes}")
    is_record = 2 * PAGE_BYTES <= record_bytes <= MAX_RECORD_BYTES and not record_bytes % PAGE_BYTES
    if not is_record or not 1 <= num_slots <= MAX_SLOTS:
        raise CorruptChunk(f"the index header says {num_slots} slots of {record_bytes} bytes")
    return IndexHeader(name.decode("ascii", "replace"), space, record_bytes, num_slots)


def parse_header_of(page: bytes, segment_id: str, namespace: bytes) -> IndexHeader:
    """As `parse_header`; a header of another segment or namespace is `CorruptChunk` too."""
    header = parse_header(page)
    if (header.segment_id, header.namespace) != (segment_id, namespace):
        raise CorruptChunk("the index belongs to another segment")
    return header


def ring_runs(change: int, slots: Sequence[int]) -> list[tuple[int, bytes]]:
    """What tells followers of changes to `slots`, numbered from `change` on: places and bytes.

    Of more changes than the ring holds, the last: followers see that they missed some.
    """
    if len(slots) == 1:
        masked = change & _CHANGE_MASK
        return [(RING_AT + 8 * (masked % RING_ITEMS), _CHECK.pack(masked << 32 | slots[0]))]
    runs: list[tuple[int, bytes]] = []
    end = -1
    first = max(0, len(slots) - RING_ITEMS)
    for number, slot in enumerate(slots[first:], change + first):
        masked = number & _CHANGE_MASK
        place = RING_AT + 8 * (masked % RING_ITEMS)
        item = _CHECK.pack(masked << 32 | slot)
        if place == end:
            start, before = runs[-1]
            runs[-1] = (start, before + item)
        else:
            runs.append((place, item))
        end = place + 8
    return runs


def _ring(page: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(page.ljust(PAGE_BYTES, b"\0"), "<u8", RING_ITEMS, RING_AT)


def next_change(page: bytes) -> int:
    """The change number that will follow those in the ring of header page `page`."""
    items = _ring(page)
    return (int((items >> np.uint64(32)).max()) + 1) & _CHANGE_MASK


def changed_slots(page: bytes, change: int) -> list[int] | None:
    """Slots of the changes numbered `change` and later, oldest first; None if some are lost."""
    items = _ring(page).tolist()
    change &= _CHANGE_MASK
    slots: list[int] = []
    while True:
        item = items[change % RING_ITEMS]
        ahead = ((item >> 32) - change) & _CHANGE_MASK
        if ahead:
            return slots if ahead > _CHANGE_MASK // 2 else None
        slots.append(item & _CHANGE_MASK)
        change = (change + 1) & _CHANGE_MASK


def fold(words: tuple[int, ...]) -> int:
    """The checksum of an entry's first fifteen words; every single-bit change shows."""
    value = _SEED
    for word in words:
        value = ((value ^ word) * _PRIME) & _MASK
        value ^= value >> _SHIFT
    return value


def pack_entry(
    slot: int, key: bytes, epoch: int, sequence: int, payload_bytes: int, namespace: bytes
) -> bytes:
    """The 128 bytes of a slot in use."""
    body = _ENTRY.pack(
        len(key) | slot << 32, key, epoch, sequence, payload_bytes, namespace[:8], 0, 0
    )
    return body + _CHECK.pack(fold(_BODY.unpack(body)))


def fold_rows(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`fold` of the first fifteen words of every row of sixteen."""
    out = np.empty(len(rows), np.uint64)
    prime, shift = np.uint64(_PRIME), np.uint64(_SHIFT)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        block = rows[start : start + _ROWS_AT_ONCE]
        value = np.full(len(block), _SEED, np.uint64)
        for column in range(_WORDS - 1):
            value ^= block[:, column]
            value *= prime
            value ^= value >> shift
        out[start : start + _ROWS_AT_ONCE] = value
    return out


def _keys(rows: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> list[bytes]:
    """Keys of `rows` in order. Keys of one length, the usual case, need no loop in Python."""
    raw = np.ascontiguousarray(rows[:, 1:9]).view(np.uint8).reshape(len(rows), MAX_KEY_BYTES)
    found = np.unique(lengths)
    if len(found) == 1:
        width = int(found[0])
        whole: list[bytes] = np.ascontiguousarray(raw[:, :width]).view(f"V{width}").ravel().tolist()
        return whole
    return [row[:length].tobytes() for row, length in zip(raw, lengths.tolist(), strict=True)]


def parse_entries(table: bytes, namespace: bytes, first_slot: int = 0) -> Entries:
    """Check and read the entries in `table`, those that are whole, from `first_slot` on.

    An epoch or sequence that counting never reaches, or more bytes than any record has, is damage.
    """
    rows = np.frombuffer(table, "<u8", count=len(table) // 8 // _WORDS * _WORDS)
    rows = rows.reshape(-1, _WORDS)
    used = np.flatnonzero(rows.any(axis=1))
    rows = rows[used]
    slots = used + first_slot
    lengths = rows[:, 0] & np.uint64(0xFF)
    (space,) = struct.unpack("<Q", namespace[:8])
    whole = fold_rows(rows) == rows[:, _WORDS - 1]
    whole &= (rows[:, 0] >> np.uint64(32)) == slots.astype(np.uint64)
    whole &= (lengths >= 1) & (lengths <= MAX_KEY_BYTES) & (rows[:, 12] == np.uint64(space))
    whole &= (rows[:, 9] <= np.uint64(_MAX_NUMBER)) & (rows[:, 10] <= np.uint64(_MAX_NUMBER))
    whole &= rows[:, 11] <= np.uint64(MAX_RECORD_BYTES)
    rows, lengths = rows[whole], lengths[whole]
    return Entries(
        slots[whole],
        _keys(rows, lengths) if len(rows) else [],
        rows[:, 9].copy(),
        rows[:, 10].copy(),
        rows[:, 11].copy(),
        slots[~whole],
    )
