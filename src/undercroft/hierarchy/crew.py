"""The mover threads of one tier: started late, replaced when they hang, never awaited for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from undercroft.clock import Clock
from undercroft.hierarchy.moves import Move, MoveQueue, Work
from undercroft.hierarchy.outcome import Op

__all__ = ["Crew", "Runner"]

_READ = Op.READ
_MOST_AT_ONCE = 64
"""Moves of a call, however small: their ends are booked under the lock."""
_LOOK_AGAIN_S = 0.05
"""Longest real wait before a manual clock is asked again."""


class Runner(Protocol):
    """What a mover thread does with moves."""

    def begin(self, moves: list[Move]) -> Work | None:
        """Locked. `moves`, of one kind, were just taken; None: they have ended instead."""
        ...

    def serve(self, work: Work) -> None:
        """Not locked; blocks. Run the moves, then tell `Crew.on_end`, locked."""
        ...


class Crew:
    """Threads that take moves from a queue and serve them.

    A thread whose move was abandoned is *stuck*: it no longer counts as working and is replaced,
    as long as there are fewer than `num_most`. When it comes back and is one too many, it leaves.

    Args:
        queue: Where moves come from; guarded by `lock`.
        lock: Guards the queue and everything here.
        runner: What is done with a move.
        name: What the threads' names begin with.
        num_threads: Threads that work.
        num_most: Bound on the threads there are, stuck ones included.
        batch_bytes: How much of one kind a thread takes at once; 0: one move.

    Threads: methods marked "locked" are called with `lock` held.
    """

    def __init__(  # noqa: PLR0913 - one bound each
        self,
        queue: MoveQueue,
        lock: threading.Lock,
        *,
        runner: Runner,
        name: str,
        num_threads: int,
        num_most: int,
        batch_bytes: int = 0,
    ) -> None:
        self._queue = queue
        self._lock = lock
        self._runner = runner
        self._name = name
        self._num_wanted = num_threads
        self._num_most = num_most
        self._batch_bytes = batch_bytes
        self._settled = threading.Condition(lock)
        self._num_waiters = 0
        self._idle: list[threading.Lock] = []  # a thread sleeps until somebody releases its lock
        self._num_others = 0  # writes and deletes running, stuck ones not counted
        self._num_started = 0
        self.threads: set[threading.Thread] = set()
        self.num_threads = 0  # alive or about to start
        self.num_stuck = 0
        self.closed = False

    @property
    def can_serve(self) -> bool:
        """Some thread works, or one may still be started."""
        return self.num_threads > self.num_stuck or self.num_threads < self._num_most

    @property
    def needs_care(self) -> bool:
        """Threads are missing: `care` may have something to do, or nothing can be served."""
        return self._num_started > 0 and (
            not self.can_serve or self.num_threads - self.num_stuck < self._num_wanted
        )

    def wake(self, op: Op) -> bool:
        """A move of that kind was added: let a thread look. Not locked, and seldom locks.

        Returns:
            Whether a thread will; False: all that could are busy, and will look in the end.
        """
        if self._idle:
            free = op is _READ or self._others_allowed()
            if free:
                self._rouse()
            return free
        if self.num_threads > self.num_stuck:
            return False
        with self._lock:
            start_one = self._reserve()
        if start_one:
            self.start_one()
        return start_one

    def care(self) -> bool:
        """Locked. Replace missing threads; True: the caller then calls `start_one`."""
        return self.needs_care and self._reserve()

    def start_one(self) -> None:
        """Start the thread that was reserved. Not locked."""
        with self._lock:
            self._num_started += 1
            name = f"{self._name}-{self._num_started}"
            thread = threading.Thread(target=self._main, name=name, daemon=True)
            self.threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no more threads: what is queued ends at its deadline
            with self._lock:
                self._gone(thread)

    def on_stuck(self, work: Work) -> None:
        """Locked. A move of `work` was abandoned; the thread is still in it."""
        if work.is_stuck:
            return
        work.is_stuck = True
        self.num_stuck += 1
        if work.op is not _READ:
            self._num_others -= 1
        self._nudge()

    def on_end(self, work: Work) -> None:
        """Locked. The thread of `work` is out of the tier."""
        if work.is_stuck:
            self.num_stuck -= 1
        elif work.op is not _READ:
            self._num_others -= 1
        self.tell()

    def close(self) -> None:
        """Locked. Threads leave as soon as they are out of the tier."""
        self.closed = True
        while self._idle:
            self._rouse()

    def wait(self, ready: Callable[[], bool], deadline_s: float, clock: Clock) -> bool:
        """Locked. Wait until `ready()`, asked after each `tell`; False at `deadline_s`."""
        self._num_waiters += 1
        try:
            while not ready():
                left_s = deadline_s - clock.now_s()
                if left_s <= 0:
                    return False
                self._settled.wait(min(left_s, _LOOK_AGAIN_S))
            return True
        finally:
            self._num_waiters -= 1

    def tell(self) -> None:
        """Locked. Something changed that a waiter may wait for."""
        if self._num_waiters:
            self._settled.notify_all()

    # --- the threads --------------------------------------------------------------------------

    def _main(self) -> None:
        bell = threading.Lock()
        bell.acquire()
        try:
            self._start_others()
            while (work := self._take(bell)) is not None:
                self._runner.serve(work)
        finally:
            with self._lock:
                self._gone(threading.current_thread())
                self._nudge()

    def _start_others(self) -> None:
        """Starting a thread takes a while: the first one does it, not the scheduler thread."""
        while True:
            with self._lock:
                more = self._reserve()
            if not more:
                return
            self.start_one()

    def _take(self, bell: threading.Lock) -> Work | None:
        while True:  # one round per hold of the lock, so that nobody waits for a long refusal
            with self._lock:
                if self.closed or self.num_threads - self.num_stuck > self._num_wanted:
                    return None
                move = self._queue.take(others_allowed=self._others_allowed())
                if move is not None:
                    work = self._runner.begin(self._with_more(move))
                    if work is None:
                        continue
                    if work.op is not _READ:
                        self._num_others += 1
                    self._nudge()
                    return work
                self._idle.append(bell)
                if self._queue.has_new:  # added after `take` looked and before we could be seen
                    self._rouse()
            bell.acquire()

    def _with_more(self, move: Move) -> list[Move]:
        if not self._batch_bytes:
            return [move]
        most, max_bytes = _MOST_AT_ONCE - 1, self._batch_bytes
        return [move, *self._queue.take_like(move, most=most, max_bytes=max_bytes)]

    def _others_allowed(self) -> bool:
        """Writes and deletes leave one thread to the reads, if there are several."""
        num_usable = min(self._num_wanted, self._num_most - self.num_stuck)
        return self._num_others < max(1, num_usable - 1)

    def _nudge(self) -> None:
        """Locked. A thread is about to be busy or away: is there work for another?"""
        if self._idle and self._queue.has_ready(others_allowed=self._others_allowed()):
            self._rouse()

    def _rouse(self) -> None:
        try:
            bell = self._idle.pop()
        except IndexError:  # somebody else was quicker
            return
        bell.release()

    def _reserve(self) -> bool:
        if (
            self.closed
            or self.num_threads - self.num_stuck >= self._num_wanted
            or self.num_threads >= self._num_most
        ):
            return False
        self.num_threads += 1
        return True

    def _gone(self, thread: threading.Thread) -> None:
        self.threads.discard(thread)
        self.num_threads -= 1
        self.tell()
