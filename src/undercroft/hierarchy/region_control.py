"""The region's file: where its parts lie, and typed access to its small control area.

::

    0                  header: magic, num_ranks, total, identity, ready bytes, a flag per seat,
                       version
    + a page           failure counters, one word per rank
    + a page a seat    records: nonce, device, inode, process, chunk sizes per group
    + 16 KiB a rank    failure rings
    + 8 KiB a rank     notes: a length, and what the rank says of itself
    body_offset        the body: `total_bytes`, 2 MiB-aligned in the file, for huge pages
    proof_offset       one nonce per seat once more, in the body's own mapping but past the buffer

Rank r has seat r, the scheduler has seat `num_ranks`. Shared words are native 64-bit, read and
written through a `memoryview` cast to ``"Q"``: CPython copies such an item as one aligned word,
which x86-64 and AArch64 do not tear. `struct` in its little-endian mode would go byte by byte.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from undercroft.errors import ConfigError, CorruptChunk

__all__ = [
    "MAX_GROUPS",
    "MAX_IDENTITY_BYTES",
    "MAX_NOTE_BYTES",
    "MAX_RANKS",
    "MAX_VERSION_BYTES",
    "NONCE_BYTES",
    "OS_PAGE_BYTES",
    "RING_SLOTS",
    "Control",
    "Header",
    "RegionShape",
    "check_limits",
    "seat_name",
]

OS_PAGE_BYTES = mmap.PAGESIZE
NONCE_BYTES = 16
RING_SLOTS = 1024
MAX_RANKS = 256
MAX_GROUPS = 384
MAX_IDENTITY_BYTES = 64
MAX_VERSION_BYTES = 64

_NOTE_AREA_BYTES = 8 << 10
MAX_NOTE_BYTES = _NOTE_AREA_BYTES - 8

_HEADER_BYTES = 4096
_RECORD_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_WORD = 8
_ENTRY_WORDS = 2  # of a failure ring: the store, and a check that it belongs to this lap
_WORD_MASK = (1 << 64) - 1
_MAGIC = int.from_bytes(b"ucroft\x00\x03", "little")

# Words of the header page.
_MAGIC_WORD, _RANKS_WORD, _TOTAL_WORD, _IDENTITY_LENGTH_WORD, _READY_WORD = range(5)
_IDENTITY_OFFSET = 64
_JOINED_WORD = 32  # and one per seat from there
_VERSION_OFFSET = _HEADER_BYTES - MAX_VERSION_BYTES  # zeros after it

# Words of a record, after its nonce.
_DEVICE_WORD, _INODE_WORD, _PROCESS_WORD, _NUM_GROUPS_WORD, _GROUPS_WORD = range(2, 7)


def seat_name(seat: int, num_ranks: int) -> str:
    """What a message calls the holder of `seat`."""
    return "the scheduler" if seat == num_ranks else f"rank {seat}"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class RegionShape:
    """Offsets of the file's parts, in bytes, from the two numbers that decide them."""

    num_ranks: int
    total_bytes: int

    @property
    def num_seats(self) -> int:
        """Every rank and the scheduler."""
        return self.num_ranks + 1

    @property
    def counters_offset(self) -> int:
        """Of the failure counters, one word per rank."""
        return _HEADER_BYTES

    @property
    def records_offset(self) -> int:
        """Of the seats' records."""
        return self.counters_offset + _round_up(self.num_ranks * _WORD, _RECORD_BYTES)

    @property
    def rings_offset(self) -> int:
        """Of the failure rings."""
        return self.records_offset + self.num_seats * _RECORD_BYTES

    @property
    def notes_offset(self) -> int:
        """Of the ranks' notes."""
        return self.rings_offset + self.num_ranks * RING_SLOTS * _ENTRY_WORDS * _WORD

    @property
    def control_bytes(self) -> int:
        """Length of the control area, whole pages."""
        return _round_up(self.notes_offset + self.num_ranks * _NOTE_AREA_BYTES, OS_PAGE_BYTES)

    @property
    def body_offset(self) -> int:
        """Where the buffer begins. The gap before it is a hole: it costs no memory."""
        return _round_up(self.control_bytes, _HUGE_PAGE_BYTES)

    @property
    def body_bytes(self) -> int:
        """The buffer rounded up to whole pages, with room for the nonces at least."""
        return _round_up(max(self.total_bytes, self.nonces_bytes), OS_PAGE_BYTES)

    @property
    def proof_offset(self) -> int:
        """Of the nonces past the buffer."""
        return self.body_offset + self.body_bytes

    def process_id_offset(self, seat: int) -> int:
        """Of the word with the holder's process, as that process numbers itself: for messages."""
        return self.records_offset + seat * _RECORD_BYTES + _PROCESS_WORD * _WORD

    @property
    def nonces_bytes(self) -> int:
        """Length of one nonce per seat."""
        return self.num_seats * NONCE_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.proof_offset + _round_up(self.nonces_bytes, OS_PAGE_BYTES)

    @property
    def needed_bytes(self) -> int:
        """Memory it takes when every page exists."""
        return self.control_bytes + self.file_bytes - self.body_offset


