"""Keep a tier that others write to up to date, off the scheduler thread."""

from __future__ import annotations

import logging
import threading

from undercroft.clock import Clock
from undercroft.log import SparingLog
from undercroft.tiers.base import Following

__all__ = ["Follower"]

_LOG = logging.getLogger(__name__)
_PERIOD_S = 0.1


class Follower:
    """A daemon thread that refreshes one tier ten times a second.

    A refresh that hangs holds up nobody else; one that fails is tried again.

    Args:
        name: The tier's name, for the thread's.
        clock: For how often a failure is told.
    """

    def __init__(self, tier: Following, name: str, clock: Clock) -> None:
        self._tier = tier
        self._name = name
        self._log = SparingLog(_LOG, clock)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"undercroft-{name}-follow")
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                self._tier.refresh()
            except BaseException as error:  # noqa: BLE001 - a stranger's tier may raise anything
                self._log.warning("tier %s cannot follow other processes: %s", self._name, error)

    def close(self, timeout_s: float) -> None:
        """Stop; waits at most `timeout_s` for a refresh under way."""
        self._stop.set()
        self._thread.join(timeout_s)
