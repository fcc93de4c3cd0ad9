"""The log lines about a tier in trouble: few, whatever happens, and an all-clear."""

from __future__ import annotations

import logging

from undercroft.clock import Clock
from undercroft.errors import CorruptChunk, KvError
from undercroft.hierarchy.breaker import BreakerState
from undercroft.log import SparingLog

__all__ = ["Alarm"]

_LOG = logging.getLogger(__name__)
_QUIET_S = 60.0


class Alarm:
    """Told of every end of a move; says when the tier is left alone, works again, or lies.

    At most one line of each kind a minute, also about a tier that comes and goes; a tier that is
    down when the minute is over is said to be at its next failure. All of it is counted elsewhere.

    Threads: the scheduler's. Cost: a comparison.
    """

    def __init__(self, tier_name: str, clock: Clock) -> None:
        self._tier_name = tier_name
        self._clock = clock
        self._log = SparingLog(_LOG, clock, period_s=_QUIET_S)
        self._is_said_down = False
        self._quiet_until_s = float("-inf")

    def see(self, error: KvError | None, breaker: BreakerState) -> None:
        """A move ended; `breaker` is the state in which that left the tier's breaker."""
        if error is None:
            if self._is_said_down and breaker is BreakerState.CLOSED:
                self._is_said_down = False
                _LOG.warning("tier %s works again", self._tier_name)
        elif isinstance(error, CorruptChunk):
            self._log.warning(
                "tier %s had a damaged chunk, which is dropped and counted: %s",
                self._tier_name,
                error,
            )
        elif breaker is not BreakerState.CLOSED and not self._is_said_down:
            self._say_down(error)

    def _say_down(self, error: KvError) -> None:
        now_s = self._clock.now_s()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + _QUIET_S
        self._is_said_down = True
        _LOG.warning(
            "tier %s is left alone for now: %s; requests go on without it, and it is tried again",
            self._tier_name,
            error,
        )
