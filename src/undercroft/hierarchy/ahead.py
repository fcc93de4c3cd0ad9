"""Reads begun while a request still queues behind others, before its first lookup.

A scout walks the request's keys in its place. It pins nothing, waits for nothing, and takes half of
the room that is left at most, so it is in nobody's way: what it brings up is as evictable as any
other chunk, newest first in line to stay.
"""

from __future__ import annotations

from collections.abc import Callable

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Answer, Request
from undercroft.hierarchy.restore import Restores
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["Ahead"]


class Ahead:
    """Looks, and reads, for requests whose turn has not come. Threads: the scheduler's."""

    def __init__(self, pool: Pool, restores: Restores) -> None:
        self._pool = pool
        self._restores = restores
        self._scouts: list[Request] = []

    def scout(
        self,
        request_id: str,
        position_of: Callable[[ChunkKey], int | None],
        group_of: Callable[[ChunkKey], object] | None = None,
    ) -> Request | None:
        """Who walks in place of a queued request; None if no level below could have anything."""
        if not self._restores.has_levels:
            return None
        scout = Request(f"{request_id} (queued)", position_of, group_of)
        self._scouts.append(scout)
        return scout

    def finds(self, key: ChunkKey, scout: Request) -> bool:
        """Whether any level has the chunk of `key`; noted for `admit`."""
        slot = self._pool.find(key)
        if slot >= 0:
            ready = self._pool.slots.states[slot] >= SlotState.READY
            scout.note(key, Answer.HIT if ready else Answer.COMING)
            return True
        found = self._restores.level_with(key) is not None
        scout.note(key, Answer.BELOW if found else Answer.MISS)
        return found

    def admit(self, step: int, now_s: float) -> None:
        """Admit the restores of those who wait now, then begin the reads of this step's scouts."""
        self._restores.admit(step, now_s)
        scouts, self._scouts = self._scouts, []
        for scout in scouts:
            self._restores.read_ahead(scout, now_s)