@dataclass(frozen=True, slots=True)
class Header:
    """What a participant must know of a file before it maps it."""

    shape: RegionShape
    identity: bytes
    version: str
    joined: tuple[int, ...]  # seats

    @classmethod
    def parse(cls, raw: bytes) -> Header | None:
        """The header in the file's first page, or None if this version wrote none there."""
        if len(raw) < _HEADER_BYTES:
            return None
        words = memoryview(raw)[:_HEADER_BYTES].cast("Q")
        num_ranks, length = words[_RANKS_WORD], words[_IDENTITY_LENGTH_WORD]
        if words[_MAGIC_WORD] != _MAGIC or num_ranks > MAX_RANKS or length > MAX_IDENTITY_BYTES:
            return None
        shape = RegionShape(num_ranks, words[_TOTAL_WORD])
        joined = tuple(s for s in range(shape.num_seats) if words[_JOINED_WORD + s])
        version = raw[_VERSION_OFFSET:_HEADER_BYTES].rstrip(b"\0").decode(errors="replace")
        identity = raw[_IDENTITY_OFFSET : _IDENTITY_OFFSET + length]
        return cls(shape, identity, version, joined)

    @classmethod
    def num_bytes(cls) -> int:
        """How much of the file `parse` wants."""
        return _HEADER_BYTES

    def missing(self) -> tuple[int, ...]:
        """Ranks that have not joined."""
        return tuple(r for r in range(self.shape.num_ranks) if r not in self.joined)

    def difference(self, shape: RegionShape, identity: bytes, version: str) -> str | None:
        """How a participant that wants these disagrees, naming both; or None."""
        found = (
            ("version", self.version or "unknown", version or "unknown"),
            ("ranks", self.shape.num_ranks, shape.num_ranks),
            ("total_bytes", self.shape.total_bytes, shape.total_bytes),
            ("configuration", self.identity.hex(), identity.hex()),
        )
        parts = [
            f"{name} {theirs} there, {ours} here" for name, theirs, ours in found if theirs != ours
        ]
        return "; ".join(parts) or None


