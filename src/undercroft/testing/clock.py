"""A clock that moves only when told to."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]

_PATIENCE_S = 30.0


class ManualClock:
    """`Clock` for tests. Whoever sleeps waits until somebody advances the time far enough.

    Args:
        start_s: The time at first.

    Threads: any.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._changed = threading.Condition()
        self._until_s: list[float] = []

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Wait until `advance` has passed `seconds` from now."""
        with self._changed:
            until_s = self._now_s + seconds
            self._until_s.append(until_s)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._now_s >= until_s)
            finally:
                self._until_s.remove(until_s)

    def advance(self, seconds: float) -> None:
        """Move on and wake those whose time has come."""
        assert seconds >= 0, f"time cannot go back by {seconds} s"
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()

    def await_sleepers(self, num_sleepers: int) -> None:
        """Wait (in real time) until that many threads sleep whose time has not come yet."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._num_sleepers() >= num_sleepers, timeout=_PATIENCE_S
            )
            assert there, f"{self._num_sleepers()} of {num_sleepers} threads sleep"

    def _num_sleepers(self) -> int:
        return sum(until_s > self._now_s for until_s in self._until_s)
