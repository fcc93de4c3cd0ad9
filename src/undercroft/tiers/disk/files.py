"""Every system call of the disk tier, in one class, so that tests can fail any one of them.

Nothing else in this package touches `os`. `OSError` leaves here untranslated; `translate` turns it
into this library's errors, in one place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from threading import Lock

from undercroft.errors import TierError, TierFull, TierUnavailable
from undercroft.tiers.disk.buffers import padded

__all__ = ["Files", "NotOurs", "translate"]

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""0 in Pythons that were built for a C library older than 2.26, conda's and uv's among them."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ADVICE = {
    errno.EROFS: "remount it writable",
    errno.EACCES: "give this user access",
    errno.EPERM: "give this user access",
    errno.EIO: "check the device",
    errno.ENOENT: "it was removed under us and is made anew at the next store",
    errno.ESTALE: "remount the file system",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EBADFD: "remove it",
}
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EINVAL})
_PRIVATE_FILE, _PRIVATE_DIRECTORY = 0o600, 0o700
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotOurs(OSError):
    """What lies under a name of ours is no plain file of our own: never read, never written."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.EBADFD, f"it is {what}, not a file of ours", path)


def translate(exc: OSError, what: str, *, tier: str, key: bytes | None = None) -> TierError:
    """The error to raise `from exc`: `TierFull` if the medium is full, else `TierUnavailable`."""
    reason = exc.strerror or str(exc)
    where = f" ({exc.filename})" if exc.filename else ""
    if exc.errno in _FULL:
        return TierFull(
            f"cannot {what}{where}: {reason}; free space or lower the capacity", tier=tier, key=key
        )
    advice = _ADVICE.get(exc.errno or 0, "it is tried again later")
    return TierUnavailable(f"cannot {what}{where}: {reason}; {advice}", tier=tier, key=key)


