"""Copies on a device that reorders what it may: right bytes, bounded time, bounded memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engines.accelerator.device_storm import PAGE, Storm, storms
from undercroft.engines.accelerator import device_mover
from undercroft.engines.accelerator.descriptors import Copies
from undercroft.engines.accelerator.device_mover import GIVE_UP_S, STUCK_S, DeviceMover, DeviceWork
from undercroft.engines.jobs import Job
from undercroft.errors import Bug, KvError
from undercroft.testing.fake_device import DeviceFault, FakeDevice, StepClock

NUM_STORMS = 150


def test_any_history_moves_the_right_bytes() -> None:
    """As if jobs and the engine's work were done one by one, whatever the device reorders."""
    assert not list(storms(NUM_STORMS))


# --- each wait is needed: without it, some history goes wrong ---


class _StoreBeforeCompute(DeviceMover):
    def _wait_for_engine(self, flight: Any) -> None:
        if not flight.job.is_store:
            super()._wait_for_engine(flight)


class _LoadBeforeZeroing(DeviceMover):
    def _wait_for_engine(self, flight: Any) -> None:
        if flight.job.is_store:
            super()._wait_for_engine(flight)


class _LoadBeforeStoreOfItsSlot(DeviceMover):
    def _wait_for_earlier(self, flight: Any) -> None:
        if flight.job.is_store:
            super()._wait_for_earlier(flight)


class _StoreIntoSlotStillRead(DeviceMover):
    def _wait_for_earlier(self, flight: Any) -> None:
        if not flight.job.is_store:
            super()._wait_for_earlier(flight)


class _BlocksDoNotCount(DeviceMover):
    def submit(self, job: Any) -> None:
        job.blocks = frozenset()
        super().submit(job)


class _SlotsDoNotCount(DeviceMover):
    def submit(self, job: Any) -> None:
        job.slots = frozenset()
        super().submit(job)


class _EventsRecycledAtOnce(DeviceMover):
    def _put(self, flight: Any, copies: Copies) -> None:
        super()._put(flight, copies)
        self._spare_events.append(flight.batches[-1].event)


class _DescriptorsRecycledAtOnce(DeviceMover):
    def _put(self, flight: Any, copies: Copies) -> None:
        super()._put(flight, copies)
        flight.lane.spare.append(flight.batches[-1].descriptors)


class _SourcesReadInAnyOrder(DeviceMover):
    def _begin(self, flight: Any) -> None:
        super()._begin(flight)
        flight.sources_are_quiet = not flight.job.is_store


class _HostDoesNotWait(DeviceMover):
    def _may_begin(self, flight: Any) -> bool:
        return all(other.is_done or other.is_whole for other in flight.earlier)


class _WaitReturnsEarly(DeviceMover):
    def wait(self, job_ids: Any) -> None:
        for lane in self._lanes:
            for flight in list(lane.flights):
                if flight.job.job_id in job_ids:
                    lane.flights.remove(flight)
                    if flight in lane.queue:
                        lane.queue.remove(flight)
                    self._end(flight)


@pytest.mark.parametrize(
    "broken",
    [
        _StoreBeforeCompute,
        _LoadBeforeZeroing,
        _LoadBeforeStoreOfItsSlot,
        _StoreIntoSlotStillRead,
        _BlocksDoNotCount,
        _SlotsDoNotCount,
        _EventsRecycledAtOnce,
        _DescriptorsRecycledAtOnce,
        _SourcesReadInAnyOrder,
        _HostDoesNotWait,
        _WaitReturnsEarly,
    ],
)
def test_a_wait_left_out_is_noticed(broken: Any) -> None:
    """The storm fails for a mover that lacks one of its waits: so each is there for a reason."""
    assert next(storms(NUM_STORMS, broken), None)


# --- failures ---


class World:
    """A mover, four blocks, four slots."""

    def __init__(self, *, tick_s: float = 0.0, seed: int = 1) -> None:
        self.device = FakeDevice(seed)
        self.clock = StepClock(self.device, tick_s=tick_s)
        self.blocks = np.arange(4 * PAGE, dtype=np.uint8).reshape(4, PAGE)
        self.slots = np.full((4, PAGE), 200, np.uint8)
        self.mover = DeviceMover(self.device, self.clock, region_address=self.slots.ctypes.data)
        self.failed: list[tuple[int, str]] = []

    def submit(
        self, job_id: int, *, store: bool = True, at: int = 0, num_batches: int = 1
    ) -> Job[DeviceWork]:
        def steps() -> Iterator[DeviceWork]:
            for _ in range(num_batches):
                yield Copies(
                    np.array([self.blocks[at].ctypes.data], np.int64),
                    np.array([at * PAGE], np.int64),
                    np.array([PAGE], np.int64),
                )

        job: Job[DeviceWork] = Job(
            job_id=job_id,
            is_store=store,
            blocks=frozenset([at]),
            slots=frozenset([at]),
            steps=steps,
            on_failure=lambda error: self.failed.append((job_id, str(error))),
        )
        self.mover.submit(job)
        return job

    def finish(self, *job_ids: int) -> list[Job[DeviceWork]]:
        self.mover.wait(job_ids)
        return self.mover.take_finished()


