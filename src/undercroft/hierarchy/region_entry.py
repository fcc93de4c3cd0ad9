"""Into the region's file: judge what lies there, enter or make it, and let it grow.

Each step is taken with the file's door held, and each leaves, if the process dies right after it,
a state that the next participant recognises: an empty file, a file without its magic, or a region
with a dead seat. Each of them is removed and made anew; none is repaired.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import secrets
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from undercroft.clock import Clock
from undercroft.errors import Bug, ConfigError, KvError
from undercroft.hierarchy.region_control import (
    NONCE_BYTES,
    Control,
    Header,
    RegionShape,
    seat_name,
)
from undercroft.hierarchy.rendezvous import SeatLock, sweep_dead_regions

__all__ = ["Entrance", "Growth", "RegionConfig", "Waiting"]

_LOG = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
_FIRST_BYTES = 256 << 20  # allocated by the creator before anybody joins
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """What every participant of a region must want alike.

    Args:
        engine_id: Names the replica. Two engines that live at the same time need different ones;
            if they have the same by mistake, each gets its own region or refuses to start.
        num_ranks: Ranks of the replica.
        total_bytes: Length of the buffer, all ranks together.
        identity: Digest of the configuration that decides the meaning of the bytes, 1-64 bytes.
        directory: A memory file system.
        version: Of this library. Another one may lay out slots, or count jobs, otherwise.
    """

    engine_id: str
    num_ranks: int
    total_bytes: int
    identity: bytes
    directory: Path = Path("/dev/shm")  # noqa: S108 - memory, not a place for temporary files
    version: str = ""

    @property
    def shape(self) -> RegionShape:
        """The file's geometry."""
        return RegionShape(self.num_ranks, self.total_bytes)


class Waiting(NamedTuple):
    """Why a participant cannot enter yet, and what that is if it stays so."""

    why: str
    error: type[KvError] = KvError


_DOOR_BUSY = Waiting("its file is being entered by another process all the time")
_NOBODY = Waiting("no rank has joined; ranks join before the scheduler")


class Entrance:
    """One participant on its way into the file, with the door held while it acts."""

    def __init__(
        self,
        config: RegionConfig,
        lock: SeatLock,
        chunk_bytes: tuple[int, ...],
        clock: Clock,
        note: bytes = b"",
    ) -> None:
        self.config = config
        self.lock = lock
        self.clock = clock
        self._chunk_bytes = chunk_bytes
        self._note = note
        self._is_rank = lock.seat < config.num_ranks
        self._has_collected = False
        self._taken: tuple[mmap.mmap, Growth | None] | None = None

    def pass_through(self, deadline: float) -> None:
        """Enter, waiting for others until `deadline` on the clock."""
        last = _DOOR_BUSY
        while (waiting := self.attempt()) is not None:
            if waiting is not _DOOR_BUSY:
                last = waiting
            if self.clock.now_s() >= deadline:
                raise last.error(f"host region of engine {self.config.engine_id}: {last.why}")
            self.clock.sleep(_POLL_S)

    def attempt(self) -> Waiting | None:
        """Enter, or say why not yet; nothing is held then."""
        if not self.lock.open_door(create=self._is_rank):
            return _DOOR_BUSY if self._is_rank or self.lock.path.exists() else _NOBODY
        waiting: Waiting | None = None
        try:
            raw = os.pread(self.lock.fd, Header.num_bytes(), 0)
            header = Header.parse(raw)
            waiting = self._judge(header, is_empty=not raw)
            if waiting is None:
                self._enter(is_new=header is None)
        finally:
            if self._taken is None:
                self.lock.abandon()
        if self._taken is not None:
            self.lock.close_door()
        return waiting

    def take(self) -> tuple[mmap.mmap, Growth | None]:
        """What `attempt` got."""
        if self._taken is None:
            raise Bug("not entered")
        mapping, growth = self._taken
        if growth is not None:
            growth.start()
        return mapping, growth

    def _judge(self, header: Header | None, *, is_empty: bool) -> Waiting | None:
        """Whether to enter the file as it is; removes it if its engine is dead."""
        if header is None:
            if self.lock.is_deserted():
                return None if is_empty and self._is_rank else self._remove_stale()
            return Waiting(
                f"{self.lock.path} is held by a live process of another version", ConfigError
            )
        dead = [seat for seat in header.joined if not self.lock.is_taken(seat)]
        if dead or not header.joined:
            return self._remove_stale()
        seat = self.lock.seat
        difference = header.difference(self.config.shape, self.config.identity, self.config.version)
        if self.lock.is_taken(seat):
            return self._wait_for_seat(header, difference)
        if difference is not None:
            raise ConfigError(
                f"host region of engine {self.config.engine_id}: "
                f"{seat_name(seat, self.config.num_ranks)} and those already there differ: "
                f"{difference}; all processes of an engine need the same settings and version of "
                "undercroft, and another engine another engine_id"
            )
        if not self._is_rank and header.missing():
            names = ", ".join(f"rank {rank}" for rank in header.missing())
            return Waiting(f"{names} did not join; ranks join before the scheduler")
        return None

    def _remove_stale(self) -> Waiting:
        size = os.fstat(self.lock.fd).st_blocks * 512
        self.lock.unlink()
        if size:
            _LOG.warning(
                "removed %s, left by a dead start of engine %s: %d bytes freed",
                self.lock.path,
                self.config.engine_id,
                size,
            )
        return Waiting("a stale region was just removed")

    def _wait_for_seat(self, header: Header, difference: str | None) -> Waiting:
        offset = header.shape.process_id_offset(self.lock.seat)
        pid = int.from_bytes(os.pread(self.lock.fd, 8, offset), sys.byteorder)
        is_own = pid == os.getpid()
        if is_own and not self._has_collected:
            self._has_collected = True
            gc.collect()  # a failed start in this process, unreachable but not yet collected
        return Waiting(
            f"{seat_name(self.lock.seat, self.config.num_ranks)} is already there, in live process "
            f"{pid}{' (this one)' if is_own else ''}: another engine with the same engine_id is "
            "starting, or an earlier start was not closed"
            + (f"; it also differs: {difference}" if difference else ""),
            ConfigError,
        )

    def _enter(self, *, is_new: bool) -> None:
        """Sit down; the scheduler also takes the file's name away."""
        if not self.lock.sit():
            raise Bug("a free seat was taken with the door held")
        if is_new:
            sweep_dead_regions(self.config.directory, self.lock.path)
        fd = os.open(self.lock.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._check_same_file(fd)
            mapping, is_whole = self._map(fd, is_new=is_new)
            growth = None if self._is_rank or is_whole else Growth(fd, mapping, self.config)
        except BaseException as error:
            os.close(fd)
            if is_new:
                self.lock.unlink()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"host region: no memory for {self.config.shape.needed_bytes} bytes in "
                    f"{self.config.directory}: {error.strerror}"
                ) from error
            raise
        if growth is None:
            os.close(fd)
        self._taken = mapping, growth

    def _check_same_file(self, fd: int) -> None:
        if not os.path.sameopenfile(fd, self.lock.fd):
            raise KvError(f"host region: {self.lock.path} was replaced by a stranger")

    def _map(self, fd: int, *, is_new: bool) -> tuple[mmap.mmap, bool]:
        """Map the file and write this seat's record; the mapping, and whether it is all there."""
        shape = self.config.shape
        ready_bytes = self._make(fd) if is_new else 0
        mapping = mmap.mmap(fd, shape.file_bytes)
        with suppress(OSError, AttributeError):  # huge pages where the kernel has them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        control = Control(mapping, shape)
        if is_new:
            control.write_header(self.config.identity, self.config.version, ready_bytes)
        nonce = secrets.token_bytes(NONCE_BYTES)
        status = os.fstat(fd)
        file_id = (status.st_dev, status.st_ino)
        control.write_record(self.lock.seat, nonce, file_id, os.getpid(), self._chunk_bytes)
        if self._is_rank:
            control.write_note(self.lock.seat, self._note)
        if not self._is_rank:
            self.lock.unlink()
        control.set_joined(self.lock.seat)
        is_whole = control.ready_bytes >= shape.total_bytes
        control.release()
        return mapping, is_whole

    def _make(self, fd: int) -> int:
        """Give a new file its pages; how many of the body's bytes exist then."""
        shape = self.config.shape
        _check_space(self.config)
        os.ftruncate(fd, shape.file_bytes)
        os.posix_fallocate(fd, 0, shape.control_bytes)
        os.posix_fallocate(fd, shape.proof_offset, shape.file_bytes - shape.proof_offset)
        ready_bytes = 0
        while ready_bytes < min(shape.total_bytes, _FIRST_BYTES):
            ready_bytes, error = _allocate_piece(fd, shape, ready_bytes)
            if error is not None and not ready_bytes:
                raise error
            if error is not None:
                break  # the scheduler's growth finds the same, and says so
        return ready_bytes


