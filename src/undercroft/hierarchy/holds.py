"""Pins that requests have on what they were promised, until they load it, end, or wait too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["Holds"]

_READY = int(SlotState.READY)


class Holds:
    """One pin a slot and request. Threads: the scheduler's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.requests: dict[str, Request] = {}
        """Those that hold something."""

    def add(self, request: Request, slot: int, key: ChunkKey) -> None:
        """Pin a READY slot, which `request` does not hold yet."""
        self._pool.slots.pin(slot)
        if not request.holds:
            self.requests[request.id] = request
        request.holds[slot] = key

    def add_hits(self, requests: Iterable[Request]) -> None:
        """Pin what this step's lookups found for `requests`, before anything can be evicted."""
        find, states = self._pool.find, self._pool.slots.states
        for request in requests:
            for key in request.unsettled_hits():
                slot = find(key)
                if slot >= 0 and states[slot] >= _READY and slot not in request.holds:
                    self.add(request, slot, key)

    def drop(self, request: Request, slots: Sequence[int]) -> None:
        """Take away those of `request`'s pins that are on `slots`."""
        for slot in slots:
            if request.holds.pop(slot, None) is not None:
                self._pool.unpin(slot)
        if not request.holds:
            self.requests.pop(request.id, None)

    def drop_all(self, request: Request) -> None:
        """Take away `request`'s pins; this step's hits so far get none either."""
        request.num_settled = len(request.asked)
        if not request.holds:
            return
        holds, request.holds = request.holds, {}
        self.requests.pop(request.id, None)
        for slot in holds:
            self._pool.unpin(slot)
