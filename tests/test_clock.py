"""The system clock: monotonic, in seconds."""

from __future__ import annotations

from undercroft.clock import SystemClock


def test_time_never_goes_back() -> None:
    """Readings taken one after another never decrease."""
    clock = SystemClock()
    readings = [clock.now_s() for _ in range(1000)]
    assert readings == sorted(readings)


def test_sleep_waits_seconds() -> None:
    """After a sleep at least that many seconds have passed, by the same clock."""
    clock = SystemClock()
    before = clock.now_s()
    clock.sleep(0.02)
    assert 0.02 <= clock.now_s() - before < 20
