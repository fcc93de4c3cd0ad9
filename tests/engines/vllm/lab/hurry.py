"""Minutes for the self-check of a running engine, in seconds of a test."""

from typing import Any

from tests.engines.vllm.lab.storm import manager_of
from undercroft.clock import SystemClock


class _Fast(SystemClock):
    def __init__(self, times: float) -> None:
        self._times = times

    def now_s(self) -> float:
        return super().now_s() * self._times


def self_check(driver: Any, *, times: float) -> None:
    """For `Engine.inside`: from now on its self-check lives so many times faster."""
    manager_of(driver).check.clock = _Fast(times)


def told(driver: Any) -> dict[str, dict[str, int]]:
    """What became of requests, and the warnings so far, by cause."""
    counters = manager_of(driver).hierarchy.counters
    return {
        "requests": dict(counters.requests),
        "warnings": dict(counters.self_check_warnings),
    }
