"""How the processes of one engine find one file: a name, and byte locks that die with their holder.

A participant holds an open-file-description lock on its *seat*'s byte from the moment it enters
until everybody has joined (or it closes). The kernel drops the lock when the process dies, however
it dies, and shows it across pid namespaces; so "is the engine of this file alive" is asked of the
lock, never of a pid. One more byte, the *door*, serialises entering, creating and removing.

The locks are on an open of their own: a mapping keeps its file description, and so its locks,
alive, and a forked child inherits mappings. Children drop the lock's descriptor at fork.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import weakref
from contextlib import suppress
from pathlib import Path

from undercroft.errors import ConfigError

__all__ = ["SeatLock", "region_path", "sweep_dead_regions"]

_LOG = logging.getLogger(__name__)

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PRIVATE = 0o600
_DOOR_BYTE = 0
_FIRST_SEAT_BYTE = 1
_PREFIX = "undercroft-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")
_LOCK = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length, pid


def region_path(directory: Path, engine_id: str) -> Path:
    """The file of this user's engine of that name."""
    digest = hashlib.blake2b(f"{os.geteuid()}/{engine_id}".encode(), digest_size=8)
    return directory / (_PREFIX + digest.hexdigest())


def _try_lock(fd: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise ConfigError(
            f"host region: no open-file-description locks here: {error.strerror}; they need Linux "
            "and a directory of a local memory file system"
        ) from error
    return True


def _unlock(fd: int, byte: int, length: int = 1) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, length, 0))


def _is_locked_by_others(fd: int, byte: int, length: int = 1) -> bool:
    """Whether another open file description holds a lock there; `length` 0 is "to the end"."""
    request = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _is_linked_at(fd: int, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class SeatLock:
    """One participant's open of the region's file, and the locks it holds there.

    Threads: one. `leave` may come from a finalizer.
    """

    def __init__(self, path: Path, seat: int) -> None:
        self.path = path
        self.seat = seat
        self._fd = -1
        hook = weakref.WeakMethod(self._forget_in_child)

        def after_fork() -> None:
            if (forget := hook()) is not None:
                forget()

        os.register_at_fork(after_in_child=after_fork)

    @property
    def fd(self) -> int:
        """Descriptor for reading the file and asking about it; never map it."""
        return self._fd

    @property
    def file_id(self) -> tuple[int, int]:
        """Device and inode."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def open_door(self, *, create: bool) -> bool:
        """Open the file and take its door, if both can be had at once.

        Returns:
            False if there is no file, somebody else is at the door, or the file was replaced
            meanwhile: try again.

        Raises:
            ConfigError: What lies there cannot be ours.
        """
        flags = _OPEN | (os.O_CREAT if create else 0)
        try:
            self._fd = os.open(self.path, flags, _PRIVATE)
        except FileNotFoundError as error:
            if self.path.parent.is_dir():
                return False
            raise ConfigError(
                f"host region: no directory {self.path.parent}: mount a memory file system there"
            ) from error
        except OSError as error:
            raise ConfigError(f"host region: cannot open {self.path}: {error.strerror}") from error
        self._check_ours()
        if _try_lock(self._fd, _DOOR_BYTE) and _is_linked_at(self._fd, self.path):
            return True
        self.abandon()
        return False

    def _check_ours(self) -> None:
        status = os.fstat(self._fd)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
        mode = stat.S_IMODE(status.st_mode)
        if is_plain and status.st_uid == os.geteuid() and not mode & ~_PRIVATE:
            if mode != _PRIVATE:  # just made, under a umask that forbids even us
                os.fchmod(self._fd, _PRIVATE)
            return
        self.abandon()
        raise ConfigError(
            f"host region: {self.path} is not a private file of this user; remove it, or choose "
            "another engine_id"
        )

    def close_door(self) -> None:
        """Let the next one in."""
        _unlock(self._fd, _DOOR_BYTE)

    def sit(self) -> bool:
        """Take the seat's lock; False if a live participant has it. Only with the door held."""
        return _try_lock(self._fd, _FIRST_SEAT_BYTE + self.seat)

    def is_live(self, seat: int) -> bool:
        """Whether the holder of `seat` lives."""
        return seat == self.seat or _is_locked_by_others(self._fd, _FIRST_SEAT_BYTE + seat)

    def is_taken(self, seat: int) -> bool:
        """Whether somebody else holds `seat`."""
        return _is_locked_by_others(self._fd, _FIRST_SEAT_BYTE + seat)

    def is_deserted(self) -> bool:
        """Whether no other participant lives. Only with the door held."""
        return not _is_locked_by_others(self._fd, _FIRST_SEAT_BYTE, 0)

    def unlink(self) -> None:
        """Take the name away, if it is still this file's. Only with the door held."""
        if _is_linked_at(self._fd, self.path):
            with suppress(FileNotFoundError):
                self.path.unlink()

    def abandon(self) -> None:
        """Close the file, giving up every lock in it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _unlock(fd, _DOOR_BYTE, 0)
            os.close(fd)

    def leave(self) -> None:
        """Give the seat up, and remove the file if it still has its name. Twice is fine.

        A file with an empty seat can never be complete, so whoever else is in it loses nothing. If
        somebody is at the door, the file is left to them: they find the seat dead. In a forked
        child this does nothing: the seat is the parent's.
        """
        if self._fd < 0:
            return
        if _try_lock(self._fd, _DOOR_BYTE):
            self.unlink()
        self.abandon()

    def _forget_in_child(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sweep_dead_regions(directory: Path, keep: Path) -> None:
    """Remove the regions of this user's dead engines, and say so. `keep` is left alone.

    A region whose engine lives, or is just being entered, is left; so is what we may not open.
    """
    for path in sorted(directory.glob(_PREFIX + "*")):
        if path == keep or not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, _OPEN)
        except OSError:
            continue
        try:
            _sweep_one(fd, path)
        finally:
            os.close(fd)


def _sweep_one(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return
    if not _try_lock(fd, _DOOR_BYTE) or _is_locked_by_others(fd, _FIRST_SEAT_BYTE, 0):
        return
    if _is_linked_at(fd, path):
        with suppress(FileNotFoundError):
            path.unlink()
            _LOG.warning(
                "removed %s, the region of a dead engine: %d bytes freed",
                path,
                status.st_blocks * 512,
            )