def _check_space(config: RegionConfig) -> None:
    status = os.statvfs(config.directory)
    size_bytes = status.f_blocks * status.f_frsize
    free_bytes = status.f_bavail * status.f_frsize
    needed_bytes = config.shape.needed_bytes
    if size_bytes and needed_bytes > free_bytes:  # a tmpfs without limit says 0
        raise ConfigError(
            f"host region: needs {needed_bytes} bytes, but {config.directory} has {free_bytes} "
            f"free of {size_bytes}; lower the host size, or enlarge it (containers: --shm-size, "
            "or an emptyDir volume of medium Memory)"
        )


def _allocate_piece(fd: int, shape: RegionShape, start: int) -> tuple[int, OSError | None]:
    """Make the body's next pages exist.

    Returns:
        How many of the body's bytes exist now, and what was in the way.
    """
    stop = min(start + _PIECE_BYTES, shape.body_bytes)
    try:
        os.posix_fallocate(fd, shape.body_offset + start, stop - start)
    except OSError as error:
        return start, error
    return min(stop, shape.total_bytes), None


class Growth:
    """Makes the rest of the region's pages exist, piece by piece, on one daemon thread.

    The kernel clears pages outside the interpreter's lock. Out of memory ends it with one warning.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, config: RegionConfig) -> None:
        self._fd = fd
        self._control = Control(mapping, config.shape)
        self._config = config
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undercroft-region", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, *, wait_s: float) -> None:
        """End after the piece under way; wait for it at most that long."""
        self._stopping.set()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        shape = self._config.shape
        ready_bytes = self._control.ready_bytes
        try:
            while ready_bytes < shape.total_bytes and not self._stopping.is_set():
                ready_bytes, error = _allocate_piece(self._fd, shape, ready_bytes)
                if error is not None:
                    _LOG.warning(
                        "host memory of engine %s stays at %d of %d bytes: %s",
                        self._config.engine_id,
                        ready_bytes,
                        shape.total_bytes,
                        error.strerror,
                    )
                    return
                self._control.set_ready_bytes(ready_bytes)
        finally:
            self._control.release()
            os.close(self._fd)
