"""The movers between level 0 and one lower tier: threads, deadlines, retries and breaker.

The scheduler thread submits and polls and never waits; mover threads call the tier's blocking
verbs, one key at a time. Whatever the tier does, every ticket ends exactly once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from undercroft.clock import Clock
from undercroft.errors import (
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    KvError,
    TierFull,
)
from undercroft.hierarchy.attempts import Attempts, Ended
from undercroft.hierarchy.bounds import TransferLimits
from undercroft.hierarchy.breaker import Breaker
from undercroft.hierarchy.crew import Crew
from undercroft.hierarchy.moves import Move, MoveQueue, MoveState, Work
from undercroft.hierarchy.outcome import Done, Op, Outcome, StandingErrors
from undercroft.hierarchy.speed import Speeds
from undercroft.keys import ChunkKey
from undercroft.tiers.base import Tier

__all__ = ["TransferLimits", "Transfers"]

_LOG = logging.getLogger(__name__)

_READ, _WRITE, _DELETE = Op.READ, Op.WRITE, Op.DELETE
_QUEUED, _RUNNING = MoveState.QUEUED, MoveState.RUNNING
_ABANDONED, _ENDED = MoveState.ABANDONED, MoveState.ENDED
_ANSWERS = (CorruptChunk, FormatTooNew, TierFull)
_STALE_DEADLINES = 1024
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 2.0, 10.0


class Transfers:
    """Moves chunks between buffers of level 0 and one tier.

    Order: reads before deletes before writes, with bounded starvation; one thread is kept free
    for reads when there are several; moves of one key run in the order of submission. Errors: a
    retryable one is retried within the deadline; a foreign exception is `TierUnavailable`.

    Args:
        tier: Where the chunks are; closed by `close`.
        clock: Source of `deadline_s` and of all pauses.
        max_queued_write_bytes: Bound on the bytes of writes that have not started.
        num_threads: Mover threads, started at the first use.
        retries: Further tries after a retryable error.
        limits: The other bounds.

    Raises:
        ConfigError: A bound makes no sense.

    Threads: every method is for the scheduler thread; none but `drain` and `close` waits.
    Submitting and polling take no lock, unless a deadline has passed or a thread is missing.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        clock: Clock,
        max_queued_write_bytes: int,
        num_threads: int = 4,
        retries: int = 1,
        limits: TransferLimits | None = None,
    ) -> None:
        limits = limits or TransferLimits()
        for name, value, least in (
            ("max_queued_write_bytes", max_queued_write_bytes, 1),
            ("num_threads", num_threads, 1),
            ("retries", retries, 0),
            ("max_in_a_row", limits.max_in_a_row, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}: give at least {least}", tier=tier.name)
        extra = limits.num_extra_threads
        self._tier = tier
        self._clock = clock
        self._errors = StandingErrors(tier.name)
        self._limits = limits
        self._max_queued_write_bytes = max_queued_write_bytes
        self._breaker = Breaker(
            failures_to_open=limits.failures_to_open,
            first_pause_s=limits.first_pause_s,
            max_pause_s=limits.max_pause_s,
        )
        self._queue = MoveQueue(max_in_a_row=limits.max_in_a_row)
        self._lock = threading.Lock()
        self._attempts = Attempts(
            tier,
            clock=clock,
            retries=retries,
            pause_s=limits.retry_pause_s,
            give_up=lambda: self._crew.closed,
        )
        self._crew = Crew(
            self._queue,
            self._lock,
            runner=self,
            name=f"undercroft-{tier.name}",
            num_threads=num_threads,
            num_most=num_threads + (num_threads if extra is None else extra),
            batch_bytes=self._attempts.batch_bytes,
        )
        self._moves: dict[int, Move] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._done: deque[Done] = deque()
        self._released: list[int] = []
        self._next_ticket = 1
        self.num_threads = num_threads
        self._num_running = 0
        self._hope_ends_s = float("-inf")
        self.speeds = Speeds()
        self._closer: threading.Thread | None = None
        self._tier_closed = False
        self.num_late = 0

    # --- submitting ---------------------------------------------------------------------------

    def read(self, key: ChunkKey, out: memoryview, deadline_s: float) -> int:
        """Fill `out` with the chunk by `deadline_s` (absolute). Returns the ticket."""
        return self._submit(Move(_READ, key, out, out.nbytes, deadline_s))

    def write(
        self, key: ChunkKey, data: memoryview, deadline_s: float, epoch: int | None = None
    ) -> int | None:
        """Store `data` by `deadline_s` (absolute), if given, for `epoch` or not at all.

        Returns:
            The ticket; None if the queue is full: drop the chunk and count it.
        """
        move = Move(_WRITE, key, data, data.nbytes, deadline_s)
        move.epoch = epoch
        if self._queue.write_bytes + move.num_bytes > self._max_queued_write_bytes:
            return None
        return self._submit(move)

    def delete(self, key: ChunkKey) -> int:
        """Make the tier forget the chunk, after the earlier moves of its key."""
        deadline_s = self._clock.now_s() + self._limits.delete_timeout_s
        return self._submit(Move(_DELETE, key, None, 0, deadline_s))

    def _submit(self, move: Move) -> int:
        now_s = self._clock.now_s()
        move.ticket = ticket = self._next_ticket
        move.submitted_s = now_s
        self._next_ticket += 1
        if self._crew.closed:
            self._report(move, self._errors.closed, now_s)
        elif not self._crew.can_serve or not self._breaker.available(now_s):
            self._report(move, self._errors.left_alone, now_s)
        else:
            self._moves[ticket] = move
            self._note_deadline(move)
            self._queue.add(move)  # from here on a mover may have it
            if self._crew.wake(move.op):
                self._hope_for(move, now_s)
        return ticket

    def _note_deadline(self, move: Move) -> None:
        heap, moves = self._deadlines, self._moves  # the heap belongs to this thread alone
        heappush(heap, (move.deadline_s, move.ticket))
        if len(heap) > 2 * len(moves) + _STALE_DEADLINES:
            heap[:] = [entry for entry in heap if entry[1] in moves]
            heapify(heap)

    # --- polling ------------------------------------------------------------------------------

    def poll(self, max_outcomes: int = 1024) -> list[Done]:
        """What ended since the last call, at most `max_outcomes`, deadlines included.

        A move that is queued at its deadline is cancelled. A running one ends with `TierTimeout`
        and `buffer_free=False`; what becomes of it later is swallowed.

        Cost: O(reports), amortised.
        """
        now_s = self._clock.now_s()
        due = bool(self._deadlines) and self._deadlines[0][0] <= now_s
        if not (self._done or due or self._crew.needs_care):
            return []
        out: list[Done] = []
        if due or self._crew.needs_care:
            self._care(out, now_s, max_outcomes)
        done = self._done  # only this thread takes from it: no lock
        while done and len(out) < max_outcomes:
            out.append(done.popleft())
        return out

    def take_released(self) -> list[int]:
        """Tickets reported with `buffer_free=False` whose thread has come back since."""
        if not self._released:
            return []
        with self._lock:
            released, self._released = self._released, []
        return released

    def _care(self, out: list[Done], now_s: float, max_outcomes: int) -> None:
        with self._lock:
            self._expire(out, now_s, max_outcomes)
            start_one = self._crew.care()
            if not self._crew.can_serve:
                self._end_queued(self._errors.left_alone, max_outcomes, now_s)
        if start_one:
            self._hope_ends_s = max(self._hope_ends_s, now_s + _LEAST_PATIENCE_S)
            self._crew.start_one()

    def _expire(self, out: list[Done], now_s: float, max_outcomes: int) -> None:
        heap, moves = self._deadlines, self._moves
        while heap and heap[0][0] <= now_s and len(out) < max_outcomes:
            _, ticket = heappop(heap)
            move = moves.pop(ticket, None)
            if move is None:
                continue
            if move.state is _QUEUED:
                self._queue.remove(move)
                move.state, move.buffer = _ENDED, None
                out.append(self._ended(move, self._errors.not_started, now_s))
            else:
                out.append(
                    self._ended(
                        move,
                        self._errors.still_running,
                        now_s,
                        buffer_free=move.buffer is None,
                    )
                )
                self._abandon(move, now_s)

    def _abandon(self, move: Move, now_s: float) -> None:
        move.state = _ABANDONED
        if move.work is not None:
            self.speeds.overdue(move.op, now_s - move.work.started_s, move.num_bytes)
            self._crew.on_stuck(move.work)
        self._breaker.on_failure(move.permit, now_s)

    # --- state --------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether a move submitted now would be tried: breaker closed, or a probe is due."""
        crew = self._crew
        return crew.can_serve and not crew.closed and self._breaker.available(self._clock.now_s())

    @property
    def breaker(self) -> Breaker:
        """The circuit breaker, to be read only."""
        return self._breaker

    @property
    def has_news(self) -> bool:
        """Whether `poll` or `take_released` has something to tell, or should have before long.

        False while all that is under way is in, or behind, calls that are long overdue: it may
        end, but nobody knows when, and it is not worth asking again and again.
        """
        if self._done or self._released:
            return True
        if not self._moves:
            return False
        now_s = self._clock.now_s()
        return now_s < self._hope_ends_s or self._deadlines[0][0] <= now_s

    def _hope_for(self, move: Move, now_s: float) -> None:
        """A thread turns to `move`: until when its end is worth waiting for."""
        patience_s = 4 * move.num_bytes * (self.speeds.average(move.op) or 0.0)
        patience_s = min(max(patience_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
        self._hope_ends_s = max(self._hope_ends_s, now_s + patience_s)

    @property
    def num_queued_reads(self) -> int:
        """Reads that have not started."""
        return self._queue.num_reads

    @property
    def queued_read_bytes(self) -> int:
        """Bytes of the reads that have not started."""
        return self._queue.read_bytes

    @property
    def num_queued_writes(self) -> int:
        """Writes that have not started."""
        return self._queue.num_writes

    @property
    def queued_write_bytes(self) -> int:
        """Bytes of the writes that have not started."""
        return self._queue.write_bytes

    @property
    def max_queued_write_bytes(self) -> int:
        """The bound on `queued_write_bytes`."""
        return self._max_queued_write_bytes

    @property
    def num_running(self) -> int:
        """Moves that a thread is in, those past their deadline included."""
        return self._num_running

    @property
    def num_stuck(self) -> int:
        """Threads that are still in a move past its deadline."""
        return self._crew.num_stuck

    @property
    def num_bugs(self) -> int:
        """Times that the tier broke an invariant of ours; each ended as a failed move."""
        return self._attempts.num_bugs

    @property
    def num_retries(self) -> int:
        """Tries beyond the first."""
        return self._attempts.num_retries

    # --- ending -------------------------------------------------------------------------------

    def cancel_queued(self) -> None:
        """End every move that has not started, with `TierUnavailable`. O(queued)."""
        with self._lock:
            self._end_queued(self._errors.cancelled, len(self._moves), self._clock.now_s())

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is queued or runs; False if something still does at `deadline_s`.

        Ends nothing: call `cancel_queued` before, for a reset. Waits.
        """
        with self._lock:
            return self._crew.wait(
                lambda: not (self._queue or self._num_running), deadline_s, self._clock
            )

    def close(self, deadline_s: float) -> bool:
        """End what is queued, wait for what runs, close the tier; back by `deadline_s`.

        Twice is fine. `poll` and `take_released` go on working. Waits.

        Returns:
            False if a thread is still in the tier: buffers not released are not safe to reuse.
        """
        clock, crew = self._clock, self._crew
        now_s = clock.now_s()
        with self._lock:
            threads = list(crew.threads)
            crew.close()
            self._end_queued(self._errors.closed, len(self._moves), now_s)
            crew.wait(lambda: not crew.num_threads, now_s + (deadline_s - now_s) / 2, clock)
        if self._closer is None:
            name = f"undercroft-{self._tier.name}-close"
            closer = threading.Thread(target=self._close_tier, name=name, daemon=True)
            try:
                closer.start()
            except RuntimeError as exc:  # no more threads, and here it might never end
                _LOG.warning("tier %r failed to close: %r", self._tier.name, exc)
                return False
            self._closer = closer
        with self._lock:
            ended = crew.wait(lambda: self._tier_closed and not crew.num_threads, deadline_s, clock)
            gone = [each for each in threads if each.ident and each not in crew.threads]
        if self._tier_closed:
            gone.append(self._closer)
        for thread in gone:
            thread.join(timeout=1.0)
        return ended

    def _close_tier(self) -> None:
        try:
            self._tier.close()
        except Exception as exc:  # noqa: BLE001 - whatever a tier raises, we are done with it
            _LOG.warning("tier %r failed to close: %r", self._tier.name, exc)
        finally:
            with self._lock:
                self._tier_closed = True
                self._crew.tell()

    def _end_queued(self, error: KvError, max_outcomes: int, now_s: float) -> None:
        queued = (move for move in self._moves.values() if move.state is _QUEUED)
        for move in list(islice(queued, max_outcomes)):
            self._queue.remove(move)
            del self._moves[move.ticket]
            self._report(move, error, now_s)

    def _report(
        self, move: Move, error: KvError | None, now_s: float, *, moved: bool = False
    ) -> None:
        """The move has ended and nobody is in its buffer. Locked, if a mover may know it."""
        move.state = _ENDED
        move.buffer = None
        self._done.append(self._ended(move, error, now_s, moved=moved))

    def _ended(
        self,
        move: Move,
        error: KvError | None,
        now_s: float,
        *,
        moved: bool = False,
        buffer_free: bool = True,
    ) -> Done:
        num_bytes = move.num_bytes if moved else 0
        found = moved and move.op is _READ
        outcome = Outcome(move.key, error, num_bytes, now_s - move.submitted_s, found)
        return Done(move.ticket, move.op, outcome, buffer_free)

    # --- on the mover threads -----------------------------------------------------------------

    def begin(self, moves: list[Move]) -> Work | None:
        """See `Runner.begin`."""
        now_s = self._clock.now_s()
        work = Work(moves[0].op, [move for move in moves if self._begin(move, now_s)], now_s)
        for move in work.moves:
            move.work = work
        if len(work.moves) < len(moves):
            self._crew.tell()
        return work if work.moves else None

    def _begin(self, move: Move, now_s: float) -> bool:
        error: KvError | None = None
        if now_s >= move.deadline_s:
            error = self._errors.not_started
        else:
            permit = self._breaker.admit(now_s)
            if permit is not None:
                move.state = _RUNNING
                move.permit = permit
                self._num_running += 1
                self._hope_for(move, now_s)
                return True
            error = self._errors.left_alone
        self._queue.leave(move)
        del self._moves[move.ticket]
        self._report(move, error, now_s)
        return False

    def serve(self, work: Work) -> None:
        """See `Runner.serve`."""
        attempts, left = self._attempts, dict.fromkeys(work.moves)
        again: list[tuple[Move, KvError | None]] = []
        try:
            for ends in attempts.perform(work.moves):
                over: list[Ended] = []
                for move, error, moved in ends:
                    if attempts.may_go_on(error, move):
                        again.append((move, error))
                    else:
                        over.append((move, error, moved))
                self._finish(work, left, over)
            for move, error in again:
                self._finish(work, left, [(move, *attempts.go_on(error, move))])
        except BaseException as exc:  # the thread dies of it, and says so; the tickets still end
            self._finish(work, left, [attempts.lost(move, exc) for move in left])
            raise

    def _finish(self, work: Work, left: dict[Move, None], ends: Sequence[Ended]) -> None:
        """These moves of `work` are over, and with the last of `left` all of it."""
        if not ends:
            return
        now_s = self._clock.now_s()
        num_moved = sum(move.num_bytes for move, error, moved in ends if moved and error is None)
        with self._lock:
            for move, error, moved in ends:
                del left[move]
                self._num_running -= 1
                self._queue.leave(move)
                self._end(move, error, now_s, moved=moved)
            work.num_moved += num_moved
            if not left:
                if work.num_moved:
                    self.speeds.served(work.op, now_s - work.started_s, work.num_moved)
                self._crew.on_end(work)
            else:
                self._crew.tell()

    def _end(self, move: Move, error: KvError | None, now_s: float, *, moved: bool) -> None:
        move.work = None
        if move.state is _ABANDONED:
            self.num_late += 1
            if move.buffer is not None:
                self._released.append(move.ticket)
            move.buffer = None
            return
        del self._moves[move.ticket]
        if error is None:
            self._breaker.on_success(move.permit)
        elif isinstance(error, _ANSWERS):
            self._breaker.on_answer(move.permit)
        else:
            self._breaker.on_failure(move.permit, now_s)
        self._report(move, error, now_s, moved=moved)
