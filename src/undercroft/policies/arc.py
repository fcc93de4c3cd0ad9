"""ARC, the adaptive replacement cache: balances recency against frequency by itself.

Source: Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03, figure 4;
T1, T2, B1, B2, c and p are the paper's. Departures, all because the level chooses a victim before
it says what for:

* a ghost hit moves p when the chunk is inserted, so after the eviction that made room for it;
* REPLACE does not know whether the newcomer is in B2, so it takes from T1 only where |T1| > p
  (the paper: also where |T1| = p and the newcomer is in B2);
* every evicted key becomes a ghost, and ghosts are trimmed at the next insertion. At capacity that
  leaves the paper's directory: |T1| + |B1| <= c, and 2c keys in all;
* a pinned victim that the level steps over is touched (`on_hit`), which moves it to T2.

As with LRU the caller touches a request's chunks deepest first, and it does not call `on_hit` for
the request that inserted a chunk: to ARC that would be a second use.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue, SegmentStore

__all__ = ["Arc"]

_T1, _T2, _B1, _B2 = range(4)  # used once, used again; the ghosts of either


class Arc:
    """Adaptive replacement cache.

    Args:
        capacity_chunks: How many chunks the level holds, > 0. It bounds the ghosts: residents and
            ghosts together are at most twice as many (or as many as there are residents, should
            the level hold more than it said).

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: 65-130 bytes a resident or ghost beyond its key. Threads: one.
    """

    name = "arc"

    def __init__(self, capacity_chunks: int) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(f"policy arc: capacity_chunks is {capacity_chunks}; give 1 or more")
        self._capacity = capacity_chunks
        self._store = SegmentStore()
        self._queues = tuple(KeyQueue(self._store, queue_id) for queue_id in (_T1, _T2, _B1, _B2))
        self._lengths = [0, 0, 0, 0]
        self._target_t1 = 0.0  # the paper's p

    def __contains__(self, key: ChunkKey) -> bool:
        return 0 <= self._store.owner_of(key) < _B1

    def on_insert(self, key: ChunkKey) -> None:
        """Into T1, or into T2 if it comes back as a ghost, which moves p."""
        owner = self._store.owner_of(key)
        if owner < 0:
            self._queues[_T1].push(key)
            self._lengths[_T1] += 1
        elif owner >= _B1:
            self._adapt(owner)
            self._move(key, owner, _T2)
        else:
            raise Bug(f"arc: key {key.hex()} is resident already")
        self._trim_ghosts()

    def on_hit(self, key: ChunkKey) -> None:
        """To the newest end of T2."""
        owner = self._store.owner_of(key)
        if owner == _T2:
            self._queues[_T2].pull(key)
        elif owner == _T1:
            self._move(key, _T1, _T2)
        else:
            raise Bug(f"arc: key {key.hex()} is not resident")

    def on_evict(self, key: ChunkKey) -> None:
        """Becomes a ghost: T1's in B1, T2's in B2."""
        owner = self._store.owner_of(key)
        if owner == _T1:
            self._move(key, _T1, _B1)
        elif owner == _T2:
            self._move(key, _T2, _B2)
        else:
            raise Bug(f"arc: key {key.hex()} is not resident")

    def on_drop(self, key: ChunkKey) -> None:
        """Forgotten, resident or ghost."""
        owner = self._store.owner_of(key)
        if owner >= 0:
            self._queues[owner].remove(key)
            self._lengths[owner] -= 1

    def victims(self) -> Iterator[ChunkKey]:
        """REPLACE again and again: T1 down to its target, then T2, then what is left."""
        t1, t2 = iter(self._queues[_T1]), self._queues[_T2]
        num_over_target = self._lengths[_T1] - int(self._target_t1)
        if num_over_target <= 0:
            return chain(t2, t1)
        return chain(islice(t1, num_over_target), t2, t1)

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """T1 first as long as it is over its target, else T2; each whole."""
        t1, t2 = self._queues[_T1], self._queues[_T2]
        is_over = self._lengths[_T1] > int(self._target_t1)
        for queue in (t1, t2) if is_over else (t2, t1):
            yield from queue.runs(stride)

    def _move(self, key: ChunkKey, source: int, target: int) -> None:
        queues, lengths = self._queues, self._lengths
        queues[target].pull(key, queues[source])
        lengths[source] -= 1
        lengths[target] += 1

    def _adapt(self, ghost_owner: int) -> None:
        """Move p towards the list whose ghost came back."""
        num_b1, num_b2 = self._lengths[_B1], self._lengths[_B2]
        if ghost_owner == _B1:
            step = max(1.0, num_b2 / num_b1)
            self._target_t1 = min(float(self._capacity), self._target_t1 + step)
        else:
            step = max(1.0, num_b1 / num_b2)
            self._target_t1 = max(0.0, self._target_t1 - step)

    def _trim_ghosts(self) -> None:
        """Forget the oldest ghosts down to the paper's bounds; one or two, once full."""
        lengths, capacity = self._lengths, self._capacity
        while lengths[_T1] + lengths[_B1] > capacity and lengths[_B1]:
            self._forget_oldest(_B1)
        while sum(lengths) > 2 * capacity and lengths[_B1] + lengths[_B2]:
            self._forget_oldest(_B2 if lengths[_B2] else _B1)

    def _forget_oldest(self, owner: int) -> None:
        self._queues[owner].pop_first()
        self._lengths[owner] -= 1
