"""The shared bytes of level 0: one region per replica, mapped by its scheduler and by every rank.

The ranks join first (the engine builds its workers before its scheduler), the scheduler last. Its
joining takes the file's name away: from then on no exit of any process, SIGKILL included, leaves a
file. Design, and what was rejected: docs/explanation/design/0003-host-region.md.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from undercroft.clock import Clock
from undercroft.errors import Bug, ConfigError, KvError, TierClosed
from undercroft.hierarchy.region_control import Control, check_limits, seat_name
from undercroft.hierarchy.region_entry import Entrance, Growth, RegionConfig
from undercroft.hierarchy.rendezvous import SeatLock, region_path
from undercroft.tiers.base import SharedMemory

__all__ = ["Region", "RegionConfig"]

_POLL_S = 0.01
_STOP_S = 1.0
_NO_STORES: frozenset[int] = frozenset()


class Region:
    """One participant's view of the shared region.

    `buffer` is a writable uint8 view, `(total_bytes,)`, page-aligned. Touch it only up to
    `ready_bytes()`: beyond, pages may not exist, and a touch kills the process when memory is out.

    Threads: `join`, `wait_joined` and `close` belong to one thread; the rest to any.
    """

    buffer: memoryview

    def __init__(self, entrance: Entrance, mapping: mmap.mmap, growth: Growth | None) -> None:
        config = entrance.config
        self._config = config
        self._clock = entrance.clock
        self._lock = entrance.lock
        self._num_ranks = config.num_ranks
        self._seat = entrance.lock.seat
        self._mapping = mapping
        self._control = Control(mapping, config.shape)
        body = config.shape.body_offset
        whole = memoryview(mapping)
        self.buffer = whole[body : body + config.total_bytes]
        whole.release()
        self._growth = growth
        self._is_proven = False
        self._is_closed = False
        self._reporting = threading.Lock()
        self._seen = array("Q", bytes(8 * config.num_ranks))
        self._seen_image = self._seen.tobytes()
        self._release = weakref.finalize(self, _let_go, self._lock, growth)

    @classmethod
    def join(
        cls,
        config: RegionConfig,
        *,
        role: Literal["scheduler"] | int,
        chunk_bytes: Sequence[int] | None = None,
        note: bytes = b"",
        deadline_s: float,
        clock: Clock,
    ) -> Region:
        """Take this participant's seat in its engine's region; the first rank makes the region.

        Args:
            config: The same for every participant.
            role: `"scheduler"`, or the rank. The scheduler's call waits for all ranks: an engine
                whose scheduler could come first could not be told from its twin.
            chunk_bytes: Of a rank: payload bytes of a chunk of each group on this rank.
            note: Of a rank: what else it says of itself to all others, a few KiB at most.
            deadline_s: How long to wait for others, from now.
            clock: Source of time.

        Raises:
            ConfigError: Participants disagree (both sides named), the size does not fit the
                directory (both numbers named), or the seat is taken by a live process.
            KvError: A rank is missing at the deadline; names it.

        Threads: blocks up to `deadline_s`, and for the first 256 MiB of the region. Removes the
        regions of dead engines when it makes one. Starts one daemon thread, in the scheduler only,
        and only for a region larger than that.
        """
        seat = config.num_ranks if role == "scheduler" else role
        lengths = tuple(chunk_bytes or ())
        check_limits(config.shape, config.identity, lengths, note, config.version)
        is_rank = role != "scheduler"
        if is_rank and not (0 <= seat < config.num_ranks and lengths):
            raise ConfigError(
                f"host region: rank {seat} of {config.num_ranks} ranks with {len(lengths)} groups: "
                "the rank must be below the number of ranks and have at least one group"
            )
        lock = SeatLock(region_path(config.directory, config.engine_id), seat)
        entrance = Entrance(config, lock, lengths, clock, note)
        try:
            entrance.pass_through(clock.now_s() + deadline_s)
            return cls(entrance, *entrance.take())
        except BaseException:
            lock.leave()
            raise

    def memory(self) -> SharedMemory:
        """Where `buffer` lies, for others to map."""
        return SharedMemory(self._lock.fd, self._config.shape.body_offset, self.buffer)

    def ready_bytes(self) -> int:
        """Length of the buffer's prefix whose pages exist. It grows, at most to all of it.

        Cost: < 1 us. Threads: any, in every participant.
        """
        try:
            return self._control.ready_bytes
        except ValueError:  # released: closed, perhaps just now by another thread
            return 0

    def wait_joined(self, deadline_s: float) -> None:
        """Return once everybody has joined and is proven to map the same bytes.

        Every participant has written a random nonce into the body and past it; they are read here
        through this mapping, and compared, with the file's device and inode, with what the file
        says. The scheduler finds everybody present. Cost after the first success: none.

        Raises:
            KvError: Somebody is missing at the deadline, or died, or maps other bytes; names who.
            TierClosed: After `close`.
        """
        if self._is_closed:
            raise self._closed()
        if self._is_proven:
            return
        deadline = self._clock.now_s() + deadline_s
        while not self._control.has_joined(self._num_ranks):
            self._check_waiting_for(is_over=self._clock.now_s() >= deadline)
            self._clock.sleep(_POLL_S)
        file_id = self._lock.file_id
        is_first = self._seat == self._num_ranks  # nothing was stored before the scheduler came
        for seat in range(self._config.shape.num_seats):
            offset, length = self._control.record_span(seat)
            claim = os.pread(self._lock.fd, length, offset)
            if not self._control.proves(seat, claim, file_id, in_body=is_first):
                raise KvError(
                    f"host region of engine {self._config.engine_id}: {self._name(self._seat)} and "
                    f"{self._name(seat)} do not see the same bytes; restart the engine"
                )
        self._is_proven = True

    def chunk_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank, payload bytes of a chunk of each group. Only after `wait_joined`."""
        if not self._is_proven:
            raise Bug("chunk_bytes() before wait_joined()")
        if self._is_closed:
            raise self._closed()
        return tuple(self._control.chunk_bytes(rank) for rank in range(self._num_ranks))

    def notes(self) -> tuple[bytes, ...]:
        """Of each rank, what it said of itself. Only after `wait_joined`."""
        if not self._is_proven:
            raise Bug("notes() before wait_joined()")
        if self._is_closed:
            raise self._closed()
        return tuple(self._control.note(rank) for rank in range(self._num_ranks))

    def report_failed_store(self, store_id: int) -> None:
        """Tell the scheduler that a copy of this store failed. Ranks only; never blocks.

        Raises:
            TierClosed: After `close`.
        """
        if self._seat == self._num_ranks or not 0 <= store_id < 1 << 64:
            raise Bug(f"{self._name(self._seat)} reports store {store_id}")
        with self._reporting:
            if self._is_closed:
                raise self._closed()
            self._control.push_failure(self._seat, store_id)

    def take_failed_stores(self) -> frozenset[int] | None:
        """Stores reported since the last call. Scheduler only.

        Returns:
            None if a ring overflowed in between: treat every store that is open as failed.

        Threads: one. Cost: one read of all counters, < 1 us, while nothing is new.
        """
        if self._seat != self._num_ranks:
            raise Bug(f"{self._name(self._seat)} takes failed stores")
        if self._is_closed or self._control.counters_image() == self._seen_image:
            return _NO_STORES
        failed: set[int] = set()
        is_lost = False
        for rank in range(self._num_ranks):
            self._seen[rank], store_ids = self._control.read_failures(rank, self._seen[rank])
            is_lost = is_lost or store_ids is None
            failed.update(store_ids or ())
        self._seen_image = self._seen.tobytes()
        return None if is_lost else frozenset(failed)

    def close(self) -> None:
        """Leave. Twice is fine, and so are views made of `buffer`, which stay valid; it does not.

        Before everybody has joined it removes the file, which nobody can complete any more. Blocks
        at most 1 s.
        """
        with self._reporting:
            if self._is_closed:
                return
            self._is_closed = True
        if self._growth is not None:
            self._growth.stop(wait_s=_STOP_S)
        self._release()
        self._control.release()
        with suppress(BufferError):
            self.buffer.release()
        with suppress(BufferError):
            self._mapping.close()

    def _check_waiting_for(self, *, is_over: bool) -> None:
        seats = range(self._config.shape.num_seats)
        joined = [seat for seat in seats if self._control.has_joined(seat)]
        dead = [seat for seat in joined if not self._lock.is_live(seat)]
        missing = [seat for seat in seats if seat not in joined]
        if dead or (is_over and missing):
            who = ", ".join(self._name(seat) for seat in dead or missing)
            what = "died before everybody had joined" if dead else "did not join in time"
            raise KvError(f"host region of engine {self._config.engine_id}: {who} {what}")

    def _name(self, seat: int) -> str:
        return seat_name(seat, self._num_ranks)

    def _closed(self) -> TierClosed:
        return TierClosed(f"host region of engine {self._config.engine_id} is closed")


def _let_go(lock: SeatLock, growth: Growth | None) -> None:
    """Whatever a region holds besides memory; also run when it is collected without `close`."""
    if growth is not None:
        growth.stop(wait_s=0.0)
    lock.leave()
