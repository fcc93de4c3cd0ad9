"""A queue whose keys keep their place when they are used: what FIFO is, and 2Q's A1in.

The level passes over pinned victims and touches them, so that they are out of the way (`victims` in
`policies.base`). Where a use moves nothing, they would be passed over at every eviction. So the
queue remembers which keys it has handed out last: one of those that is used, and was not evicted,
goes to the newest end.
"""

from __future__ import annotations

from collections.abc import Iterator

from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue, SegmentStore

__all__ = ["MAX_OFFERED", "SteadyQueue"]

MAX_OFFERED = 1024
"""Keys handed out last that are remembered; a level passes over some hundred in one call."""


class SteadyQueue(KeyQueue):
    """Keys in order of arrival.

    Args:
        store: As `KeyQueue`'s.
        queue_id: As `KeyQueue`'s.

    Memory: as `KeyQueue`, and up to `MAX_OFFERED` pointers to keys.
    """

    __slots__ = ("_offered",)

    def __init__(self, store: SegmentStore | None = None, queue_id: int = 0) -> None:
        super().__init__(store, queue_id)
        self._offered: set[ChunkKey] = set()

    def offer(self) -> Iterator[ChunkKey]:
        """The keys, oldest first, lazily; those of the call before count as offered no more."""
        self._offered.clear()  # now, not when the first key is asked for
        return self._offers()

    def _offers(self) -> Iterator[ChunkKey]:
        offered = self._offered
        for key in self:
            if len(offered) < MAX_OFFERED:
                offered.add(key)
            yield key

    def use(self, key: ChunkKey) -> None:
        """`key`, which is in this queue, was used; if it was passed over just now, it moves."""
        if key in self._offered:
            self._offered.remove(key)
            self.pull(key)

    def forget(self, key: ChunkKey) -> None:
        """`key` leaves the queue: as a newcomer it would not have been passed over."""
        self._offered.discard(key)
