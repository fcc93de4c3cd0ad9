"""The moves that wait for a mover thread: in which order they may start."""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum

from undercroft.hierarchy.outcome import Op
from undercroft.keys import ChunkKey

__all__ = ["Move", "MoveQueue", "MoveState", "Work"]


class MoveState(Enum):
    """QUEUED -> RUNNING -> ENDED, or RUNNING -> ABANDONED (deadline passed; a thread is in it)."""

    QUEUED = 0
    RUNNING = 1
    ABANDONED = 2
    ENDED = 3


_QUEUED = MoveState.QUEUED
_READ, _WRITE = Op.READ, Op.WRITE


class Move:
    """One transfer in flight; lives from submission until its thread has let go of it."""

    __slots__ = (
        "after",
        "before",
        "buffer",
        "deadline_s",
        "epoch",
        "key",
        "num_bytes",
        "op",
        "permit",
        "state",
        "submitted_s",
        "ticket",
        "work",
    )

    def __init__(
        self, op: Op, key: ChunkKey, buffer: memoryview | None, num_bytes: int, deadline_s: float
    ) -> None:
        self.op = op
        self.key = key
        self.buffer = buffer
        self.num_bytes = num_bytes
        self.deadline_s = deadline_s
        self.epoch: int | None = None
        """What a write is for; None: any."""
        self.state = _QUEUED
        self.ticket = 0
        self.submitted_s = 0.0
        self.permit = 0
        self.before: Move | None = None
        self.after: Move | None = None
        self.work: Work | None = None
        """Of a running move."""


class Work:
    """Moves of one kind that a thread is in at once; lives until the thread is out of them all."""

    __slots__ = ("is_stuck", "moves", "num_moved", "op", "started_s")

    def __init__(self, op: Op, moves: list[Move], started_s: float) -> None:
        self.op = op
        self.moves = moves
        self.started_s = started_s
        self.num_moved = 0
        """Bytes, so far."""
        self.is_stuck = False
        """One of them was abandoned while the thread was in it."""


class _Lane:
    """The moves of one kind: those that may start, and how many came in and went out.

    `num_in` is the submitting thread's, `num_out` the lock's, so that neither needs the other.
    """

    __slots__ = ("num_bytes_in", "num_bytes_out", "num_in", "num_out", "ready")

    def __init__(self) -> None:
        self.ready: OrderedDict[int, Move] = OrderedDict()
        self.num_in = 0
        self.num_out = 0
        self.num_bytes_in = 0
        self.num_bytes_out = 0


class MoveQueue:
    """Reads first, then deletes (they make room), then writes; moves of one key in order.

    A move whose key has an earlier move that has not let go waits behind it. Precedence has a
    bound: after `max_in_a_row` reads (deletes) in a row, one of those that waited goes.

    Threads: `add` and the counts are for the one submitting thread and need no lock, so that it
    never waits for one; the caller serialises the rest. Cost: O(1) per call, amortised.
    """

    def __init__(self, *, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._inbox: deque[Move] = deque()
        self._reads, self._deletes, self._writes = _Lane(), _Lane(), _Lane()
        self._last: dict[ChunkKey, Move] = {}
        self._reads_in_a_row = 0
        self._deletes_in_a_row = 0

    def __len__(self) -> int:
        return self.num_reads + self.num_deletes + self.num_writes

    @property
    def num_reads(self) -> int:
        """Reads that have not started."""
        return self._reads.num_in - self._reads.num_out

    @property
    def num_deletes(self) -> int:
        """Deletes that have not started."""
        return self._deletes.num_in - self._deletes.num_out

    @property
    def num_writes(self) -> int:
        """Writes that have not started."""
        return self._writes.num_in - self._writes.num_out

    @property
    def read_bytes(self) -> int:
        """Bytes of the reads that have not started."""
        return self._reads.num_bytes_in - self._reads.num_bytes_out

    @property
    def write_bytes(self) -> int:
        """Bytes of the writes that have not started."""
        return self._writes.num_bytes_in - self._writes.num_bytes_out

    @property
    def has_new(self) -> bool:
        """Something was added that no locked call has looked at yet."""
        return bool(self._inbox)

    def add(self, move: Move) -> None:
        """Queue `move` behind the earlier moves of its key. No lock needed."""
        lane = self._lane(move)
        lane.num_in += 1
        lane.num_bytes_in += move.num_bytes
        self._inbox.append(move)

    def has_ready(self, *, others_allowed: bool) -> bool:
        """Whether `take` would return a move."""
        self._look()
        return bool(
            self._reads.ready or (others_allowed and (self._deletes.ready or self._writes.ready))
        )

    def take(self, *, others_allowed: bool) -> Move | None:
        """The next move to start, if any; its key stays occupied until `leave`.

        Args:
            others_allowed: Writes and deletes may start too, not only reads.
        """
        self._look()
        others = others_allowed and bool(self._deletes.ready or self._writes.ready)
        if self._reads.ready and not (others and self._reads_in_a_row >= self._max_in_a_row):
            self._reads_in_a_row = self._reads_in_a_row + 1 if others else 0
            lane = self._reads
        elif others:
            self._reads_in_a_row = 0
            lane = self._next_other()
        else:
            return None
        return self._pop(lane)

    def take_like(self, first: Move, *, most: int, max_bytes: int) -> list[Move]:
        """More moves of the kind of `first`, which was just taken, to be started with it.

        Args:
            first: What they are like.
            most: How many.
            max_bytes: Bound on the bytes of all, `first` included.
        """
        lane = self._lane(first)
        num_more = min(len(lane.ready), most)
        left_bytes = max_bytes - first.num_bytes
        taken: list[Move] = []
        while len(taken) < num_more:
            left_bytes -= next(iter(lane.ready.values())).num_bytes
            if left_bytes < 0:
                break
            taken.append(self._pop(lane))
        return taken

    def _pop(self, lane: _Lane) -> Move:
        _, move = lane.ready.popitem(last=False)
        lane.num_out += 1
        lane.num_bytes_out += move.num_bytes
        return move

    def remove(self, move: Move) -> None:
        """Take out a queued move that shall not start."""
        self._look()
        lane = self._lane(move)
        if move.before is None:
            del lane.ready[move.ticket]
        lane.num_out += 1
        lane.num_bytes_out += move.num_bytes
        self.leave(move)

    def leave(self, move: Move) -> None:
        """`move` has let go of its key: the next of that key may start."""
        before, after = move.before, move.after
        move.before = move.after = None
        if after is not None:
            after.before = before
            if before is None:
                self._lane(after).ready[after.ticket] = after
        elif before is not None:
            self._last[move.key] = before
        else:
            del self._last[move.key]
        if before is not None:
            before.after = after

    def _look(self) -> None:
        """Sort in what was added."""
        inbox, last = self._inbox, self._last
        while inbox:
            move = inbox.popleft()
            before = last.get(move.key)
            last[move.key] = move
            if before is None:
                self._lane(move).ready[move.ticket] = move
            else:
                before.after = move
                move.before = before

    def _next_other(self) -> _Lane:
        deletes, writes = self._deletes, self._writes
        if deletes.ready and not (writes.ready and self._deletes_in_a_row >= self._max_in_a_row):
            self._deletes_in_a_row = self._deletes_in_a_row + 1 if writes.ready else 0
            return deletes
        self._deletes_in_a_row = 0
        return writes

    def _lane(self, move: Move) -> _Lane:
        op = move.op
        return self._reads if op is _READ else self._writes if op is _WRITE else self._deletes