class Files:
    """Plain system calls. Short reads are values; short writes are `OSError(EIO)`.

    Threads: any. Every call may block, and raises `OSError` as the kernel has it.
    """

    written_bytes = 0
    """Bytes written so far, each write in whole pages: no less than what reaches the medium."""

    mover: Sequence[str] | None = None
    """The module, and its last arguments, of a mover process that makes these very calls.

    None: none does, and what another process did would go past whoever replaced them.
    """

    _counting = Lock()

    def open(self, path: str, flags: int) -> int:
        """A descriptor of a plain file with one name, of the user whose its directory is.

        Never inherited; 0600 whatever the umask, also if others have opened it up. Does not wait
        for the other end of a pipe that somebody has put there.

        Raises:
            NotOurs: It, or its directory, is something else.
        """
        extra = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags | extra, _PRIVATE_FILE)
        except OSError as exc:
            if exc.errno in _NO_FILE:
                kind = _KINDS.get(stat.S_IFMT(self.stat(path).st_mode))
                if kind:
                    raise NotOurs(path, kind) from exc
            raise
        try:
            self._check_ours(fd, path, is_written=flags & os.O_ACCMODE != os.O_RDONLY)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_ours(self, fd: int, path: str, *, is_written: bool) -> None:
        found, parent = os.fstat(fd), self.stat(path.rpartition("/")[0] or ".")
        if not stat.S_ISREG(found.st_mode):
            raise NotOurs(path, _KINDS.get(stat.S_IFMT(found.st_mode), "something special"))
        if not stat.S_ISDIR(parent.st_mode):
            raise NotOurs(path, "behind a symbolic link")
        if found.st_nlink > 1:
            raise NotOurs(path, f"one of {found.st_nlink} names of a file (hard links)")
        if found.st_uid != parent.st_uid:
            raise NotOurs(path, f"of user {found.st_uid} in a directory of {parent.st_uid}")
        is_mine = found.st_uid == self.user_id()
        if is_written and is_mine and stat.S_IMODE(found.st_mode) != _PRIVATE_FILE:
            os.fchmod(fd, _PRIVATE_FILE)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Up to `num_bytes` from `offset`; shorter only at the end of the file."""
        return os.pread(fd, num_bytes, offset)

    def pread_now(self, fd: int, num_bytes: int, offset: int) -> bytes | None:
        """As `pread`, from the page cache; None if that would wait, fails or is not to be had."""
        if not _NOWAIT:
            return None
        buffer = bytearray(num_bytes)
        try:
            num_read = os.preadv(fd, [buffer], offset, _NOWAIT)
        except OSError:  # EAGAIN: not in memory; EOPNOTSUPP: network file systems, tmpfs
            return None
        return bytes(buffer[:num_read])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in turn; returns the bytes read."""
        return os.preadv(fd, buffers, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of `data`."""
        self._whole(os.pwrite(fd, data, offset), len(data))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all of `buffers`, in turn, contiguously."""
        self._whole(os.pwritev(fd, buffers, offset), sum(map(len, buffers)))

    def _whole(self, written: int, wanted: int) -> None:
        self.count_written(padded(written))
        if written != wanted:
            raise OSError(errno.EIO, f"short write, {written} of {wanted} bytes")

    def count_written(self, num_bytes: int) -> None:
        """Somebody else wrote these for us."""
        with self._counting:
            self.written_bytes += num_bytes

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Give the file `num_bytes` of size and of space."""
        os.posix_fallocate(fd, 0, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut the file to `num_bytes`."""
        os.ftruncate(fd, num_bytes)

    def fdatasync(self, fd: int) -> None:
        """Make the file's bytes durable."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Make the names in the directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        """Try to lock the open file, until it is closed; False if somebody else has it."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Let the lock go."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def unlink(self, path: str) -> None:
        """Remove the file; absent is fine."""
        try:
            os.unlink(path)  # noqa: PTH108 - strings throughout: a path object per call is slow
        except FileNotFoundError:
            return

    def rename(self, source: str, target: str) -> None:
        """Give the file its name, replacing what had it."""
        os.replace(source, target)  # noqa: PTH105 - the call itself

    def make_directories(self, path: str) -> None:
        """The directory and those above it, 0700 whatever the umask; present is fine."""
        _make_directory(path.rstrip("/") or "/")

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)  # noqa: PTH106 - the call itself

    def restrict(self, path: str) -> None:
        """Make the directory 0700."""
        os.chmod(path, _PRIVATE_DIRECTORY)  # noqa: PTH101 - the call itself

    def stat(self, path: str) -> os.stat_result:
        """Of the name itself, never of what a symbolic link points to."""
        return os.lstat(path)

    def exists(self, path: str) -> bool:
        """Whether there is such a name; other failures of `stat` pass."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def fstat(self, fd: int) -> os.stat_result:
        """Of the open file."""
        return os.fstat(fd)

    def list(self, path: str) -> list[str]:
        """Names in the directory, sorted."""
        return sorted(os.listdir(path))  # noqa: PTH208 - the call itself

    def free_bytes(self, path: str) -> int:
        """What an ordinary user may still write to the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def user_id(self) -> int:
        """Who we are to the file system."""
        return os.geteuid()

    def random_hex(self) -> str:
        """16 hex digits nobody else has."""
        return os.urandom(8).hex()


def _make_directory(path: str, *, has_parent: bool = False) -> None:
    try:
        os.mkdir(path, _PRIVATE_DIRECTORY)  # noqa: PTH102 - the call itself
    except FileNotFoundError:
        above = path.rpartition("/")[0]
        if has_parent or not above:  # some places, as /proc, say so whatever there is above
            raise
        _make_directory(above.rstrip("/"))
        _make_directory(path, has_parent=True)
    except FileExistsError:
        if not os.path.isdir(path):  # noqa: PTH112 - the same
            raise
    else:
        if stat.S_IMODE(os.lstat(path).st_mode) != _PRIVATE_DIRECTORY:
            os.chmod(path, _PRIVATE_DIRECTORY)  # noqa: PTH101 - the same
