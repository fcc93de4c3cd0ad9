"""What all processes have written under a root in the last day, and how much more they may.

The file `writes` in the root, 512 bytes: magic `UNDRWRIT`, version (u32), zero (u32), 25 pairs of
u64 (hour since 1970, bytes in it), zeros, and the xxh3-64 of all before it. One sector, so no write
of it can be torn. Changed only under a lock on the file itself.

A process books bytes *before* it writes them, a lease at a time, and gives back what it did not use
when it closes. So killing it never makes the sum too small, and many processes cannot exceed the
budget together. What a lease has left at the turn of an hour is booked anew.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import xxhash

from undercroft.tiers.base import Allowance
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.names import LEDGER_NAME

__all__ = ["HOURS", "Ledger", "pack_hours", "parse_hours"]

HOURS = 25
"""Of which at least 24 are whole: no day has more than the budget, wherever it begins."""

_HOUR_S = 3600.0
_SIZE = 512
_HEAD = struct.Struct("<8sII")
_PAIR = struct.Struct("<QQ")
_CHECK = struct.Struct("<Q")
_MAGIC, _VERSION = b"UNDRWRIT", 1
_LEASE_SHARE = 256
_LEAST_LEASE_BYTES, _MOST_LEASE_BYTES = 16 << 20, 1 << 30
_AGAIN_S = 1.0


def pack_hours(hours: dict[int, int]) -> bytes:
    """The file's bytes; the `HOURS` latest count."""
    latest = sorted(hours.items())[-HOURS:]
    data = _HEAD.pack(_MAGIC, _VERSION, 0) + b"".join(_PAIR.pack(*pair) for pair in latest)
    data = data.ljust(_SIZE - _CHECK.size, b"\0")
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))


def parse_hours(data: bytes) -> dict[int, int] | None:
    """Bytes by hour; None if the file is damaged or of a later version. Empty: nothing written."""
    if not data:
        return {}
    if len(data) < _SIZE:
        return None
    body = data[: _SIZE - _CHECK.size]
    magic, version, _ = _HEAD.unpack_from(body)
    (check,) = _CHECK.unpack_from(data, len(body))
    if magic != _MAGIC or version != _VERSION or check != xxhash.xxh3_64_intdigest(body):
        return None
    pairs = [_PAIR.unpack_from(body, _HEAD.size + _PAIR.size * i) for i in range(HOURS)]
    return {hour: num_bytes for hour, num_bytes in pairs if hour}


class Ledger:
    """One process's share of a root's budget.

    Args:
        files: The system calls; what they count as written is what is spent.
        root: The root's directory.
        budget_bytes: Of any day, all processes together; each should be given the same.
        unix_s: What time it is. A clock that is set back makes the hours after it count as now.
        now_s: Monotonic.

    Threads: `sync` and `close` any, they do I/O and raise `OSError`; `allowance` any, no I/O.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        budget_bytes: int,
        unix_s: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        self._files = files
        self._path = f"{root}/{LEDGER_NAME}"
        self._budget_bytes = budget_bytes
        self._unix_s = unix_s
        self._now_s = now_s
        self._lease_bytes = min(
            budget_bytes,
            max(_LEAST_LEASE_BYTES, min(_MOST_LEASE_BYTES, budget_bytes // _LEASE_SHARE)),
        )
        self._lock = threading.Lock()
        self._fd = -1
        self._granted = 0  # all leases ever, on the scale of `written_bytes`
        self._hour = 0
        self._known: dict[int, int] = {}
        self._day_left_bytes = budget_bytes
        self._asked_s = float("-inf")
        self._is_spent = self._is_closed = False
        self.num_damaged = 0

    def expect(self, num_bytes: int) -> None:
        """Chunks that cost `num_bytes` are to be written: a lease must be enough for some."""
        if 4 * num_bytes > self._lease_bytes:
            self._lease_bytes = min(4 * num_bytes, self._budget_bytes)

    def _left(self) -> int:
        """Bytes of the lease that are not written yet; below 0 for upkeep beyond it."""
        return self._granted - self._files.written_bytes

    def allowance(self) -> Allowance:
        """What may be written now."""
        left = max(0, self._left())
        return Allowance(
            left_bytes=left,
            day_left_bytes=self._day_left_bytes + left,
            budget_bytes=self._budget_bytes,
            is_spent=self._is_spent,
        )

    @property
    def is_due(self) -> bool:
        """Whether `sync` has something to do."""
        if self._left() * 2 >= self._lease_bytes and self._this_hour() == self._hour:
            return False
        may_wait = self._is_spent or not self.is_open
        return not may_wait or self._now_s() - self._asked_s >= _AGAIN_S

    def _this_hour(self) -> int:
        return int(self._unix_s() // _HOUR_S)

    def sync(self, *, may_create: bool) -> None:
        """Book a new lease if this one is half used up, or its hour is over.

        Args:
            may_create: There is room for the file, and nobody else makes or removes files.
        """
        with self._lock:
            self._asked_s = self._now_s()
            if self._is_closed:
                return
            self._open(may_create=may_create)
            if self._fd < 0 or not self._files.lock(self._fd):
                return  # the next time
            try:
                self._book(self._lease_bytes)
            finally:
                self._files.unlock(self._fd)

    @property
    def is_open(self) -> bool:
        """Whether there is a file."""
        return self._fd >= 0

    def close(self) -> None:
        """Give back what is left of the lease."""
        with self._lock:
            self._is_closed = True
            if self._fd < 0:
                return
            try:
                if self._files.lock(self._fd):
                    self._book(0)
            finally:
                fd, self._fd = self._fd, -1
                self._files.close(fd)

    def _open(self, *, may_create: bool) -> None:
        if self._fd >= 0 and not self._files.fstat(self._fd).st_nlink:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
        if self._fd < 0:
            try:
                self._fd = self._files.open(self._path, os.O_RDWR)
            except FileNotFoundError:
                if may_create:
                    self._fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT)

    def _book(self, wanted_bytes: int) -> None:
        """Locked. Make the lease `wanted_bytes`, as far as the day's budget goes."""
        hour, left = self._this_hour(), self._left()
        found = self._read()
        hours = {each: num for each, num in found.items() if hour - HOURS < each <= hour}
        late = sum(num for each, num in found.items() if each > hour)  # the clock was set back
        unused, extra = max(0, left), max(0, -left) + late  # deletes may go beyond a lease
        if self._hour in hours:
            hours[self._hour] = max(0, hours[self._hour] - unused)
        free = self._budget_bytes - sum(hours.values()) - extra - PAGE_BYTES
        lease = max(0, min(wanted_bytes, free))
        self._is_spent = lease < wanted_bytes
        if lease != unused or extra or (unused and hour != self._hour):
            hours[hour] = hours.get(hour, 0) + extra + lease + PAGE_BYTES
            self._files.pwrite(self._fd, pack_hours(hours), 0)
            self._files.fdatasync(self._fd)
            self._granted = self._files.written_bytes + lease
            self._known = hours
        self._hour = hour
        self._day_left_bytes = max(0, self._budget_bytes - sum(self._known.values()))

    def _read(self) -> dict[int, int]:
        """Bytes by hour. A file that is damaged counts as a day's budget spent now."""
        data = self._files.pread(self._fd, _SIZE, 0)
        hours = parse_hours(data)
        if hours is None:
            self.num_damaged += 1
            return {self._this_hour(): self._budget_bytes}
        # A file that was removed comes back with what is remembered.
        return hours if data else dict(self._known)
