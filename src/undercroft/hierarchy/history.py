"""Notes what became of chunks, and has it written down by a thread of its own.

Only what cannot be seen in the store itself: chunks that left a lower level or never reached it,
lookups that were too late, levels that went down. Nothing here can fail a caller or keep it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

from undercroft.clock import SystemClock
from undercroft.errors import KvError
from undercroft.tiers.disk.history import HistoryFile, Incident, key_part

__all__ = ["History", "Note", "note_nothing"]

_LOG = logging.getLogger(__name__)
_MAX_WAITING = 65536
_INTERVAL_S = 1.0
_REOPEN_TICKS = 10


class Note(Protocol):
    """What those who know call: cheap, never fails."""

    def __call__(self, level: str, event: str, reason: str, /, *keys: bytes) -> None:
        """Something happened at `level`, to the chunks of `keys` if it is about some."""
        ...


def note_nothing(_level: str, _event: str, _reason: str, /, *_keys: bytes) -> None:
    """For those without a history."""


class History:
    """Collects notes and writes them to a file, a batch a second.

    Args:
        file: Where to; opened and closed by the thread here.
        clock: What time it is for people.

    Bound: 65,536 notes wait at most, the oldest go first. Threads: `note` from any, under 1 us.
    """

    def __init__(self, file: HistoryFile, clock: SystemClock) -> None:
        self._file = file
        self._clock = clock
        self._waiting: deque[tuple[int, str, str, str, bytes]] = deque(maxlen=_MAX_WAITING)
        self._stop = threading.Event()
        self._ticks_to_open = 0
        self._thread = threading.Thread(target=self._run, name="undercroft-history", daemon=True)

    def start(self) -> None:
        """Begin to write, at once: a store that has filled up has no room for the file."""
        self.note("", "opened", "other")
        self._thread.start()

    def note(self, level: str, event: str, reason: str, /, *keys: bytes) -> None:
        """See `Note`."""
        when = int(self._clock.unix_s())
        self._waiting.extend([(when, level, event, reason, key) for key in keys or (b"",)])

    def close(self, deadline_s: float) -> None:
        """Write what waits and let the file go; back by `deadline_s` though the disk hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline_s - self._clock.now_s()))

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._tick()
        self._ticks_to_open = 0
        self._tick()
        self._file.close()

    def _tick(self) -> None:
        if not self._waiting:
            return
        try:
            if self._is_open():
                self._file.add(self._take())
        except (OSError, KvError) as error:
            _LOG.debug("the history cannot be written: %s", error)
            self._file.close()

    def _is_open(self) -> bool:
        if self._file.is_there():
            return True
        if self._ticks_to_open > 0:
            self._ticks_to_open -= 1
            return False
        self._ticks_to_open = _REOPEN_TICKS
        return self._file.open()

    def _take(self) -> list[Incident]:
        taken: list[Incident] = []
        while self._waiting:
            when, level, event, reason, key = self._waiting.popleft()
            taken.append(Incident(when, event, reason, level, key_part(key)))
        return taken
