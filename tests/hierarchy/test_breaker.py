from __future__ import annotations

import pytest

from undercroft.errors import ConfigError
from undercroft.hierarchy.breaker import Breaker, BreakerState
from undercroft.testing.clock import ManualClock


def made() -> Breaker:
    return Breaker(failures_to_open=3, first_pause_s=1.0, max_pause_s=4.0)


def fail(breaker: Breaker, now_s: float, times: int = 1) -> None:
    for _ in range(times):
        permit = breaker.admit(now_s)
        assert permit is not None
        breaker.on_failure(permit, now_s)


def test_opens_after_consecutive_failures_only() -> None:
    """A success in between starts the count anew."""
    breaker = made()
    fail(breaker, 0.0, 2)
    permit = breaker.admit(0.0)
    assert permit is not None
    breaker.on_success(permit)
    fail(breaker, 0.0, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.available(0.9)
    assert breaker.admit(0.9) is None
    assert breaker.num_opened == 1


def test_full_and_corrupt_do_not_count() -> None:
    """An answer is neither a failure nor a sign that the failures are over."""
    breaker = made()
    for _ in range(10):
        permit = breaker.admit(0.0)
        assert permit is not None
        breaker.on_answer(permit)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 0.0, 2)
    permit = breaker.admit(0.0)
    assert permit is not None
    breaker.on_answer(permit)
    fail(breaker, 0.0)
    assert breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("end", ["on_success", "on_answer"])
def test_one_probe_and_closes_when_it_is_answered(end: str) -> None:
    """After the pause exactly one is let through; its answer closes the breaker."""
    breaker = made()
    fail(breaker, 0.0, 3)
    assert breaker.available(1.0)
    permit = breaker.admit(1.0)
    assert permit is not None
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.available(100.0)
    assert breaker.admit(100.0) is None
    getattr(breaker, end)(permit)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1.0, 2)
    assert breaker.state is BreakerState.CLOSED, "the count starts anew"


def test_the_pause_doubles_up_to_its_bound_and_starts_anew_after_a_success() -> None:
    """1, 2, 4, 4 s; after closing, 1 s again."""
    breaker = made()
    clock = ManualClock()
    fail(breaker, clock.now_s(), 3)
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.advance(pause_s - 0.001)
        assert not breaker.available(clock.now_s())
        clock.advance(0.001)
        fail(breaker, clock.now_s())
        assert breaker.state is BreakerState.OPEN
    clock.advance(4.0)
    permit = breaker.admit(clock.now_s())
    assert permit is not None
    breaker.on_success(permit)
    fail(breaker, clock.now_s(), 3)
    assert breaker.available(clock.now_s() + 1.0)


def test_results_from_before_a_change_are_ignored() -> None:
    """What was under way when the breaker opened neither closes nor opens it."""
    breaker = made()
    old = breaker.admit(0.0)
    assert old is not None
    fail(breaker, 0.0, 3)
    breaker.on_success(old)
    assert breaker.state is BreakerState.OPEN
    probe = breaker.admit(1.0)
    breaker.on_failure(old, 1.0)
    breaker.on_success(old)
    assert breaker.state is BreakerState.HALF_OPEN
    assert probe is not None
    breaker.on_success(probe)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "bad",
    [{"failures_to_open": 0}, {"first_pause_s": 0.0}, {"first_pause_s": 9.0, "max_pause_s": 1.0}],
)
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    """The message names the field and its value."""
    field, value = next(iter(bad.items()))
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        Breaker(**bad)  # type: ignore[arg-type]
