"""A bounded record of what became of chunks, so that a miss can be explained later.

One file per running engine in its namespace's directory: a header page and a ring of equal entries.
Whoever holds the file's lock writes it; a new engine goes on with a file that nobody holds, so
there are never more than engines at a time. Every entry carries a check and its number: a torn or
lost one is left out by readers. Nothing here is needed to serve a chunk, so nothing is synced.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from undercroft.clock import Clock
from undercroft.errors import CorruptChunk
from undercroft.keys import Namespace
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files, NotOurs
from undercroft.tiers.disk.names import HISTORY
from undercroft.tiers.disk.root import Root
from undercroft.tiers.disk.usage import NAMESPACE_BYTES

__all__ = [
    "EVENTS",
    "MAX_HISTORY_BYTES",
    "REASONS",
    "HistoryFile",
    "Incident",
    "history_bytes",
    "key_part",
    "read_history",
]

MAX_HISTORY_BYTES = 16 << 20
EVENTS = ("?", "evicted", "declined", "dropped", "missed", "reset", "down", "up", "opened")
REASONS = (
    "other",
    "capacity",
    "not_admitted",
    "queue_full",
    "evicted_before_its_turn",
    "backpressure",
    "unavailable",
    "full",
    "before_reset",
    "copy_failed",
    "corrupt",
    "vanished",
    "timeout",
    "closed",
    "formattoonew",
    "deadline",
    "not_restored",
    "evicted_again",
    "load_failed",
    "read_failed",
    "given_up",
    "write_budget",
    "too_slow",
)
"""Codes are places in these; both only ever grow at the end."""

_ENTRY = struct.Struct("<16sIIBBBxI")
_CHECKED = struct.Struct("<16sIIBBBx")
_NUMBER_WORD = 5
_HEADER = struct.Struct("<8sHHI32s32s")
_MAGIC = b"UNDRHIST"
_VERSION = 1
_CHECK = struct.Struct("<Q")
_CHECK_AT = PAGE_BYTES - _CHECK.size
_HEAD_BYTES, _TAIL_BYTES = 12, 4
_NAME_BYTES = 64
_MAX_LEVELS = 8
_NAMES_AT = 128
_SHARE = 1024
_MIN_BYTES = 8192
_TINY_SPARE = 32
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that happened.

    Args:
        unix_s: When, to the second.
        event: One of `EVENTS`.
        reason: One of `REASONS`.
        level: Where.
        key_part: Of the chunk, see `key_part`; empty if it is about no chunk.
    """

    unix_s: int
    event: str
    reason: str
    level: str
    key_part: bytes = b""


def key_part(key: bytes) -> bytes:
    """What is kept of a key: its first 12 and last 4 bytes."""
    if not key:
        return b""
    return key[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0") + key[-_TAIL_BYTES:].rjust(
        _TAIL_BYTES, b"\0"
    )


def history_bytes(capacity_bytes: int, num_replicas: int) -> int:
    """Size of an engine's file: 1/1024 of its part of the capacity; 0 if that is too little."""
    size = capacity_bytes // num_replicas // _SHARE // PAGE_BYTES * PAGE_BYTES
    return min(size, MAX_HISTORY_BYTES) if size >= _MIN_BYTES else 0


def _check(entry: bytes) -> int:
    return xxhash.xxh3_64_intdigest(entry) & _MASK


def _pack(number: int, incident: Incident, levels: Sequence[str]) -> bytes:
    fields = _CHECKED.pack(
        incident.key_part,
        incident.unix_s & _MASK,
        number & _MASK,
        _code(EVENTS, incident.event),
        _code(REASONS, incident.reason),
        _code(levels, incident.level),
    )
    return fields + struct.pack("<I", _check(fields))


def _code(words: Sequence[str], word: str) -> int:
    return words.index(word) if word in words else 0


def _word(words: Sequence[str], code: int) -> str:
    return words[code] if code < len(words) else words[0]


