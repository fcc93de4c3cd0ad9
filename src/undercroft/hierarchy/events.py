"""Chunks that came to or left a level, for engines that publish cache events."""

from __future__ import annotations

from typing import NamedTuple

from undercroft.keys import ChunkKey

__all__ = ["LevelEvent", "LevelEvents"]


class LevelEvent(NamedTuple):
    """`keys` were stored at, or removed from, the level of that name."""

    level: str
    keys: list[ChunkKey]
    removed: bool


class LevelEvents:
    """Collects events until taken; collects nothing when off, so that nothing piles up."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[LevelEvent] = []

    def add(self, level: str, key: ChunkKey, *, removed: bool) -> None:
        """Note one chunk; joins the last event when it is of the same kind."""
        if not self.enabled:
            return
        last = self._events[-1] if self._events else None
        if last is not None and last.level == level and last.removed == removed:
            last.keys.append(key)
        else:
            self._events.append(LevelEvent(level, [key], removed))

    def take(self) -> list[LevelEvent]:
        """All events since the last call, in order."""
        events, self._events = self._events, []
        return events
