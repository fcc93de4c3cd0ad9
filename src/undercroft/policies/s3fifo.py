"""S3-FIFO: a small queue for newcomers, a main one with second chances, and ghosts.

Source: Yang, Zhang, Qiu, Yue & Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP '23,
algorithm 1; S, M, G and freq are the paper's, and so are S's tenth of the cache and as many ghosts
as M may have keys. freq is a key's mark. Departures:

* one use while in S takes a key to M, where the paper asks for two: whatever a request adds to a
  prefix is stored when that prefix is used, so one use is what tells that it has got children;
* one call passes at most `MAX_PASSED` used keys of either queue: then one goes that was used;
* the level chooses victims before it says what for, and several at once: |S| is compared with its
  target before the newcomers are in it, and what of S was used counts until it has moved;
* a pinned victim that the level passes over is touched (`on_hit`), which is a use.

Prefixes: one request's chunks lie leaf first. A prefix that a later request adds to was used, so it
moves to M and stays while what was added passes through S. In M both go round; a prefix is used
whenever anything below it is, and goes before it only where nothing of both was used for a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import MAX_PASSED, KeyQueue, SegmentStore

__all__ = ["S3Fifo"]

_S, _M, _G = range(3)
_SMALL_SHARE = 10
_MOST_FREQ = 3


class S3Fifo:
    """Three FIFO queues.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. A tenth of it is the target of S, the
            rest bounds the ghosts.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident or ghost beyond its key. Threads: one.
    """

    name = "s3fifo"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(
                f"policy s3fifo: capacity_chunks is {capacity_chunks}; give 1 or more"
            )
        self._target_small = max(1, capacity_chunks // _SMALL_SHARE)
        self._most_ghosts = max(1, capacity_chunks - self._target_small)
        self._store = SegmentStore()
        self._small = KeyQueue(self._store, _S)
        self._main = KeyQueue(self._store, _M)
        self._ghosts = KeyQueue(self._store, _G)
        self._num_small = 0
        self._num_ghosts = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return 0 <= self._store.owner_of(key) < _G

    def on_insert(self, key: ChunkKey) -> None:
        """Into S, or into M if it is a ghost."""
        owner = self._store.owner_of(key)
        if owner < 0:
            self._small.push(key)
            self._num_small += 1
        elif owner == _G:
            self._main.pull(key, self._ghosts)
            self._num_ghosts -= 1
        else:
            raise Bug(f"s3fifo: key {key.hex()} is resident already")

    def on_hit(self, key: ChunkKey) -> None:
        """Its freq rises; it keeps its place."""
        if not 0 <= self._store.mark(key, _MOST_FREQ) < _G:  # a ghost's mark means nothing
            raise Bug(f"s3fifo: key {key.hex()} is not resident")

    def on_evict(self, key: ChunkKey) -> None:
        """What was passed on the way to `key` moves; then `key` becomes a ghost if it was in S."""
        owner = self._store.owner_of(key)
        if not 0 <= owner < _G:
            raise Bug(f"s3fifo: key {key.hex()} is not resident")
        if self._num_small >= self._target_small:
            self._num_small -= self._small.pass_marked(self._main, MAX_PASSED)
            owner = self._store.owner_of(key)
        if owner == _M:
            self._main.pass_marked(self._main, MAX_PASSED, keep=_MOST_FREQ)
            self._main.remove(key)
            return
        self._num_small -= 1
        self._ghosts.pull(key, self._small)
        self._num_ghosts += 1
        if self._num_ghosts > self._most_ghosts:
            self._ghosts.pop_first()
            self._num_ghosts -= 1

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten, resident or ghost."""
        owner = self._store.owner_of(key)
        if owner == _S:
            self._small.remove(key)
            self._num_small -= 1
        elif owner == _M:
            self._main.remove(key)
        elif owner == _G:
            self._ghosts.remove(key)
            self._num_ghosts -= 1

    def victims(self) -> Iterator[ChunkKey]:
        """Eviction from S down to its target, then from M, then what is left of S."""
        early: set[ChunkKey] = set()
        small, main = self._small, self._main
        young = small.lap(0, early)
        laps = (main.lap(freq, early) for freq in range(1, _MOST_FREQ + 1))
        if self._num_small < self._target_small:
            order = (main.lap(0, early), *laps, young, small.marked(early))
        else:
            # What is passed in S moves to M with freq 0: behind M's first lap, before its second.
            over = self._num_small - self._target_small + 1
            order = (islice(young, over), main.lap(0, early), small.marked(early), *laps, young)
        return chain.from_iterable(order)

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """S first as long as it has reached its target, else M; each whole."""
        queues = (self._small, self._main)
        for queue in queues if self._num_small >= self._target_small else queues[::-1]:
            yield from queue.runs(stride)
