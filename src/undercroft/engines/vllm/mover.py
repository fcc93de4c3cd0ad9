"""The thread that does a worker's copies, and the order in which it does them.

Jobs run in the order of submission, except that a job of a higher rank goes before jobs of a lower
rank, and interrupts a running one between two steps, if it shares neither a block nor a slot with
any job that was there before it and has not ended. Ranks: what the engine waits for, then loads,
then stores. Jobs that do share something are never reordered. So a store has read its blocks before
a later load overwrites them, a load sees what earlier stores to its slots wrote, and a later store
never touches a slot that a load still reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from undercroft.clock import Clock
from undercroft.engines.jobs import Job
from undercroft.errors import Bug, KvError

__all__ = ["Mover"]

_LOG = logging.getLogger(__name__)


class Mover:
    """Runs jobs on one thread of its own, started here.

    Threads: `submit`, `wait`, `take_finished` and `close` may be called from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # All three under `_changed`; `_running` is a stack, the interrupted jobs below.
        self._waiting: list[Job[int]] = []
        self._running: list[Job[int]] = []
        self._finished: list[Job[int]] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name="undercroft-mover", daemon=True)
        self._thread.start()

    def submit(self, job: Job[int]) -> None:
        """Put the job into the queue; never waits for a copy.

        Raises:
            Bug: The mover was closed, or has broken down.
        """
        with self._changed:
            if self._is_stopping:
                raise Bug(f"job {job.job_id} came after the mover had stopped")
            self._waiting.append(job)
            self._changed.notify_all()

    def take_finished(self) -> list[Job[int]]:
        """The jobs that ended since the last call, each exactly once."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def give_back(self, jobs: list[Job[int]]) -> None:
        """Let the next `take_finished` return these again, first."""
        with self._changed:
            self._finished[:0] = jobs

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is waiting or running; unknown ids are fine."""
        with self._changed:
            for job in (*self._running, *self._waiting):
                job.is_urgent = job.is_urgent or job.job_id in job_ids
            while any(job.job_id in job_ids for job in (*self._running, *self._waiting)):
                self._changed.wait()

    def close(self, timeout_s: float) -> bool:
        """Stop after the step under way; stores that have not ended fail, loads are forgotten.

        Returns:
            False if the step under way did not end in time. Twice is fine.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._run(job)
            reason: Exception = KvError("the worker shut down")
        except Exception as error:  # noqa: BLE001 - waiters must not wait for a dead thread
            _LOG.exception("the mover has broken down")
            reason = error
        with self._changed:
            broke_down, self._is_stopping = not self._is_stopping, True
            for job in (*self._running, *self._waiting):
                if job.is_store or broke_down:
                    job.error = reason
                    job.on_failure(reason)
                    self._finished.append(job)
            self._running, self._waiting = [], []
            self._changed.notify_all()

    def _next(self) -> Job[int] | None:
        """Wait for the job to run next; None when stopping."""
        with self._changed:
            while not self._is_stopping:
                job = self._take()
                if job is not None:
                    return job
                self._changed.wait()
        return None

    def _take(self) -> Job[int] | None:
        """Start the first waiting job of the lowest rank that may go now; under the lock."""
        best: int | None = None
        limit = self._running[-1].rank if self._running else None
        for index, job in enumerate(self._waiting):
            if limit is not None and job.rank >= limit:
                continue
            before = (*self._running, *self._waiting[:index])
            if not any(job.touches(other) for other in before):
                best, limit = index, job.rank
        if best is None:
            return None
        job = self._waiting.pop(best)
        self._running.append(job)
        return job

    def _run(self, job: Job[int]) -> None:
        """Run a job and those that interrupt it; when stopping, leave it among the running."""
        begun_s = self._clock.now_s()
        away_s = 0.0
        try:
            for num_bytes in job.steps():
                job.num_bytes += num_bytes
                if self._waiting:
                    left_s = self._clock.now_s()
                    self._run_interrupting()
                    away_s += self._clock.now_s() - left_s
                if self._is_stopping:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is: one job is lost, not the engine
            job.error = error
            job.on_failure(error)
        job.seconds = self._clock.now_s() - begun_s - away_s
        with self._changed:
            self._running.remove(job)
            self._finished.append(job)
            self._changed.notify_all()

    def _run_interrupting(self) -> None:
        while not self._is_stopping:
            with self._changed:
                job = self._take()
            if job is None:
                return
            self._run(job)
