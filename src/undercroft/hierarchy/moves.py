"""The moves that wait for a mover thread: in which order they may start."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from undercroft.hierarchy.outcome import Op
from undercroft.keys import ChunkKey

__all__ = ["Move", "MoveQueue", "MoveState"]


class MoveState(Enum):
    """QUEUED -> RUNNING -> ENDED, or RUNNING -> ABANDONED (deadline passed; a thread is in it)."""

    QUEUED = 0
    RUNNING = 1
    ABANDONED = 2
    ENDED = 3


_QUEUED = MoveState.QUEUED


class Move:
    """One transfer in flight; lives from submission until its thread has let go of it."""

    __slots__ = (
        "after",
        "before",
        "buffer",
        "deadline_s",
        "key",
        "num_bytes",
        "op",
        "permit",
        "started_s",
        "state",
        "submitted_s",
        "ticket",
    )

    def __init__(
        self, op: Op, key: ChunkKey, buffer: memoryview | None, num_bytes: int, deadline_s: float
    ) -> None:
        self.op = op
        self.key = key
        self.buffer = buffer
        self.num_bytes = num_bytes
        self.deadline_s = deadline_s
        self.state = _QUEUED
        self.ticket = 0
        self.submitted_s = 0.0
        self.started_s = 0.0
        self.permit = 0
        self.before: Move | None = None
        self.after: Move | None = None


class MoveQueue:
    """Reads first, then deletes (they make room), then writes; moves of one key in order.

    A move whose key has an earlier move that has not let go waits behind it. Precedence has a
    bound: after `max_in_a_row` reads (deletes) in a row, one of those that waited goes.

    Threads: the caller serialises. Cost: O(1) per call.
    """

    def __init__(self, *, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._reads: OrderedDict[int, Move] = OrderedDict()
        self._deletes: OrderedDict[int, Move] = OrderedDict()
        self._writes: OrderedDict[int, Move] = OrderedDict()
        self._ready = {Op.READ: self._reads, Op.DELETE: self._deletes, Op.WRITE: self._writes}
        self._last: dict[ChunkKey, Move] = {}
        self._reads_in_a_row = 0
        self._deletes_in_a_row = 0
        self.num_reads = 0
        self.num_deletes = 0
        self.num_writes = 0
        self.write_bytes = 0

    def __len__(self) -> int:
        return self.num_reads + self.num_deletes + self.num_writes

    def has_ready(self, *, others_allowed: bool) -> bool:
        """Whether `take` would return a move."""
        return bool(self._reads or (others_allowed and (self._deletes or self._writes)))

    def add(self, move: Move) -> None:
        """Queue `move` behind the earlier moves of its key."""
        self._count(move, 1)
        before = self._last.get(move.key)
        self._last[move.key] = move
        if before is None:
            self._ready[move.op][move.ticket] = move
        else:
            before.after = move
            move.before = before

    def take(self, *, others_allowed: bool) -> Move | None:
        """The next move to start, if any; its key stays occupied until `leave`.

        Args:
            others_allowed: Writes and deletes may start too, not only reads.
        """
        others = others_allowed and bool(self._deletes or self._writes)
        if self._reads and not (others and self._reads_in_a_row >= self._max_in_a_row):
            self._reads_in_a_row = self._reads_in_a_row + 1 if others else 0
            ready = self._reads
        elif others:
            self._reads_in_a_row = 0
            ready = self._next_other()
        else:
            return None
        _, move = ready.popitem(last=False)
        self._count(move, -1)
        return move

    def remove(self, move: Move) -> None:
        """Take out a queued move that shall not start."""
        if move.before is None:
            del self._ready[move.op][move.ticket]
        self._count(move, -1)
        self.leave(move)

    def leave(self, move: Move) -> None:
        """`move` has let go of its key: the next of that key may start."""
        before, after = move.before, move.after
        move.before = move.after = None
        if after is not None:
            after.before = before
            if before is None:
                self._ready[after.op][after.ticket] = after
        elif before is not None:
            self._last[move.key] = before
        else:
            del self._last[move.key]
        if before is not None:
            before.after = after

    def _next_other(self) -> OrderedDict[int, Move]:
        if self._deletes and not (self._writes and self._deletes_in_a_row >= self._max_in_a_row):
            self._deletes_in_a_row = self._deletes_in_a_row + 1 if self._writes else 0
            return self._deletes
        self._deletes_in_a_row = 0
        return self._writes

    def _count(self, move: Move, step: int) -> None:
        if move.op is Op.READ:
            self.num_reads += step
        elif move.op is Op.WRITE:
            self.num_writes += step
            self.write_bytes += step * move.num_bytes
        else:
            self.num_deletes += step