class Control:
    """The control area and the nonces, through one participant's mapping.

    Threads: each word has one writer, named in its method. Holds views of `mapping` until
    `release`.
    """

    def __init__(self, mapping: mmap.mmap, shape: RegionShape) -> None:
        self.shape = shape
        self._bytes = memoryview(mapping)
        control = self._bytes[: shape.control_bytes]
        self._words = control.cast("Q")
        counters = shape.counters_offset
        self._counters = control[counters : counters + shape.num_ranks * _WORD]
        control.release()

    def release(self) -> None:
        """Let the mapping go; nothing else may be called afterwards."""
        for view in (self._counters, self._words, self._bytes):
            view.release()

    def write_header(self, identity: bytes, version: str, ready_bytes: int) -> None:
        """Make an empty file a region; magic last. Writer: the creator, holding the door."""
        words = self._words
        words[_RANKS_WORD] = self.shape.num_ranks
        words[_TOTAL_WORD] = self.shape.total_bytes
        words[_IDENTITY_LENGTH_WORD] = len(identity)
        words[_READY_WORD] = ready_bytes
        self._bytes[_IDENTITY_OFFSET : _IDENTITY_OFFSET + len(identity)] = identity
        name = version.encode()
        self._bytes[_VERSION_OFFSET : _VERSION_OFFSET + len(name)] = name
        words[_MAGIC_WORD] = _MAGIC

    @property
    def ready_bytes(self) -> int:
        """Length of the buffer's prefix whose pages exist; never more than the buffer has."""
        return min(self._words[_READY_WORD], self.shape.total_bytes)

    def set_ready_bytes(self, ready_bytes: int) -> None:
        """Writer: the creator first, the scheduler process after it has joined."""
        self._words[_READY_WORD] = ready_bytes

    def has_joined(self, seat: int) -> bool:
        """Whether the seat's record and nonces are complete."""
        return self._words[_JOINED_WORD + seat] != 0

    def set_joined(self, seat: int) -> None:
        """Writer: the seat's holder, last of all."""
        self._words[_JOINED_WORD + seat] = 1

    def write_record(
        self,
        seat: int,
        nonce: bytes,
        file_id: tuple[int, int],
        pid: int,
        chunk_bytes: Sequence[int],
    ) -> None:
        """Say who sits there, and put its nonce into the body and past it. Writer: the holder."""
        record = self.shape.records_offset + seat * _RECORD_BYTES
        self._bytes[record : record + NONCE_BYTES] = nonce
        first = record // _WORD
        words = self._words
        words[first + _DEVICE_WORD], words[first + _INODE_WORD] = file_id
        words[first + _PROCESS_WORD] = pid
        words[first + _NUM_GROUPS_WORD] = len(chunk_bytes)
        for group_index, length in enumerate(chunk_bytes):
            words[first + _GROUPS_WORD + group_index] = length
        for area in (self.shape.body_offset, self.shape.proof_offset):
            start = area + seat * NONCE_BYTES
            self._bytes[start : start + NONCE_BYTES] = nonce

    def write_note(self, rank: int, note: bytes) -> None:
        """What the rank says of itself. Writer: the holder, before it has joined."""
        start = self._note_offset(rank)
        self._words[start // _WORD] = len(note)
        self._bytes[start + _WORD : start + _WORD + len(note)] = note

    def note(self, rank: int) -> bytes:
        """What the rank said of itself.

        Raises:
            CorruptChunk: It says that it is longer than there is room for.
        """
        start = self._note_offset(rank)
        length = self._words[start // _WORD]
        if length > MAX_NOTE_BYTES:
            raise CorruptChunk(f"host region: the note of rank {rank} says {length} bytes")
        return bytes(self._bytes[start + _WORD : start + _WORD + length])

    def _note_offset(self, rank: int) -> int:
        return self.shape.notes_offset + rank * _NOTE_AREA_BYTES

    def record_span(self, seat: int) -> tuple[int, int]:
        """Offset and length, in the file, of the part of a record that `proves` compares."""
        return self.shape.records_offset + seat * _RECORD_BYTES, NONCE_BYTES + 2 * _WORD

    def proves(self, seat: int, claim: bytes, file_id: tuple[int, int], *, in_body: bool) -> bool:
        """Whether the bytes mapped here are those the seat's holder wrote.

        Args:
            seat: Whose.
            claim: `record_span` of the seat, read from the file rather than from the mapping.
            file_id: Device and inode of this participant's file.
            in_body: Look into the body too; only before anything was stored there.
        """
        if len(claim) != self.record_span(seat)[1]:
            return False
        nonce = claim[:NONCE_BYTES]
        if tuple(memoryview(claim[NONCE_BYTES:]).cast("Q")) != file_id or not any(nonce):
            return False
        areas = [self.shape.proof_offset, *([self.shape.body_offset] if in_body else [])]
        starts = [area + seat * NONCE_BYTES for area in areas]
        return all(self._bytes[start : start + NONCE_BYTES] == nonce for start in starts)

    def chunk_bytes(self, rank: int) -> tuple[int, ...]:
        """What the rank said about its groups.

        Raises:
            CorruptChunk: It says more of them than there can be.
        """
        first = (self.shape.records_offset + rank * _RECORD_BYTES) // _WORD
        start, num_groups = first + _GROUPS_WORD, self._words[first + _NUM_GROUPS_WORD]
        if num_groups > MAX_GROUPS:
            raise CorruptChunk(f"host region: the record of rank {rank} says {num_groups} groups")
        return tuple(self._words[start : start + num_groups])

    def counters_image(self) -> bytes:
        """All failure counters, to be compared with an earlier image: one read."""
        return bytes(self._counters)

    def push_failure(self, rank: int, store_id: int) -> None:
        """Append to the rank's ring, over the oldest if it is full. Writer: the rank, one thread.

        The counter is written after the entry. x86 shows them in that order to everybody; AArch64
        need not, so an entry also carries a check of its number, and a reader that comes too early
        sees that it is not there yet.
        """
        counter = self.shape.counters_offset // _WORD + rank
        count = self._words[counter]
        entry = self._entry(rank, count)
        self._words[entry] = store_id
        self._words[entry + 1] = _entry_check(store_id, count)
        self._words[counter] = count + 1

    def read_failures(self, rank: int, seen: int) -> tuple[int, list[int] | None]:
        """The ring's entries after the first `seen`.

        Returns:
            The new count seen, and the entries, or None if some cannot be told: overwritten
            before or during the read, or not yet visible here.
        """
        counter = self.shape.counters_offset // _WORD + rank
        count = self._words[counter]
        store_ids = []
        for number in range(max(seen, count - RING_SLOTS), count):
            entry = self._entry(rank, number)
            store_id = self._words[entry]
            if self._words[entry + 1] != _entry_check(store_id, number):
                return count, None
            store_ids.append(store_id)
        if self._words[counter] - seen >= RING_SLOTS:
            return count, None
        return count, store_ids

    def _entry(self, rank: int, number: int) -> int:
        first = self.shape.rings_offset // _WORD + rank * RING_SLOTS * _ENTRY_WORDS
        return first + number % RING_SLOTS * _ENTRY_WORDS


def _entry_check(store_id: int, number: int) -> int:
    return (store_id ^ (number + 1) * 0x9E3779B97F4A7C15) & _WORD_MASK


def check_limits(
    shape: RegionShape,
    identity: bytes,
    chunk_bytes: Sequence[int],
    note: bytes = b"",
    version: str = "",
) -> None:
    """Refuse what the control area has no room for.

    Raises:
        ConfigError: Naming the value and its limit.
    """
    checks = (
        ("total_bytes", shape.total_bytes, 1, 1 << 62),
        ("num_ranks", shape.num_ranks, 1, MAX_RANKS),
        ("length of identity", len(identity), 1, MAX_IDENTITY_BYTES),
        ("length of version", len(version.encode()), 0, MAX_VERSION_BYTES),
        ("number of groups", len(chunk_bytes), 0, MAX_GROUPS),
        ("length of a rank's note", len(note), 0, MAX_NOTE_BYTES),
        *(("chunk_bytes", length, 1, 1 << 62) for length in chunk_bytes),
    )
    for name, value, low, high in checks:
        if not low <= value <= high:
            raise ConfigError(f"host region: {name} is {value}, must be {low} to {high}")
