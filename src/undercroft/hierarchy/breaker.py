"""A circuit breaker: leave a failing tier alone, ask again later, a little later each time."""

from __future__ import annotations

from enum import Enum

from undercroft.errors import ConfigError

__all__ = ["Breaker", "BreakerState"]


class BreakerState(Enum):
    """CLOSED: all pass. OPEN: none passes. HALF_OPEN: one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
    """Opens after consecutive failures, then lets one probe through after each pause.

    Permits tie a result to the state in which it was asked for: what was under way when the
    breaker changed state says nothing about the tier now and is ignored.

    Args:
        failures_to_open: Consecutive failures (timeouts included) that open it.
        first_pause_s: How long it stays open the first time.
        max_pause_s: Each failed probe doubles the pause, up to this.

    Threads: the caller serialises. Cost: O(1). Time is the caller's `now_s`.
    """

    def __init__(
        self,
        *,
        failures_to_open: int = 5,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
    ) -> None:
        if failures_to_open < 1:
            raise ConfigError(f"failures_to_open is {failures_to_open}: give at least 1")
        if not 0 < first_pause_s <= max_pause_s:
            raise ConfigError(
                f"first_pause_s is {first_pause_s} and max_pause_s {max_pause_s}: "
                "give 0 < first_pause_s <= max_pause_s"
            )
        self._failures_to_open = failures_to_open
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._state = BreakerState.CLOSED
        self._permit = 0
        self._num_failures = 0
        self._pause_s = first_pause_s
        self._probe_at_s = 0.0
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        """The state now; OPEN also when a probe is due but nobody has asked yet."""
        return self._state

    def available(self, now_s: float) -> bool:
        """Whether `admit` would let something through."""
        return self._state is BreakerState.CLOSED or (
            self._state is BreakerState.OPEN and now_s >= self._probe_at_s
        )

    def admit(self, now_s: float) -> int | None:
        """A permit to try the tier, to be handed back with the result; None: refused."""
        if self._state is BreakerState.CLOSED:
            return self._permit
        if not self.available(now_s):
            return None
        self._enter(BreakerState.HALF_OPEN)
        return self._permit

    def on_success(self, permit: int) -> None:
        """The tier did what was asked."""
        if permit != self._permit:
            return
        self._num_failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self._close()

    def on_answer(self, permit: int) -> None:
        """The tier answered, but with an error that is not its failure (full, corrupt chunk)."""
        if permit == self._permit and self._state is BreakerState.HALF_OPEN:
            self._close()

    def on_failure(self, permit: int, now_s: float) -> None:
        """The tier failed or did not answer in time."""
        if permit != self._permit:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self._open(now_s)
            return
        self._num_failures += 1
        if self._num_failures >= self._failures_to_open:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._enter(BreakerState.OPEN)
        self._probe_at_s = now_s + self._pause_s
        self.num_opened += 1

    def _close(self) -> None:
        self._enter(BreakerState.CLOSED)
        self._num_failures = 0
        self._pause_s = self._first_pause_s

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._permit += 1
