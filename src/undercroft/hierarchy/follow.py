"""Keep a tier that others write to up to date, off the scheduler thread."""

from __future__ import annotations

import logging
import threading

from undercroft.errors import KvError
from undercroft.tiers.base import Following

__all__ = ["Follower"]

_LOG = logging.getLogger(__name__)
_PERIOD_S = 0.1


class Follower:
    """A daemon thread that refreshes one tier ten times a second.

    A refresh that hangs holds up nobody else; one that fails is tried again.

    Args:
        name: The tier's name, for the thread's.
    """

    def __init__(self, tier: Following, name: str) -> None:
        self._tier = tier
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"undercroft-{name}-follow")
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        is_failing = False
        while not self._stop.wait(_PERIOD_S):
            try:
                self._tier.refresh()
                is_failing = False
            except KvError as error:
                if not is_failing:
                    _LOG.warning("tier %s cannot follow other processes: %s", self._name, error)
                is_failing = True

    def close(self, timeout_s: float) -> None:
        """Stop; waits at most `timeout_s` for a refresh under way."""
        self._stop.set()
        self._thread.join(timeout_s)
