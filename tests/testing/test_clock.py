from __future__ import annotations

import threading

import pytest

from undercroft.clock import Clock
from undercroft.testing.clock import ManualClock


def test_time_moves_only_when_told() -> None:
    """`now_s` changes by what `advance` was given and by nothing else."""
    clock: Clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    assert isinstance(clock, ManualClock)
    clock.advance(2.5)
    assert clock.now_s() == 7.5
    with pytest.raises(AssertionError):
        clock.advance(-1.0)


def test_sleepers_wake_when_their_time_has_come() -> None:
    """Each sleeper waits for its own time."""
    clock = ManualClock()
    woken: list[float] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        woken.append(seconds)

    threads = [threading.Thread(target=sleep, args=(seconds,)) for seconds in (1.0, 3.0)]
    for thread in threads:
        thread.start()
    clock.await_sleepers(2)
    clock.advance(0.9)
    assert threads[0].is_alive()
    clock.advance(0.2)
    threads[0].join(timeout=30)
    assert woken == [1.0]
    assert threads[1].is_alive()
    clock.advance(2.0)
    threads[1].join(timeout=30)
    assert woken == [1.0, 3.0]
