"""A tier that keeps no bytes: which chunks it holds, and how long moving them takes.

`SizeTier` is the tier, `TimedTransfers` its movers: no thread, no copy; a move ends when the clock
has come to the time at which the device would have ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from undercroft.clock import Clock
from undercroft.errors import KvError, TierFull
from undercroft.hierarchy.outcome import Done, Op, Outcome, StandingErrors
from undercroft.hierarchy.transfers import Transfers
from undercroft.keys import ChunkKey

if TYPE_CHECKING:
    from typing_extensions import override as _override
else:  # in `typing` from 3.12 on

    def _override(method):  # noqa: ANN001, ANN202 - typed above

        return method


__all__ = ["Service", "SizeTier", "TimedTransfers"]


@dataclass(frozen=True, slots=True)
class Service:
    """How fast a device is. Reads and writes do not slow each other down.

    Args:
        latency_s: What every move takes besides; others may begin meanwhile.
        read_bytes_per_s: One move after the other.
        write_bytes_per_s: The same for writes.
    """

    latency_s: float = 0.0
    read_bytes_per_s: float = float("inf")
    write_bytes_per_s: float = float("inf")


class SizeTier:
    """Chunks by their sizes alone. Threads: one.

    Args:
        name: What errors and counters call it.
        capacity_bytes: The bound, in bytes as they are passed, whatever a chunk really has.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.on_write: Callable[[ChunkKey], None] = _nothing
        """Told of every chunk that is written."""
        self._sizes: dict[ChunkKey, int] = {}
        self._used_bytes = 0

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        return key in self._sizes

    def has(self, key: ChunkKey) -> bool:
        """See `Indexed.has`."""
        return key in self._sizes

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        """See `Indexed.evictable`."""
        return list(self._sizes.items())

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`; `out` stays as it is."""
        return self._sizes.get(key) == out.nbytes

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`; `data` is not looked at."""
        if key in self._sizes:
            return
        if self._used_bytes + data.nbytes > self.capacity_bytes:
            raise TierFull(
                f"tier {self.name!r} holds {self._used_bytes} of {self.capacity_bytes} bytes: no "
                f"room for {data.nbytes}",
                tier=self.name,
                key=key,
            )
        self._sizes[key] = data.nbytes
        self._used_bytes += data.nbytes
        self.on_write(key)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self._used_bytes -= self._sizes.pop(key, 0)

    def close(self) -> None:
        """See `Tier.close`."""

    def used_bytes(self) -> int:
        """See `Bounded.used_bytes`."""
        return self._used_bytes

    def free_chunks(self, num_bytes: int) -> int:
        """See `Bounded.free_chunks`."""
        return (self.capacity_bytes - self._used_bytes) // num_bytes


def _nothing(_key: ChunkKey) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Move:
    end_s: float
    ticket: int
    op: Op
    key: ChunkKey
    buffer: memoryview | None
    submitted_s: float
    service_s: float
    is_late: bool


class TimedTransfers(Transfers):
    """Movers of a `SizeTier` on a clock that is set.

    Moves of one key end in the order in which they were submitted. One that the device would begin
    after its deadline ends there, as `TierTimeout`, and takes no time of the device.

    Args:
        tier: Where the chunks are.
        service: How fast.
        chunk_bytes: What a chunk has in truth; slots are smaller.
        clock: Set by the simulation.
        max_queued_write_bytes: Bound on the bytes, of slots, of writes that have not begun.

    Threads: one. `drain` and `close` do not wait.
    """

    def __init__(
        self,
        tier: SizeTier,
        service: Service,
        *,
        chunk_bytes: int,
        clock: Clock,
        max_queued_write_bytes: int,
    ) -> None:
        super().__init__(
            tier, clock=clock, max_queued_write_bytes=max_queued_write_bytes, num_threads=1
        )
        self._size_tier = tier
        self._time = clock
        self._standing = StandingErrors(tier.name)
        self._read_s = chunk_bytes / service.read_bytes_per_s
        self._write_s = chunk_bytes / service.write_bytes_per_s
        self._latency_s = service.latency_s
        self._reading_until_s = self._writing_until_s = float("-inf")
        self._under_way: list[tuple[float, int, _Move]] = []  # a heap, the first to end first
        self._last_end_s: dict[ChunkKey, tuple[float, int]] = {}
        self._write_starts: deque[tuple[float, int]] = deque()
        self._queued_writes_bytes = 0
        self._num_tickets = 0

    @property
    def next_end_s(self) -> float:
        """When the next move ends; infinite where none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    @_override
    def read(self, key: ChunkKey, out: memoryview, deadline_s: float) -> int:
        """See `Transfers.read`."""
        start_s = max(self._time.now_s(), self._reading_until_s)
        if start_s < deadline_s:
            self._reading_until_s = start_s + self._read_s
        return self._begin_at(Op.READ, key, out, (start_s, self._read_s, deadline_s))

    @_override
    def write(
        self,
        key: ChunkKey,
        data: memoryview,
        deadline_s: float,
        epoch: int | None = None,  # noqa: ARG002 - the same signature
    ) -> int | None:
        """See `Transfers.write`."""
        if self.queued_write_bytes + data.nbytes > self.max_queued_write_bytes:
            return None
        start_s = max(self._time.now_s(), self._writing_until_s)
        if start_s < deadline_s:
            self._writing_until_s = start_s + self._write_s
        self._write_starts.append((min(start_s, deadline_s), data.nbytes))
        self._queued_writes_bytes += data.nbytes
        return self._begin_at(Op.WRITE, key, data, (start_s, self._write_s, deadline_s))

    @_override
    def delete(self, key: ChunkKey) -> int:
        """See `Transfers.delete`."""
        now_s = self._time.now_s()
        return self._begin_at(Op.DELETE, key, None, (now_s, 0.0, float("inf")))

    def _begin_at(
        self, op: Op, key: ChunkKey, buffer: memoryview | None, when: tuple[float, float, float]
    ) -> int:
        start_s, moving_s, deadline_s = when
        self._num_tickets += 1
        service_s = moving_s + (self._latency_s if op is not Op.DELETE else 0.0)
        before_s, _ = self._last_end_s.get(key, (0.0, 0))
        end_s = max(start_s + service_s, before_s)
        is_late = end_s > deadline_s
        end_s = min(end_s, deadline_s) if is_late else end_s
        now_s = self._time.now_s()
        move = _Move(end_s, self._num_tickets, op, key, buffer, now_s, service_s, is_late)
        self._last_end_s[key] = (end_s, move.ticket)
        heappush(self._under_way, (end_s, move.ticket, move))
        return move.ticket

    @_override
    def poll(self, max_outcomes: int = 1024) -> list[Done]:
        """See `Transfers.poll`."""
        now_s, done = self._time.now_s(), list[Done]()
        while self._under_way and self.next_end_s <= now_s and len(done) < max_outcomes:
            _, _, move = heappop(self._under_way)
            if self._last_end_s[move.key][1] == move.ticket:
                del self._last_end_s[move.key]
            done.append(self._ended_move(move))
        return done

    def _ended_move(self, move: _Move) -> Done:
        error: KvError | None = self._standing.not_started if move.is_late else None
        found, num_bytes = False, 0
        try:
            if error is None and move.op is Op.DELETE:
                self._size_tier.delete(move.key)
            elif error is None and move.buffer is not None:
                if move.op is Op.READ:
                    found = self._size_tier.read_into(move.key, move.buffer)
                else:
                    self._size_tier.write_from(move.key, move.buffer)
                num_bytes = move.buffer.nbytes if found or move.op is Op.WRITE else 0
                self.speeds.served(move.op, move.service_s, move.buffer.nbytes)
        except TierFull as full:
            error = full
        seconds = move.end_s - move.submitted_s
        return Done(
            move.ticket,
            move.op,
            Outcome(move.key, error, num_bytes, seconds, found),
            buffer_free=True,
        )

    @_override
    def take_released(self) -> list[int]:
        """See `Transfers.take_released`."""
        return []

    @property
    @_override
    def has_news(self) -> bool:
        """See `Transfers.has_news`."""
        return bool(self._under_way)

    @property
    @_override
    def queued_write_bytes(self) -> int:
        """See `Transfers.queued_write_bytes`."""
        starts, now_s = self._write_starts, self._time.now_s()
        while starts and starts[0][0] <= now_s:
            self._queued_writes_bytes -= starts.popleft()[1]
        return self._queued_writes_bytes

    @property
    @_override
    def queued_read_bytes(self) -> int:
        """See `Transfers.queued_read_bytes`."""
        return 0

    @_override
    def drain(self, deadline_s: float) -> bool:  # noqa: ARG002 - the same signature
        """See `Transfers.drain`."""
        return not self._under_way

    @_override
    def close(self, deadline_s: float) -> bool:  # noqa: ARG002 - the same signature
        """See `Transfers.close`."""
        self._under_way.clear()
        return True
