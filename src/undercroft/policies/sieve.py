"""SIEVE: a hand that goes round from the oldest to the newest, and spares what was used since.

Source: Zhang, Yang, Yue, Vigfusson & Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key
Eviction Algorithm for Web Caches", NSDI '24, algorithm 1. The paper's one queue is two here, cut
where the hand is: what it has spared, older, and what it has yet to look at. To spare a key is to
move it from the front of the one to the end of the other. Departures:

* where the hand would pass more than `MAX_PASSED` visited keys in a row, it stops and takes one all
  the same, so that no call takes long;
* a pinned victim that the level passes over is touched (`on_hit`), and so counts as visited.

Prefixes: one request's chunks lie leaf first. What the hand has spared keeps its old place, so a
prefix may be looked at, and go, before what a later request added to it: only while it is used at
least as often as the hand comes round is it safe. SIEVE also lets chunks that were used once more
outlive whole rounds; of sessions that are over there are many such.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import MAX_PASSED, KeyQueue, SegmentStore

__all__ = ["Sieve"]


class Sieve:
    """One bit a key, one hand.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. SIEVE has no use for it; every policy
            takes it, so that they are interchangeable.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident beyond its key. Threads: one.
    """

    name = "sieve"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(f"policy sieve: capacity_chunks is {capacity_chunks}; give 1 or more")
        self._store = SegmentStore()
        self._spared = KeyQueue(self._store, 0)
        self._ahead = KeyQueue(self._store, 1)

    def __contains__(self, key: ChunkKey) -> bool:
        return self._store.owner_of(key) >= 0

    def on_insert(self, key: ChunkKey) -> None:
        """At the newest end, not visited."""
        self._ahead.push(key)

    def on_hit(self, key: ChunkKey) -> None:
        """Visited; it keeps its place."""
        if self._store.mark(key) < 0:
            raise Bug(f"sieve: key {key.hex()} is not resident")

    def on_evict(self, key: ChunkKey) -> None:
        """The hand goes on to the first that is not visited; then `key` is forgotten."""
        if key not in self:
            raise Bug(f"sieve: key {key.hex()} is not resident")
        self._go_on()
        self._remove(key)

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten."""
        if key in self:
            self._remove(key)

    def victims(self) -> Iterator[ChunkKey]:
        """From the hand on and round, what is not visited; then what is, in the same order."""
        early: set[ChunkKey] = set()
        ahead, spared = self._ahead, self._spared
        return chain(
            ahead.lap(0, early), spared.lap(0, early), ahead.marked(early), spared.marked(early)
        )

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """From the hand on and round, visited or not."""
        yield from self._ahead.runs(stride)
        yield from self._spared.runs(stride)

    def _go_on(self) -> None:
        left = MAX_PASSED
        while left > 0:
            left -= self._ahead.pass_marked(self._spared, left)
            if self._ahead.first() is not None or self._spared.first() is None:
                return
            self._ahead, self._spared = self._spared, self._ahead

    def _remove(self, key: ChunkKey) -> None:
        is_ahead = key in self._ahead
        (self._ahead if is_ahead else self._spared).remove(key)
        if is_ahead and self._ahead.first() is None:
            self._ahead, self._spared = self._spared, self._ahead