def refusing(*numbers: int) -> Any:
    def refuse(number: int) -> None:
        if number in numbers:
            raise DeviceFault(f"invalid argument in batch {number}")

    return refuse


@pytest.mark.parametrize("store", [True, False])
def test_a_refused_batch_is_copied_one_by_one(store: bool) -> None:
    """The operator's error costs time only."""
    world = World()
    world.device.refuse = refusing(1)
    world.submit(1, store=store)
    (job,) = world.finish(1)
    assert job.error is None
    assert world.failed == []
    assert (world.blocks[0] == world.slots[0]).all()
    assert world.device.num_singly == 1


@pytest.mark.parametrize("store", [True, False])
def test_a_copy_that_cannot_be_done_fails_its_job_alone(store: bool) -> None:
    """It ends, with its error, once what the device took of it has; the next job is served."""
    world = World()
    world.device.refuse = refusing(2)
    world.device.refuse_singly = refusing(1)
    world.submit(1, store=store, num_batches=3)
    world.submit(2, store=store, at=1)
    first, second = world.finish(1, 2)
    assert isinstance(first.error, DeviceFault)
    assert second.error is None
    assert [job_id for job_id, _ in world.failed] == [1]
    assert (world.blocks[1] == world.slots[1]).all()


def test_a_plan_that_fails_fails_its_job_alone() -> None:
    """An error while addresses are worked out is the job's, not the engine's."""
    world = World()

    def steps() -> Iterator[DeviceWork]:
        raise Bug("no such block")
        yield

    world.mover.submit(
        Job(1, True, frozenset(), frozenset(), steps, lambda error: world.failed.append((1, "")))
    )
    world.submit(2)
    jobs = world.finish(1, 2)
    assert [type(job.error) for job in jobs] == [Bug, type(None)]
    assert world.failed == [(1, "")]


def test_a_host_step_that_fails_fails_its_job() -> None:
    """What the host does after the copies may fail too."""
    world = World()
    world.mover.submit(
        Job(
            1,
            True,
            frozenset(),
            frozenset(),
            lambda: iter([lambda: 1 / 0]),  # type: ignore[arg-type,list-item,return-value] # it is to fail
            lambda error: world.failed.append((1, str(error))),
        )
    )
    (job,) = world.finish(1)
    assert isinstance(job.error, ZeroDivisionError)
    assert len(world.failed) == 1


def test_a_broken_device_fails_everything_and_keeps_nobody_waiting() -> None:
    """Whatever is under way ends with the error, once; so does whatever comes later."""
    world = World()
    world.device.is_hung = True
    world.submit(1)
    world.submit(2, store=False, at=1)
    world.submit(3, store=False)  # behind the store
    world.device.broken = DeviceFault("an illegal memory access was encountered")
    world.mover.wait({1, 2, 3})
    world.submit(4)
    jobs = world.mover.take_finished()
    assert sorted(job.job_id for job in jobs) == [1, 2, 3, 4]
    assert all(isinstance(job.error, DeviceFault) for job in jobs)
    assert sorted(job_id for job_id, _ in world.failed) == [1, 2, 3, 4]
    assert world.mover.take_finished() == []
    assert world.mover.close(1.0)


@pytest.mark.parametrize("begun", [True, False])
def test_a_device_that_hangs_is_given_up(begun: bool) -> None:
    """After a minute without progress, or ten without a beginning; nothing is acknowledged."""
    world = World()
    if begun:
        world.device.engine_stream.compute(lambda: None)
        world.submit(1)
        while not world.mover._stores.flights[0].begin.num_passed:  # type: ignore[union-attr] # fake
            world.device._run_one()
        world.device.is_hung = True
        world.mover.take_finished()
    else:
        world.device.is_hung = True
        world.submit(1)
    begun_s = world.clock.now_s()
    world.clock.sleep((STUCK_S if begun else GIVE_UP_S) - 1)
    assert world.mover.take_finished() == []
    with pytest.raises(KvError, match="go on with" if begun else "begin with"):
        world.mover.wait({1})
    assert world.clock.now_s() - begun_s < GIVE_UP_S + 10
    with pytest.raises(KvError, match="store job 1"):
        world.mover.take_finished()
    assert world.failed == []
    assert not world.mover.close(0.01)


