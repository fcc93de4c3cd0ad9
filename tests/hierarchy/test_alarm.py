"""What the log says of a tier in trouble."""

from __future__ import annotations

import pytest

from undercroft.errors import CorruptChunk, TierTimeout, TierUnavailable
from undercroft.hierarchy.alarm import Alarm
from undercroft.hierarchy.breaker import BreakerState
from undercroft.testing.clock import ManualClock

OPEN, CLOSED, HALF = BreakerState.OPEN, BreakerState.CLOSED, BreakerState.HALF_OPEN


def test_one_line_when_it_is_left_alone_and_one_when_it_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one line per failed chunk, and none before the breaker opens."""
    clock = ManualClock()
    alarm = Alarm("disk", clock)
    for _ in range(4):
        alarm.see(TierUnavailable("input/output error"), CLOSED)
    assert not caplog.messages
    for state in (OPEN, OPEN, HALF, OPEN):
        alarm.see(TierTimeout("no answer"), state)
    assert len(caplog.messages) == 1
    assert "tier disk is left alone for now: no answer" in caplog.messages[0]
    alarm.see(None, CLOSED)
    alarm.see(None, CLOSED)
    assert caplog.messages[1:] == ["tier disk works again"]
    clock.advance(60)
    alarm.see(TierTimeout("no answer"), OPEN)
    assert len(caplog.messages) == 3


def test_a_tier_that_comes_and_goes_is_two_lines_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And one that stays away in the end is said to, when the minute is over."""
    clock = ManualClock()
    alarm = Alarm("disk", clock)
    for _ in range(50):
        alarm.see(TierTimeout("no answer"), OPEN)
        alarm.see(None, CLOSED)
        clock.advance(1)
    assert len(caplog.messages) == 2
    for _ in range(50):
        alarm.see(TierTimeout("no answer"), OPEN)
        clock.advance(1)
    assert len(caplog.messages) == 3
    assert "is left alone" in caplog.messages[2]


def test_damaged_chunks_are_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """They do not open the breaker, and a whole bad disk is not a flood of lines."""
    clock = ManualClock()
    alarm = Alarm("disk", clock)
    for _ in range(100):
        alarm.see(CorruptChunk("the checksum differs"), CLOSED)
        clock.advance(1.0)
    assert len(caplog.messages) == 2
    assert "tier disk had a damaged chunk" in caplog.messages[0]
    assert "the checksum differs" in caplog.messages[0]
