"""An accelerator that does as late, and in as odd an order, as a real one may.

Nothing that is put into a stream happens until an event is asked whether it has passed, or `run`
is called; then some steps happen, of whichever streams a seeded generator picks. The copies of one
batch happen in any order, sources that may be read "in any order" may be read at once, and
addresses are looked up when a copy happens, not when it was put in. Only events order streams. So
code that leaves an event out, or takes back too early what a copy still needs, moves wrong bytes
under some seed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from undercroft.engines.accelerator.device import Descriptors, Event, Stream

__all__ = ["DeviceFault", "FakeDevice", "FakeEvent", "FakeStream", "StepClock"]

_Step = Callable[[], bool]
"""Does something, if it can; False: not yet."""


class DeviceFault(RuntimeError):
    """What a driver reports."""


class FakeEvent:
    """See `device.Event`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.num_recorded = 0
        self.num_passed = 0
        self.passed_at = 0

    def record(self, stream: Stream, /) -> None:
        """See `device.Event.record`."""
        self._device.check()
        self.num_recorded += 1
        number = self.num_recorded
        _fake_stream(stream).steps.append(lambda: self._pass(number))

    def _pass(self, number: int) -> bool:
        self.num_passed = max(self.num_passed, number)
        self.passed_at = self._device.num_steps
        return True

    def query(self) -> bool:
        """See `device.Event.query`; lets the device go on a little."""
        self._device.check()
        self._device.run_some()
        return self.num_passed >= self.num_recorded

    def elapsed_time(self, end: Event, /) -> float:
        """See `device.Event.elapsed_time`: a step is a microsecond."""
        assert isinstance(end, FakeEvent)
        assert self.num_passed, "an event that was not passed has no time"
        assert end.num_passed, "an event that was not passed has no time"
        return (end.passed_at - self.passed_at) * 1e-3


@dataclass(eq=False, slots=True)
class FakeStream:
    """See `device.Stream`."""

    steps: deque[_Step] = field(default_factory=deque)

    def wait_event(self, event: Event, /) -> None:
        """See `device.Stream.wait_event`: what it was last recorded for until now."""
        assert isinstance(event, FakeEvent)
        number = event.num_recorded
        self.steps.append(lambda: event.num_passed >= number)

    def compute(self, work: Callable[[], None]) -> None:
        """Put some of the engine's own work in."""

        def step() -> bool:
            work()
            return True

        self.steps.append(step)


def _fake_stream(stream: Stream) -> FakeStream:
    """The stream as what it is."""
    assert isinstance(stream, FakeStream)
    return stream