# --- bounds ---


def test_nothing_grows_with_the_number_of_jobs() -> None:
    """Events and descriptors are used again: thousands of jobs need as many as a few."""
    world = World()
    for job_id in range(30):
        world.submit(job_id, at=job_id % 4)
        world.finish(job_id)
    num_events = world.device.num_events
    for job_id in range(2000):
        world.submit(job_id, store=job_id % 3 > 0, at=job_id % 4)
        world.finish(job_id)
    assert world.device.num_events == num_events
    assert sum(len(lane.spare) for lane in world.mover._lanes) == 2 * device_mover._MAX_BATCHES


def test_a_long_job_has_bounded_work_on_the_device() -> None:
    """No more batches than there is room for are in the stream, and it still ends."""
    world = World()
    world.device.is_hung = True
    job = world.submit(1, num_batches=1000)
    world.mover.take_finished()
    assert world.device.num_batches == device_mover._MAX_BATCHES
    world.device.is_hung = False
    assert world.finish(1) == [job]
    assert job.num_bytes == 1000 * PAGE
    assert world.device.num_batches == 1000


def test_a_call_puts_in_work_for_a_few_milliseconds_only() -> None:
    """The rest goes in with the next calls."""
    world = World(tick_s=0.001)
    world.submit(1, num_batches=20)
    first = world.device.num_batches
    assert 1 <= first < 8
    world.mover.take_finished()
    assert first < world.device.num_batches < 20
    (job,) = world.finish(1)
    assert job.num_bytes == 20 * PAGE


def test_neither_submitting_nor_asking_waits() -> None:
    """With a device that does nothing at all, both come back; unknown ids are not waited for."""
    world = World()
    world.device.is_hung = True
    begun_s = world.clock.now_s()
    for job_id in range(50):
        world.submit(job_id, store=job_id % 2 > 0, at=job_id % 4)
        assert world.mover.take_finished() == []
    world.mover.wait({77, 78})
    assert world.clock.now_s() == begun_s


def test_both_directions_run_side_by_side() -> None:
    """A load does not wait behind stores that it shares nothing with."""
    world = World()
    world.device.frozen = [world.mover._stores.stream]
    world.submit(1, at=0, num_batches=4)
    world.submit(2, store=False, at=1)
    world.mover.wait({2})
    assert [job.job_id for job in world.mover.take_finished()] == [2]
    world.device.frozen = []
    assert [job.job_id for job in world.finish(1)] == [1]


def test_closing_fails_what_was_not_stored_and_is_bounded() -> None:
    """What the device still does is awaited; the rest fails, loads are forgotten."""
    world = World()
    world.submit(1, at=0)
    world.submit(2, at=1, num_batches=500)
    world.submit(3, store=False, at=2, num_batches=500)
    assert world.mover.close(10.0)
    assert world.mover.close(10.0)
    assert [job.job_id for job in world.mover.take_finished()] == [1, 2]
    assert [job_id for job_id, _ in world.failed if job_id != 3] == [2]
    with pytest.raises(Bug, match="stopped"):
        world.submit(4)


def test_closing_does_not_wait_for_ever() -> None:
    """A device that hangs is left behind; its memory must stay."""
    world = World()
    world.device.is_hung = True
    world.submit(1)
    begun_s = world.clock.now_s()
    assert not world.mover.close(3.0)
    assert 3.0 <= world.clock.now_s() - begun_s < 4.0
    assert [job_id for job_id, _ in world.failed] == [1]


def test_the_storm_is_a_storm() -> None:
    """In its histories jobs overlap: more than one is under way, and both directions are."""
    most, mixed = 0, 0
    for seed in range(20):
        storm = Storm(seed)
        original = storm.mover.submit

        def submit(job: Any, storm: Storm = storm, original: Any = original) -> None:
            nonlocal most, mixed
            original(job)
            sizes = [len(lane.flights) for lane in storm.mover._lanes]
            most = max(most, sum(sizes))
            mixed += all(sizes)

        storm.mover.submit = submit  # type: ignore[method-assign] # to look in
        storm.run()
    assert most >= 5
    assert mixed >= 100
