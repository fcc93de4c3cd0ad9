"""The one source of time. Everything that waits takes a `Clock`; tests take a manual one."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Monotonic time."""

    def now_s(self) -> float:
        """Seconds since some fixed point; never goes back. Threads: any. Cost: ~50 ns."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait `seconds`. Never called on the scheduler thread."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.monotonic()  # noqa: TID251 - the only place that may

    def unix_s(self) -> float:
        """Seconds since 1970, for people and files to read; it may jump, so no wait depends on it.

        Threads: any.
        """
        return time.time()  # noqa: TID251 - the only place that may

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)  # noqa: TID251 - the only place that may