class FakeDevice:
    """See `device.Device`. Its memory is the process's: engine tensors are plain host memory.

    Args:
        seed: Decides the order of everything.
        max_steps: The most that happens when an event is asked.
        piece_bytes: See `device.Device`.

    Attributes:
        engine_stream: The one that `current_stream` gives.
        refuse: Called with the number of each batch, may raise `DeviceFault`: that batch is refused
            after a part of it was taken.
        refuse_singly: The same for copies one by one.
        broken: Raised by everything, once it is set.
        is_hung: Nothing happens any more.
        frozen: Streams in which nothing happens.
    """

    def __init__(self, seed: int = 0, *, max_steps: int = 4, piece_bytes: int = 1 << 40) -> None:
        self.random = Random(seed)  # noqa: S311 - a schedule, no secret
        self.piece_bytes = piece_bytes
        self.num_steps = 0
        self.num_events = 0
        self.num_batches = 0
        self.num_singly = 0
        self.num_open_copies = 0
        self.engine_stream = FakeStream()
        self.refuse: Callable[[int], None] = lambda _number: None
        self.refuse_singly: Callable[[int], None] = lambda _number: None
        self.broken: DeviceFault | None = None
        self.is_hung = False
        self.frozen: list[Stream] = []
        self.is_closed = False
        self._max_steps = max_steps
        self._streams = [self.engine_stream]

    # --- device.Device --------------------------------------------------------------------------

    def new_stream(self) -> FakeStream:
        """See `device.Device.new_stream`."""
        stream = FakeStream()
        self._streams.append(stream)
        return stream

    def new_event(self) -> FakeEvent:
        """See `device.Device.new_event`."""
        self.check()
        self.num_events += 1
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        """See `device.Device.current_stream`."""
        return self.engine_stream

    def new_descriptors(self, capacity: int) -> Descriptors:
        """See `device.Device.new_descriptors`."""
        source, target, sizes = (np.zeros(capacity, np.int64) for _ in range(3))
        return Descriptors(source, target, sizes, tensors=None)

    def copy(
        self,
        stream: Stream,
        batch: Descriptors,
        num_copies: int,
        *,
        to_device: bool,
        in_any_order: bool,
    ) -> None:
        """See `device.Device.copy`."""
        self.check()
        assert to_device or not in_any_order, "the engine writes its blocks all the time"
        self.num_batches += 1
        rows = list(range(num_copies))
        self.random.shuffle(rows)
        fault: DeviceFault | None = None
        try:
            self.refuse(self.num_batches)
        except DeviceFault as error:
            fault, rows = error, rows[: len(rows) // 2]
        _fake_stream(stream).steps.extend(self._copies(batch, rows, in_any_order=in_any_order))
        if fault is not None:
            raise fault

    def copy_singly(
        self,
        stream: Stream,
        batch: Descriptors,
        num_copies: int,
        *,
        to_device: bool,  # noqa: ARG002 - the addresses say it too
    ) -> None:
        """See `device.Device.copy_singly`."""
        self.check()
        self.num_singly += 1
        self.refuse_singly(self.num_singly)
        steps = self._copies(batch, list(range(num_copies)), in_any_order=False)
        _fake_stream(stream).steps.extend(steps)

    def close(self) -> bool:
        """See `device.Device.close`."""
        assert self.is_hung or self.broken or not self.num_open_copies
        self.is_closed = True
        return True

    # --- time goes on ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what a broken device raises."""
        if self.broken is not None:
            raise self.broken

    def run_some(self) -> None:
        """Let a few steps happen, or none."""
        for _ in range(self.random.randint(0, self._max_steps)):
            if not self._run_one():
                return

    def run(self) -> None:
        """Let everything happen that can."""
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        if self.is_hung or self.broken is not None:
            return False
        streams = [each for each in self._streams if each.steps and each not in self.frozen]
        first = self.random.randrange(len(streams)) if len(streams) > 1 else 0
        for stream in streams[first:] + streams[:first]:
            if stream.steps[0]():
                stream.steps.popleft()
                self.num_steps += 1
                return True
        return False

    def _copies(
        self, batch: Descriptors, rows: list[int], *, in_any_order: bool
    ) -> Iterator[_Step]:
        for row in rows:
            early: bytes | None = None
            self.num_open_copies += 1
            if in_any_order and self.random.random() < 0.5:  # noqa: PLR2004 - a coin
                early = ctypes.string_at(int(batch.source[row]), int(batch.sizes[row]))
            yield self._one_copy(batch, row, early)

    def _one_copy(self, batch: Descriptors, row: int, early: bytes | None) -> _Step:
        def step() -> bool:
            size = int(batch.sizes[row])
            data = ctypes.string_at(int(batch.source[row]), size) if early is None else early
            ctypes.memmove(int(batch.target[row]), data, size)
            self.num_open_copies -= 1
            return True

        return step


class StepClock:
    """A clock for a `FakeDevice`: time passes when somebody waits, and so does the device's work.

    Args:
        device: Goes on while somebody sleeps.
        tick_s: What a look at the clock takes.
    """

    def __init__(self, device: FakeDevice, *, tick_s: float = 0.0) -> None:
        self._device = device
        self._tick_s = tick_s
        self._now_s = 1000.0

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        self._now_s += self._tick_s
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self._now_s += seconds
        self._device.run_some()
