"""Chunks that a running request has just stored or loaded, and that must not be evicted for it.

A prompt is stored over several steps, root first. Told to the policy as they come, its deepest
chunks would look newest and its root would be evicted first, which makes the rest useless. So they
stay FRESH, which is not evictable, until the request ends or has stored nothing for some steps, and
are then inserted leaf first. When room is needed, other requests' fresh chunks are listed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["Fresh"]

_IDLE_STEPS = 8


@dataclass(slots=True)
class _Entry:
    step: int
    chunks: list[tuple[ChunkKey, int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


class Fresh:
    """The unlisted chunks, by request. Threads: the scheduler's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._entries: dict[str, _Entry] = {}

    def add(self, request: Request, chunks: list[tuple[ChunkKey, int]], step: int) -> None:
        """`chunks`, in prefix order, are in their slots as of `step`."""
        entry = self._entries.setdefault(request.id, _Entry(step))
        entry.step = step
        entry.chunks += chunks
        set_state = self._pool.slots.set_state
        for _, slot in chunks:
            set_state(slot, SlotState.FRESH)

    def keep(self, request: Request, slots: list[int], step: int) -> None:
        """`request` has loaded `slots`: its own stores must not evict what they continue."""
        entry = self._entries.setdefault(request.id, _Entry(step))
        entry.step = step
        entry.kept += slots
        for slot in slots:
            self._pool.slots.pin(slot)

    def settle(self, request_id: str) -> None:
        """Tell the policy of a request's chunks, deepest first."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        states, make_ready = self._pool.slots.states, self._pool.make_ready
        for key, slot in reversed(entry.chunks):
            if states[slot] == SlotState.FRESH:
                make_ready(key, slot)
        for slot in entry.kept:
            self._pool.unpin(slot)

    def settle_others(self, request_id: str) -> bool:
        """Make every other request's chunks evictable; whether there were any."""
        others = [other for other in self._entries if other != request_id]
        for other in others:
            self.settle(other)
        return bool(others)

    def settle_idle(self, step: int) -> None:
        """Settle requests that have stored nothing for a while."""
        idle = [r for r, entry in self._entries.items() if step - entry.step >= _IDLE_STEPS]
        for request_id in idle:
            self.settle(request_id)

    def forget_all(self) -> None:
        """At a reset: the keys were voided."""
        for request_id in list(self._entries):
            self.settle(request_id)
