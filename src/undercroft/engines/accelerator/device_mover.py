"""The copies of a worker on an accelerator, and the order between them.

Two streams, one for each direction, so that both run at full speed at once. Order:

- within a direction: as submitted;
- each job waits, on the device, for all that the engine had put into its current stream when the
  job was submitted. So a store finds its blocks computed, and a load comes after the zeroing of
  its blocks;
- a job waits, on the device, for earlier jobs of the other direction that share a block or a
  slot with it. So a store has read its blocks before a load overwrites them, a load sees what an
  earlier store wrote, and a store never touches a slot that a load still reads.

The engine's thread does it all: it puts work into streams and asks events whether they have
passed; only `wait` and `close` wait. A call puts in work for a few milliseconds at most, a long job
goes on in the next calls. Events and descriptors are used again once the device has passed them.

A partial store's unwritten pages are cleared by the host, between the end of its copies and its
report. No job that shares something with it begins before that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from undercroft.clock import Clock
from undercroft.engines.accelerator.descriptors import Copies
from undercroft.engines.accelerator.device import Descriptors, Device, Event, Stream
from undercroft.engines.jobs import Job
from undercroft.errors import Bug, KvError
from undercroft.log import SparingLog

__all__ = ["BATCH_COPIES", "GIVE_UP_S", "STUCK_S", "DeviceMover", "DeviceWork"]

BATCH_COPIES = 2048
"""Copies in one call of the device's operator."""

STUCK_S = 60.0
"""A device that has begun a job, and then ends none of its batches for so long, is given up."""

GIVE_UP_S = 600.0
"""So is one that has not even begun, its own work in front, for so long."""

_MAX_BATCHES = 32  # of a direction on the device at a time
_ENQUEUE_S = 0.004
_POLL_S = 0.0001
_MAX_SPARE_EVENTS = 256

_LOG = logging.getLogger(__name__)

DeviceWork: TypeAlias = Copies | Callable[[], None]
"""What a job's steps give: copies for the device, and what the host does once those have ended."""


@dataclass(slots=True)
class _Batch:
    """Copies that the device may be doing."""

    event: Event
    descriptors: Descriptors


@dataclass(eq=False, slots=True)
class _Flight:
    """A job that was submitted and has not ended."""

    job: Job[DeviceWork]
    lane: _Lane
    ready: Event
    """The engine's own work that came before."""
    earlier: list[_Flight]
    submitted_s: float
    work: Iterator[DeviceWork]
    is_begun: bool = False
    is_whole: bool = False
    """Everything has been put into the stream."""
    is_done: bool = False
    sources_are_quiet: bool = False
    begin: Event | None = None
    end: Event | None = None
    """Of the latest batch that has ended."""
    progress_s: float | None = None
    batches: deque[_Batch] = field(default_factory=deque)
    last_steps: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Lane:
    """One direction."""

    name: Literal["store", "load"]
    stream: Stream
    flights: deque[_Flight] = field(default_factory=deque)
    """Not ended, as submitted."""
    queue: deque[_Flight] = field(default_factory=deque)
    """The last of them: those not whole."""
    spare: list[Descriptors] = field(default_factory=list)
    """Room for as many batches as may still be put in."""