def _pack_header(namespace: bytes, levels: Sequence[str], num_entries: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, _ENTRY.size, num_entries, namespace, b"")
    fields = fields.ljust(_NAMES_AT, b"\0")
    for level in levels[:_MAX_LEVELS]:
        fields += level.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
    fields = fields.ljust(_CHECK_AT, b"\0")
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def _parse_header(page: bytes) -> tuple[int, list[str]]:
    """Number of entries, names of levels.

    Raises:
        CorruptChunk: Damaged, or of another version.
    """
    if len(page) < PAGE_BYTES or page[:8] != _MAGIC:
        raise CorruptChunk("the history is damaged")
    if _CHECK.unpack_from(page, _CHECK_AT)[0] != xxhash.xxh3_64_intdigest(page[:_CHECK_AT]):
        raise CorruptChunk("the history is damaged")
    _, version, entry_bytes, num_entries, _, _ = _HEADER.unpack_from(page)
    if (version, entry_bytes) != (_VERSION, _ENTRY.size) or num_entries < 1:
        raise CorruptChunk(f"the history is of version {version}")
    places = range(_NAMES_AT, _NAMES_AT + _MAX_LEVELS * _NAME_BYTES, _NAME_BYTES)
    names = [page[at : at + _NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace") for at in places]
    return num_entries, [name for name in names if name]


def _entries(data: bytes, levels: Sequence[str]) -> Iterator[tuple[int, Incident]]:
    """Whole entries with their numbers, as they lie."""
    for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
        part, when, number, event, reason, level, check = _ENTRY.unpack_from(data, at)
        if number and check == _check(data[at : at + _CHECKED.size]):
            yield (
                number,
                Incident(
                    when,
                    _word(EVENTS, event),
                    _word(REASONS, reason),
                    _word(levels, level) if levels else "",
                    part if any(part) else b"",
                ),
            )


def read_history(data: bytes) -> list[Incident]:
    """What a history file says, oldest first.

    Raises:
        CorruptChunk: The header is damaged.
    """
    _, levels = _parse_header(data[:PAGE_BYTES])
    found = list(_entries(data[PAGE_BYTES:], levels))
    found.sort(key=lambda pair: (pair[1].unix_s, pair[0]))
    return [incident for _, incident in found]


class HistoryFile:
    """The file this engine writes.

    Args:
        path: As for `DiskTier`.
        namespace: Whose.
        levels: Names of levels, at most eight.
        num_bytes: Size, see `history_bytes`.
        capacity_bytes: What the file must fit, with all that is there.
        free_space_floor_bytes: What the file system must keep free.
        clock: Time.
        files: The system calls.

    Threads: one at a time. Everything may block and raises `OSError` or `KvError`.
    """

    def __init__(  # noqa: PLR0913 - one setting each
        self,
        path: str,
        *,
        namespace: Namespace,
        levels: Sequence[str],
        num_bytes: int,
        capacity_bytes: int,
        free_space_floor_bytes: int,
        clock: Clock,
        files: Files | None = None,
    ) -> None:
        self._files = files or Files()
        self._root = Root(self._files, path, namespace, clock)
        self._namespace = namespace
        self._levels = tuple(levels[:_MAX_LEVELS])
        self._num_entries = (num_bytes - PAGE_BYTES) // _ENTRY.size
        self._capacity_bytes = capacity_bytes
        self._floor_bytes = free_space_floor_bytes
        self._fd = -1
        self._number = 1

    def open(self) -> bool:
        """Go on with a file that nobody writes, or make one; False if there is no room for it."""
        self.close()
        try:
            self._root.open()
            if self._root.read_only or self._root.is_new():
                return False
            with self._root.locked():
                self._fd = self._adopt()
                if self._fd < 0:
                    self._fd = self._create()
        finally:
            self._root.close()
        return self._fd >= 0

    def close(self) -> None:
        """Let the file go; twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def is_there(self) -> bool:
        """Whether the file is open and still has its name."""
        return self._fd >= 0 and self._files.fstat(self._fd).st_nlink > 0

    def add(self, incidents: Iterable[Incident]) -> None:
        """Write incidents, over the oldest once the ring is full."""
        start = self._number
        data = [_pack(start + n, one, self._levels) for n, one in enumerate(incidents)]
        if len(data) > self._num_entries:
            start += len(data) - self._num_entries
            data = data[-self._num_entries :]
        place = start % self._num_entries
        first = data[: self._num_entries - place]
        for at, part in ((place, first), (0, data[len(first) :])):
            if part:
                self._files.pwrite(self._fd, b"".join(part), PAGE_BYTES + at * _ENTRY.size)
        self._number = start + len(data)

    def _size(self) -> int:
        return PAGE_BYTES + self._num_entries * _ENTRY.size

    def _adopt(self) -> int:
        for name in self._files.list(self._root.directory):
            if not HISTORY.fullmatch(name):
                continue
            path = f"{self._root.directory}/{name}"
            try:
                fd = self._files.open(path, os.O_RDWR)
            except NotOurs:
                continue
            if not self._files.lock(fd):
                self._files.close(fd)
            elif self._take_over(fd):
                return fd
            else:  # damaged, or of another size: not worth keeping
                self._files.unlink(path)
                self._files.close(fd)
        return -1

    def _take_over(self, fd: int) -> bool:
        if self._files.fstat(fd).st_size != self._size():
            return False
        page = self._files.pread(fd, PAGE_BYTES, 0)
        if page != _pack_header(self._namespace.digest, self._levels, self._num_entries):
            return False
        data = self._files.pread(fd, self._size() - PAGE_BYTES, PAGE_BYTES)
        if len(data) != self._size() - PAGE_BYTES:
            return False
        numbers = np.frombuffer(data, "<u4").reshape(-1, _ENTRY.size // 4)[:, _NUMBER_WORD]
        for place in np.argsort(numbers, kind="stable")[::-1].tolist():
            whole = list(_entries(data[place * _ENTRY.size :][: _ENTRY.size], self._levels))
            if whole or not numbers[place]:
                break
        else:
            whole = []
        self._number = 1 + (whole[0][0] if whole else 0)
        return True

    def _create(self) -> int:
        size, usage = self._size(), self._root.usage()
        spare = min(NAMESPACE_BYTES, self._capacity_bytes // _TINY_SPARE)
        free_bytes = self._files.free_bytes(self._root.path) - self._floor_bytes
        if size > min(self._capacity_bytes - usage.planned_bytes - spare, free_bytes):
            return -1
        path = f"{self._root.directory}/history-{self._files.random_hex()}"
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._files.lock(fd)
            self._files.allocate(fd, size)
            header = _pack_header(self._namespace.digest, self._levels, self._num_entries)
            self._files.pwrite(fd, header, 0)
        except OSError:
            self._files.unlink(path)
            self._files.close(fd)
            raise
        self._number = 1
        return fd
