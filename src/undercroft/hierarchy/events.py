"""Chunks that came to or left a level, for engines that publish cache events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from undercroft.keys import ChunkKey

__all__ = ["LevelEvent", "LevelEvents"]

_MAX_TOLD = 1024
"""Chunks found at start that one step tells of; a level may hold a million."""


class LevelEvent(NamedTuple):
    """`keys` were stored at, or removed from, the level of that name."""

    level: str
    keys: list[ChunkKey]
    removed: bool


class LevelEvents:
    """Collects events until taken; collects nothing when off, so that nothing piles up.

    Who applies them in order to an empty set knows what each level holds, also what it held when
    this process began.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[LevelEvent] = []
        self._found: dict[tuple[str, ChunkKey], None] = {}
        self._is_in_a_hurry = False

    @property
    def has_more(self) -> bool:
        """Whether another step has something to tell, also if the engine is idle."""
        return self._is_in_a_hurry or bool(self._found)

    def hurry(self) -> None:
        """What was just noted cannot wait for the next request: the engine may be idle for long."""
        self._is_in_a_hurry = bool(self._events)

    def add(self, level: str, key: ChunkKey, *, removed: bool) -> None:
        """Note one chunk; joins the last event when it is of the same kind."""
        if not self.enabled:
            return
        if self._found:
            was_untold = (level, key) in self._found
            self._found.pop((level, key), None)
            if was_untold and removed:
                return
        last = self._events[-1] if self._events else None
        if last is not None and last.level == level and last.removed == removed:
            last.keys.append(key)
        else:
            self._events.append(LevelEvent(level, [key], removed))

    def add_all(self, level: str, keys: Iterable[ChunkKey], *, removed: bool) -> None:
        """Note several, in order."""
        if self.enabled:
            for key in keys:
                self.add(level, key, removed=removed)

    def find(self, level: str, key: ChunkKey) -> None:
        """A chunk is there that nobody stored here: it is told of bit by bit, the last first."""
        if self.enabled:
            self._found[level, key] = None

    def tell_found(self) -> None:
        """Once a step: make events of some of what was found."""
        self._is_in_a_hurry = False  # this step's events are taken at its end
        for _ in range(min(len(self._found), _MAX_TOLD)):
            (level, key), _ = self._found.popitem()
            self.add(level, key, removed=False)

    def take(self) -> list[LevelEvent]:
        """All events since the last call, in order."""
        self._is_in_a_hurry = False
        events, self._events = self._events, []
        return events
