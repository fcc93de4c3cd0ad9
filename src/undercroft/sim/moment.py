"""The clock of a simulation: it is set, not waited for."""

from __future__ import annotations

__all__ = ["Moment"]


class Moment:
    """A `Clock` that stands still until it is set. Threads: one."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._now_s

    def set(self, now_s: float) -> None:
        """Go on to `now_s`; earlier times are ignored, as a clock never goes back."""
        self._now_s = max(self._now_s, now_s)

    def sleep(self, seconds: float) -> None:
        """Go on by `seconds`: nobody else would."""
        self._now_s += max(0.0, seconds)
