"""2Q: what comes once passes through a queue, what comes back out of it is kept as LRU keeps it.

Source: Johnson & Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
Algorithm", VLDB '94, the full version; A1in, A1out and Am are the paper's, and so are the sizes
that it recommends: A1in a quarter of the cache, A1out as many ghosts as half of it. Departures:

* a victim that the level passes over, because it is pinned, moves to the newest end of its queue
  (the paper: a use within A1in moves nothing);
* the level chooses a victim before it says what for, so |A1in| is compared with its target before
  the newcomer is in it.

Prefixes: A1in goes leaf first, in the order of insertion, and Am as LRU does. A prefix in A1in that
a later request adds to is not moved by that, and goes before what was added; both are ghosts then
for a while, and what comes back goes to Am, in the right order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue, SegmentStore
from undercroft.policies.steady_queue import SteadyQueue

__all__ = ["TwoQ"]

_A1IN, _AM, _A1OUT = range(3)  # used once lately, used again, ghosts of A1in
_IN_SHARE, _OUT_SHARE = 4, 2  # of the capacity: a quarter, a half


class TwoQ:
    """Two queues.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. A quarter of it is the target of
            A1in, half of it bounds the ghosts.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident or ghost beyond its key. Threads: one.
    """

    name = "2q"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(f"policy 2q: capacity_chunks is {capacity_chunks}; give 1 or more")
        self._most_in = max(1, capacity_chunks // _IN_SHARE)  # the paper's Kin
        self._most_out = max(1, capacity_chunks // _OUT_SHARE)  # and Kout
        self._store = SegmentStore()
        self._a1in = SteadyQueue(self._store, _A1IN)
        self._am = KeyQueue(self._store, _AM)
        self._a1out = KeyQueue(self._store, _A1OUT)
        self._num_in = 0
        self._num_out = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return 0 <= self._store.owner_of(key) < _A1OUT

    def on_insert(self, key: ChunkKey) -> None:
        """Into A1in, or into Am if it is a ghost."""
        owner = self._store.owner_of(key)
        if owner < 0:
            self._a1in.push(key)
            self._num_in += 1
        elif owner == _A1OUT:
            self._am.pull(key, self._a1out)
            self._num_out -= 1
        else:
            raise Bug(f"2q: key {key.hex()} is resident already")

    def on_hit(self, key: ChunkKey) -> None:
        """To the newest end of Am; in A1in it keeps its place, unless it was passed over."""
        owner = self._store.owner_of(key)
        if owner == _AM:
            self._am.pull(key)
        elif owner == _A1IN:
            self._a1in.use(key)
        else:
            raise Bug(f"2q: key {key.hex()} is not resident")

    def on_evict(self, key: ChunkKey) -> None:
        """Out of A1in it becomes a ghost; out of Am it is forgotten."""
        owner = self._store.owner_of(key)
        if owner == _A1IN:
            self._a1in.forget(key)
            self._a1out.pull(key, self._a1in)
            self._num_in -= 1
            self._num_out += 1
            if self._num_out > self._most_out:
                self._a1out.pop_first()
                self._num_out -= 1
        elif owner == _AM:
            self._am.remove(key)
        else:
            raise Bug(f"2q: key {key.hex()} is not resident")

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten, resident or ghost."""
        owner = self._store.owner_of(key)
        if owner == _A1IN:
            self._a1in.forget(key)
            self._a1in.remove(key)
            self._num_in -= 1
        elif owner == _AM:
            self._am.remove(key)
        elif owner == _A1OUT:
            self._a1out.remove(key)
            self._num_out -= 1

    def victims(self) -> Iterator[ChunkKey]:
        """A1in down to its target, then Am, then what is left."""
        a1in = self._a1in.offer()
        num_over_target = max(0, self._num_in - self._most_in)
        return chain(islice(a1in, num_over_target), self._am, a1in)

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """A1in first as long as it is over its target, else Am; each whole."""
        queues = (self._a1in, self._am)
        for queue in queues if self._num_in > self._most_in else queues[::-1]:
            yield from queue.runs(stride)
