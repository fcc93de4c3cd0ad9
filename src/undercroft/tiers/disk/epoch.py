"""The epoch of a namespace: a small number on disk; what was stored under another is void.

24 bytes: magic `UNDREPCH`, the epoch, and a check that is a function of it. A damaged or missing
file is never guessed at: the epoch then becomes one later than any that a stored chunk carries.
Read by `pread` from the page cache (about a microsecond), not through a mapping: a mapping of a
file that somebody truncates kills the process.
"""

from __future__ import annotations

import errno
import os
import struct

from undercroft.tiers.disk.files import Files

__all__ = ["MAX_EPOCH", "EpochFile", "parse_epoch"]

MAX_EPOCH = (1 << 62) - 1
"""Never reached by counting; one above it is damage, and leaves room for the next."""

_NO_NOATIME = {errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP}
"""Only the owner may ask for that, and not of every file system."""
_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"UNDREPCH"
_MASK = 0xFFFFFFFFFFFFFFFF


def _check(epoch: int) -> int:
    return ((epoch ^ 0x9E3779B97F4A7C15) * 0xC2B2AE3D27D4EB4F) & _MASK


def parse_epoch(data: bytes) -> int | None:
    """What an epoch file's bytes say, 1 to `MAX_EPOCH`; None if they are damaged."""
    if len(data) != _FIELDS.size:
        return None
    epoch: int
    magic, epoch, check = _FIELDS.unpack(data)
    if magic != _MAGIC or check != _check(epoch) or not 1 <= epoch <= MAX_EPOCH:
        return None
    return epoch


class EpochFile:
    """One namespace's epoch file. Threads: any, `open` and `close` aside."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self._files = files
        self._fd = -1
        self._keeps_no_atime = False
        self._last: tuple[bytes, int] = (b"never read", 0)

    def open(self, *, read_only: bool) -> None:
        """Open, and unless `read_only` create, the file."""
        self.close()
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = self._files.open(self.path, flags | os.O_NOATIME)
            self._keeps_no_atime = True
        except OSError as exc:
            if exc.errno not in _NO_NOATIME:
                raise
            self._fd = self._files.open(self.path, flags)
            self._keeps_no_atime = False

    def close(self) -> None:
        """Give the descriptor back; twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def read(self) -> int | None:
        """The epoch, at least 1; None if the file is empty or damaged."""
        return self._parsed(self._files.pread(self._fd, _FIELDS.size, 0))

    def read_now(self) -> int | None:
        """As `read`, if that takes no waiting; None also if it would, or fails. Some 2 us.

        Nothing waits for the device: a page that is not in memory is not fetched, and no time of
        access is noted, which may need the journal.
        """
        if not self._keeps_no_atime:
            return None
        data = self._files.pread_now(self._fd, _FIELDS.size, 0)
        return None if data is None else self._parsed(data)

    def _parsed(self, data: bytes) -> int | None:
        last_data, last_epoch = self._last
        if data == last_data:
            return last_epoch
        epoch = parse_epoch(data)
        if epoch is not None:
            self._last = (data, epoch)
        return epoch

    def write(self, epoch: int) -> None:
        """Make `epoch` the epoch, durably, and prove it by reading it back."""
        self._files.pwrite(self._fd, _FIELDS.pack(_MAGIC, epoch, _check(epoch)), 0)
        self._files.fdatasync(self._fd)
        if self.read() != epoch:
            raise OSError(errno.EIO, "the epoch did not read back", self.path)

    def is_linked(self) -> bool:
        """Whether the open file still has its name."""
        try:
            mine, named = self._files.fstat(self._fd), self._files.stat(self.path)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)