class DeviceMover:
    """Runs jobs on the two streams of its own; the contract is that of `mover.Mover`.

    Args:
        device: The accelerator.
        clock: Deadlines.
        region_address: Where the region begins in this process.

    Threads: the engine's thread only, the one whose current stream computes.
    """

    def __init__(self, device: Device, clock: Clock, *, region_address: int) -> None:
        self._device = device
        self._clock = clock
        self._region_address = region_address
        self._log = SparingLog(_LOG, clock)
        # Loads first: requests wait for them.
        self._loads = _Lane("load", device.new_stream())
        self._stores = _Lane("store", device.new_stream())
        self._lanes = (self._loads, self._stores)
        for lane in self._lanes:
            lane.spare += [device.new_descriptors(BATCH_COPIES) for _ in range(_MAX_BATCHES)]
        self._spare_events: list[Event] = []
        self._finished: list[Job[DeviceWork]] = []
        self._broken: Exception | None = None
        self._hung: KvError | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way or waiting."""
        return not (self._loads.flights or self._stores.flights)

    # --- the contract ---------------------------------------------------------------------------

    def submit(self, job: Job[DeviceWork]) -> None:
        """Take the job, and put it into its stream as far as a few milliseconds allow.

        Raises:
            Bug: The mover was closed.
        """
        if self._is_closed:
            raise Bug(f"job {job.job_id} came after the mover had stopped")
        if self._broken is not None:
            self._end_badly(job, self._broken)
            return
        lane = self._stores if job.is_store else self._loads
        try:
            ready = self._event()
            ready.record(self._device.current_stream())
            self._settle()
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            self._break(error)
            self._end_badly(job, error)
            return
        earlier = [
            flight for other in self._lanes for flight in other.flights if job.touches(flight.job)
        ]
        flight = _Flight(job, lane, ready, earlier, self._clock.now_s(), job.steps())
        lane.flights.append(flight)
        lane.queue.append(flight)
        self._enqueue(_ENQUEUE_S)

    def take_finished(self) -> list[Job[DeviceWork]]:
        """The jobs that ended since the last call, each exactly once; never waits.

        Raises:
            KvError: A copy hangs. The device may still write where it should, so nothing can be
                taken back.
        """
        self._advance(_ENQUEUE_S)
        finished, self._finished = self._finished, []
        return finished

    def give_back(self, jobs: list[Job[DeviceWork]]) -> None:
        """Let the next `take_finished` return these again, first."""
        self._finished[:0] = jobs

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is under way; unknown ids are fine.

        Raises:
            KvError: A copy hangs.
        """
        while True:
            self._advance(None)
            flights = (flight for lane in self._lanes for flight in lane.flights)
            if not any(flight.job.job_id in job_ids for flight in flights):
                return
            self._clock.sleep(_POLL_S)

    def close(self, timeout_s: float) -> bool:
        """Put nothing more into the streams, and wait until they are empty.

        Stores that were not whole by then fail, such loads are forgotten.

        Returns:
            False if a copy did not end in time. Twice is fine.
        """
        self._is_closed = True
        deadline_s = self._clock.now_s() + timeout_s
        for lane in self._lanes:
            for flight in lane.queue:
                flight.job.error = flight.job.error or KvError("the worker shut down")
                flight.is_whole = True
            lane.queue.clear()
        while self._broken is None:
            try:
                self._settle()
            except Exception as error:  # noqa: BLE001 - whatever the driver raises
                self._break(error)
            if self.is_idle or self._clock.now_s() >= deadline_s:
                break
            self._clock.sleep(_POLL_S)
        is_idle = self.is_idle and self._hung is None
        for flight in [flight for lane in self._lanes for flight in lane.flights]:
            self._end_badly(flight.job, KvError("the worker shut down"))
        for lane in self._lanes:
            lane.flights.clear()
            lane.spare.clear()
        self._spare_events.clear()
        self._finished = [job for job in self._finished if job.is_store or job.error is None]
        return is_idle

    # --- into the streams -----------------------------------------------------------------------

    def _advance(self, seconds: float | None) -> None:
        if self._hung is not None:
            raise self._hung
        if self._broken is None and not self.is_idle:
            try:
                self._settle()
            except Exception as error:  # noqa: BLE001 - whatever the driver raises
                self._break(error)
            self._enqueue(seconds)
        if self._hung is not None:
            raise self._hung

    def _enqueue(self, seconds: float | None) -> None:
        """Put work into the streams, in turns, until there is no more or time is up."""
        begun_s = self._clock.now_s()
        did_something = True
        while did_something and self._broken is None:
            did_something = False
            for lane in self._lanes:
                if not lane.queue:
                    continue
                try:
                    did_something |= self._put_next(lane)
                except Exception as error:  # noqa: BLE001 - whatever the driver raises
                    self._break(error)
                    return
            if seconds is not None and self._clock.now_s() - begun_s >= seconds:
                return

    def _put_next(self, lane: _Lane) -> bool:
        """Put one more batch of the first job into its stream; whether anything was done."""
        flight = lane.queue[0]
        if not flight.is_begun:
            if not self._may_begin(flight):
                return False
            self._begin(flight)
        if not lane.spare:
            return False
        try:
            work = None if flight.job.error is not None else next(flight.work, None)
        except Exception as error:  # noqa: BLE001 - whatever it is: one job is lost, not the engine
            flight.job.error = error
            work = None
        if work is None:
            flight.is_whole = True
            lane.queue.popleft()
            if not flight.batches:
                self._settle_lane(lane)
        elif isinstance(work, Copies):
            self._put(flight, work)
        else:
            flight.last_steps.append(work)
        return True

    def _may_begin(self, flight: _Flight) -> bool:
        """Whether events can say what this job has to wait for."""
        return all(
            other.is_done or (other.is_whole and not other.last_steps) for other in flight.earlier
        )

    def _begin(self, flight: _Flight) -> None:
        """Let the stream wait for all that must come before this job."""
        flight.begin = self._event()
        self._wait_for_engine(flight)
        self._wait_for_earlier(flight)
        flight.begin.record(flight.lane.stream)
        # Host memory is only written by the device where an earlier job says so.
        flight.sources_are_quiet = not flight.job.is_store and all(
            other.is_done for other in flight.earlier
        )
        flight.earlier = []
        flight.is_begun = True

    def _wait_for_engine(self, flight: _Flight) -> None:
        flight.lane.stream.wait_event(flight.ready)

    def _wait_for_earlier(self, flight: _Flight) -> None:
        for other in flight.earlier:
            if not other.is_done and other.lane is not flight.lane and other.batches:
                flight.lane.stream.wait_event(other.batches[-1].event)

    def _put(self, flight: _Flight, copies: Copies) -> None:
        lane, job, num_copies = flight.lane, flight.job, len(copies.sizes)
        batch = lane.spare.pop()
        engine, region = (
            (batch.source, batch.target) if job.is_store else (batch.target, batch.source)
        )
        engine[:num_copies] = copies.engine
        region[:num_copies] = copies.region + self._region_address
        batch.sizes[:num_copies] = copies.sizes
        try:
            self._device.copy(
                lane.stream,
                batch,
                num_copies,
                to_device=not job.is_store,
                in_any_order=flight.sources_are_quiet,
            )
        except Exception:  # noqa: BLE001 - any failure of the fast way: try the plain one
            self._log.warning(
                "%s job %d: a batch was refused, copying one by one",
                lane.name,
                job.job_id,
                with_traceback=True,
            )
            self._put_singly(flight, batch, num_copies)
        event = self._event()
        event.record(lane.stream)
        flight.batches.append(_Batch(event, batch))
        job.num_bytes += int(copies.sizes.sum())

    def _put_singly(self, flight: _Flight, batch: Descriptors, num_copies: int) -> None:
        job = flight.job
        try:
            self._device.copy_singly(
                flight.lane.stream, batch, num_copies, to_device=not job.is_store
            )
        except Exception as error:  # noqa: BLE001 - one job is lost; its batches are still awaited
            job.error = error

    # --- out of the streams ---------------------------------------------------------------------

    def _settle(self) -> None:
        for lane in self._lanes:
            self._settle_lane(lane)

    def _settle_lane(self, lane: _Lane) -> None:
        """End the jobs that the device has done, in order."""
        while lane.flights:
            flight = lane.flights[0]
            while flight.batches and flight.batches[0].event.query():
                self._recycle(flight, flight.batches.popleft())
            if flight.batches:
                self._check_progress(flight)
                return
            if not flight.is_whole:
                return
            lane.flights.popleft()
            self._end(flight)

    def _recycle(self, flight: _Flight, batch: _Batch) -> None:
        flight.lane.spare.append(batch.descriptors)
        if flight.end is not None:
            self._spare_event(flight.end)
        flight.end = batch.event
        flight.progress_s = self._clock.now_s()

    def _check_progress(self, flight: _Flight) -> None:
        now_s = self._clock.now_s()
        if flight.progress_s is None and flight.begin is not None and flight.begin.query():
            flight.progress_s = now_s
        if flight.progress_s is None:
            since_s, limit_s, what = flight.submitted_s, GIVE_UP_S, "begin with"
        else:
            since_s, limit_s, what = flight.progress_s, STUCK_S, "go on with"
        if now_s - since_s >= limit_s and self._hung is None:
            self._hung = KvError(
                f"{flight.lane.name} job {flight.job.job_id}: the device did not {what} its copies "
                f"for {limit_s:.0f} s. It may still do them, so their memory cannot be used again: "
                "restart the engine, and look into the device's log"
            )

    def _end(self, flight: _Flight) -> None:
        job = flight.job
        flight.is_done = True
        if job.error is None:
            try:
                for step in flight.last_steps:
                    step()
            except Exception as error:  # noqa: BLE001 - one job is lost, not the engine
                job.error = error
        job.seconds = self._seconds(flight)
        for event in (flight.ready, flight.begin, flight.end):
            if event is not None:
                self._spare_event(event)
        flight.begin = flight.end = None
        if job.error is None:
            self._finished.append(job)
        else:
            self._end_badly(job, job.error)

    def _seconds(self, flight: _Flight) -> float:
        """How long the device took."""
        if flight.begin is None or flight.end is None:
            return 0.0
        try:
            return flight.begin.elapsed_time(flight.end) * 1e-3
        except Exception:  # noqa: BLE001 - a device without timing
            return self._clock.now_s() - flight.submitted_s

    def _end_badly(self, job: Job[DeviceWork], error: Exception) -> None:
        job.error = error
        job.on_failure(error)
        self._finished.append(job)

    def _break(self, error: Exception) -> None:
        """The device's context is lost: nothing is copied any more, what was under way is void."""
        if self._broken is not None:
            return
        self._broken = error
        _LOG.error("the device is broken, KV cache is not copied any more: %s", error)
        for flight in [flight for lane in self._lanes for flight in lane.flights]:
            flight.is_done = True
            self._end_badly(flight.job, error)
        for lane in self._lanes:
            lane.flights.clear()
            lane.queue.clear()
            lane.spare.clear()
        self._spare_events.clear()

    # --- events ---------------------------------------------------------------------------------

    def _event(self) -> Event:
        return self._spare_events.pop() if self._spare_events else self._device.new_event()

    def _spare_event(self, event: Event) -> None:
        if len(self._spare_events) < _MAX_SPARE_EVENTS:
            self._spare_events.append(event)
