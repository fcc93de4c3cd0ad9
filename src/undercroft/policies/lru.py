"""Least recently used: the resident that was not used for longest goes first.

Source: folklore; the baseline of every comparison. Departures: none. The *caller* makes it prefix
aware: it touches the chunks of a request deepest first, so that a root ends newer than everything
below it and no chunk outlives the prefix that it needs ("leaf-first", docs/reference/policies.md).
"""

from __future__ import annotations

from undercroft.errors import ConfigError
from undercroft.policies.key_queue import KeyQueue

__all__ = ["Lru"]


class Lru(KeyQueue):
    """Least recently used: a queue, and nothing else.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. LRU has no use for it; every policy
            takes it, so that they are interchangeable.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident beyond its key.
    """

    __slots__ = ()
    name = "lru"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(f"policy lru: capacity_chunks is {capacity_chunks}; give 1 or more")
        super().__init__()

    # The same functions under the seam's names, not calls to them: a call costs 50 ns.
    on_insert = KeyQueue.push
    on_hit = KeyQueue.pull
    on_evict = KeyQueue.remove
    on_drop = KeyQueue.discard
    victims = KeyQueue.__iter__
    # And `runs`, as it is.
