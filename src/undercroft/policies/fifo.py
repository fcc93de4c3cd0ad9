"""First in, first out: what was stored first goes first, used or not.

Source: folklore; the floor of every comparison, and what the others are improvements of.

Departure: a victim that the level passes over, because it is pinned, is queued anew.

Prefixes: the chunks that one request stores go leaf first, as it inserts them deepest first. What a
later request adds to them is newer and outlives them: it is of no use then, until its turn comes or
the prefix is computed again. FIFO has no means against that; it is what LRU's touches are for.
"""

from __future__ import annotations

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue
from undercroft.policies.steady_queue import SteadyQueue

__all__ = ["Fifo"]


class Fifo(SteadyQueue):
    """First in, first out.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. FIFO has no use for it; every policy
            takes it, so that they are interchangeable.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident beyond its key.
    """

    __slots__ = ()
    name = "fifo"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(f"policy fifo: capacity_chunks is {capacity_chunks}; give 1 or more")
        super().__init__()

    on_insert = KeyQueue.push
    victims = SteadyQueue.offer

    def on_hit(self, key: ChunkKey) -> None:
        """It keeps its place, unless it was passed over."""
        if key not in self:
            raise Bug(f"fifo: key {key.hex()} is not resident")
        self.use(key)

    def on_evict(self, key: ChunkKey) -> None:
        """Forgotten."""
        self.remove(key)
        self.forget(key)

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten."""
        self.discard(key)
        self.forget(key)
