"""Log lines that a lasting fault would repeat without end: one a minute of each kind."""

from __future__ import annotations

import logging
import threading

from undercroft.clock import Clock

__all__ = ["SparingLog"]


class SparingLog:
    """Lets the first line of a kind pass, then one in each period that says how many were left out.

    Lines are of one kind if they are equal before their arguments are put in; so kinds, and with
    them the memory, are bounded by the source.

    Args:
        logger: Where lines go.
        clock: Source of time.
        period_s: How long a kind keeps quiet after a line.

    Threads: any. Cost: under 1 us for a line that is left out.
    """

    def __init__(self, logger: logging.Logger, clock: Clock, *, period_s: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._period_s = period_s
        self._lock = threading.Lock()
        self._quiet_until_s: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def warning(self, text: str, *args: object, with_traceback: bool = False) -> None:
        """Log `text % args` as a warning, or count it.

        Args:
            text: The kind, as for `logging`.
            args: As for `logging`.
            with_traceback: Add the exception that is being handled.
        """
        with self._lock:
            now_s = self._clock.now_s()
            if now_s < self._quiet_until_s.get(text, now_s):
                self._num_left_out[text] = self._num_left_out.get(text, 0) + 1
                return
            self._quiet_until_s[text] = now_s + self._period_s
            num_left_out = self._num_left_out.pop(text, 0)
        if num_left_out:
            text, args = (
                f"{text} (and %d times more since the last such line)",
                (*args, num_left_out),
            )
        self._logger.warning(text, *args, exc_info=with_traceback, stacklevel=2)
