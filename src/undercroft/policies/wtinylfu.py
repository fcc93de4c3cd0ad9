"""W-TinyLFU: a newcomer stays only if it was used more often than what would go for it.

Source: Einziger, Friedman & Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS
13(4), 2017: a window (LRU) of 1 % of the cache in front of a segmented LRU, whose protected part is
four fifths of it; counts of uses in a sketch (`policies.sketch`, which names what is different
there). What falls out of the window competes with the main part's oldest, and equals lose.
Departures:

* the level chooses victims before it says what for, and several at once. So the window's oldest
  compete, one for each victim; if more is asked for than the window holds, the rest comes from the
  main part, and newcomers that then find room need not compete;
* no doorkeeper (the paper's Bloom filter in front of the sketch) and no adaptive window;
* a pinned victim that the level passes over is touched (`on_hit`), which counts as a use.

Prefixes: each of the three parts is kept as LRU keeps it, leaf first, and a prefix is used as often
as anything below it, so it does not lose where its child wins, counters that two keys share and
halve at different times aside. But what was used often and is over, a session that has ended, is
held long after: unsafe on agentic traffic (docs/reference/policies.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue, SegmentStore
from undercroft.policies.sketch import FrequencySketch

__all__ = ["WTinyLfu"]

_WINDOW, _PROBATION, _PROTECTED = range(3)
_WINDOW_SHARE = 100
_PROTECTED_RATIO = 0.8


class WTinyLfu:
    """LRU with a contest at the door.

    Args:
        capacity_chunks: How many chunks the level holds, > 0.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident beyond its key, and 32-64 bytes a chunk of the capacity, 64 MiB
    at most; it keeps no ghosts. Threads: one.
    """

    name = "wtinylfu"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(
                f"policy wtinylfu: capacity_chunks is {capacity_chunks}; give 1 or more"
            )
        self._target_window = max(1, capacity_chunks // _WINDOW_SHARE)
        self._target_protected = int(_PROTECTED_RATIO * (capacity_chunks - self._target_window))
        self._store = SegmentStore()
        self._queues = tuple(KeyQueue(self._store, i) for i in (_WINDOW, _PROBATION, _PROTECTED))
        self._lengths = [0, 0, 0]
        self._sketch = FrequencySketch(capacity_chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return self._store.owner_of(key) >= 0

    def on_insert(self, key: ChunkKey) -> None:
        """Into the window; what is too much there goes on probation."""
        self._queues[_WINDOW].push(key)
        self._lengths[_WINDOW] += 1
        if self._lengths[_WINDOW] > self._target_window:
            self._shift_oldest(_WINDOW)
        self._sketch.use(key)

    def on_hit(self, key: ChunkKey) -> None:
        """To the newest end of its part; from probation, of the protected."""
        owner = self._store.owner_of(key)
        if owner < 0:
            raise Bug(f"wtinylfu: key {key.hex()} is not resident")
        if owner == _PROBATION:
            self._move(key, _PROBATION, _PROTECTED)
            if self._lengths[_PROTECTED] > self._target_protected:
                self._shift_oldest(_PROTECTED)
        else:
            self._queues[owner].pull(key)
        self._sketch.use(key)

    def on_evict(self, key: ChunkKey) -> None:
        """Forgotten; only its count stays."""
        owner = self._store.owner_of(key)
        if owner < 0:
            raise Bug(f"wtinylfu: key {key.hex()} is not resident")
        self._queues[owner].remove(key)
        self._lengths[owner] -= 1

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten, and its count with it."""
        if key in self:
            self.on_evict(key)
        self._sketch.forget(key)

    def victims(self) -> Iterator[ChunkKey]:
        """The loser of the window's oldest and the main part's oldest, again and again."""
        window, probation, protected = self._queues
        main = chain(probation, protected)
        if self._lengths[_WINDOW] < self._target_window:
            return chain(main, window)
        return self._losers(iter(window), main)

    def _losers(self, window: Iterator[ChunkKey], main: Iterator[ChunkKey]) -> Iterator[ChunkKey]:
        count = self._sketch.count
        winners = []
        oldest = next(main, None)
        for newcomer in window:
            if oldest is None or count(newcomer) <= count(oldest):
                yield newcomer
                continue
            winners.append(newcomer)
            yield oldest
            oldest = next(main, None)
        if oldest is not None:
            yield oldest
        yield from main
        yield from winners

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """Probation, the protected, the window; each whole."""
        for owner in (_PROBATION, _PROTECTED, _WINDOW):
            yield from self._queues[owner].runs(stride)

    def _shift_oldest(self, owner: int) -> None:
        """The oldest of the window or of the protected goes on probation."""
        oldest = self._queues[owner].first()
        if oldest is not None:
            self._move(oldest, owner, _PROBATION)

    def _move(self, key: ChunkKey, source: int, target: int) -> None:
        self._queues[target].pull(key, self._queues[source])
        self._lengths[source] -= 1
        self._lengths[target] += 1
