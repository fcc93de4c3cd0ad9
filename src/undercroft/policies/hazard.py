"""Hazard: who goes first is learned from how long prefixes like it wait for their next use.

For the end of every resident path it asks: how many hits a second of residence can be expected, at
best, from keeping it a while longer? That depends on the class of its last use (did it continue a
session, how did the request end, how often was it seen) and on how long ago that was, and it is
learned from the traffic: `reuse_curves`. Where it is least, chunks go, deepest first.

Source: own work, docs/explanation/design/0011-hazard.md; the index is Gittins' (1979), for hits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

from undercroft.errors import Bug, ConfigError
from undercroft.key_table import SHARD_SHIFT, KeyTable
from undercroft.keys import ChunkKey
from undercroft.policies.key_queue import KeyQueue
from undercroft.policies.known_prefixes import NUM_CLASSES, KnownPrefixes, Seen
from undercroft.policies.rehearsal import rehearse
from undercroft.policies.request_paths import Path, Paths
from undercroft.policies.reuse_curves import bucket_of

__all__ = ["Hazard"]

_MIN_WAITS = 300
"""Finished waits before what was learned is trusted."""
_MAX_LOOKS = 512
_MAX_TAKEN_BACK = 64
_ASIDE_S = 1.0


class Hazard:
    """The policy of one level.

    Args:
        capacity_chunks: How many chunks the level holds, > 0.
        known: What is known of prefixes, if other levels share it.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: see `KnownPrefixes` and `Paths`, and 70-110 bytes a resident beyond its key.
    Threads: one.
    """

    name = "hazard"

    def __init__(self, capacity_chunks: int, known: KnownPrefixes | None = None) -> None:
        if capacity_chunks <= 0:
            raise ConfigError(
                f"policy hazard: capacity_chunks is {capacity_chunks}; give 1 or more"
            )
        if known is None:
            known = KnownPrefixes.for_chunks(capacity_chunks)
        self.known = known
        self._paths = Paths(known.num_rows)
        known.in_use.append(self._paths.are_needed)
        self._shards = KeyTable().shards
        # Chunks that no request has told of: newly read from a lower level, found at the start.
        self._strays = KeyQueue()
        self._num_strays = 0
        self._current: Path | None = None
        self._awaited: dict[ChunkKey, int] = {}
        self._now_s = 0.0
        self._oldest: list[list[tuple[int, int]]] = [[] for _ in range(NUM_CLASSES)]
        self._newest: list[list[tuple[int, int]]] = [[] for _ in range(NUM_CLASSES)]
        self._picked: Path | None = None
        self._aside: deque[Path] = deque()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._shards[hash(key) >> SHARD_SHIFT] or key in self._strays

    # --- requests -----------------------------------------------------------------------------

    def on_request(self, keys: Sequence[ChunkKey], now_s: float, kind: int = 0) -> None:
        """See `Learning`."""
        if not keys:
            return
        seen = self.known.see(keys, now_s, kind)
        self._now_s = seen.now_s
        self._picked = None
        self._take_back(seen.now_s - _ASIDE_S)
        if not seen.keys:
            return
        absent = self._paths.absent(seen)
        if absent and self._num_strays:
            absent = [at for at in absent if not self._adopt(seen, at)]
        keys = seen.keys
        self._awaited = {keys[at]: at for at in absent}
        self._current = self._paths.add(seen)

    def _adopt(self, seen: Seen, at: int) -> bool:
        """Make a stray part of its path; whether it is one."""
        key, row = seen.keys[at], int(seen.rows[at])
        if key not in self._strays:
            return False
        self._strays.remove(key)
        self._num_strays -= 1
        self._shards[hash(key) >> SHARD_SHIFT][key] = row
        self._paths.adopt(row)
        return True

    # --- chunks -------------------------------------------------------------------------------

    def on_insert(self, key: ChunkKey) -> None:
        """Part of the path of the last request that used it, or a stray."""
        shard = self._shards[hash(key) >> SHARD_SHIFT]
        if key in shard:
            raise Bug(f"hazard: key {key.hex()} is resident already")
        at = self._awaited.pop(key, -1)
        path = self._current
        if at >= 0 and path is not None:
            row = int(path.rows[at])
        else:
            row = self.known.find(key)
            path = self._paths.path_awaiting(row) if row >= 0 else None
            if path is None:
                self._strays.push(key)
                self._num_strays += 1
                return
            at = path.rows.tolist().index(row)
        shard[key] = row
        self._paths.come(path, row, at)

    def on_hit(self, key: ChunkKey) -> None:
        """Uses are told of by `on_request`. Another's means: leave it alone for a while."""
        row = self._shards[hash(key) >> SHARD_SHIFT].get(key, -1)
        if row < 0:
            self._strays.pull(key)
            return
        current = self._current
        if current is not None and self._paths.is_of(current, row):
            return
        path = self._paths.owner(row)
        if path.cls >= 0 and path.rows[path.hi - 1] == row:
            self._set_aside(path)

    def on_evict(self, key: ChunkKey) -> None:
        """What is known of it stays."""
        row = self._shards[hash(key) >> SHARD_SHIFT].pop(key, -1)
        if row >= 0:
            self._paths.leave(row)
        else:
            self._strays.remove(key)
            self._num_strays -= 1

    def on_drop(self, key: ChunkKey) -> None:
        """Its bytes are void. What is known of its uses stays true."""
        if key in self:
            self.on_evict(key)

    # --- victims ------------------------------------------------------------------------------

    def victims(self) -> Iterator[ChunkKey]:
        """Strays first, then from the coldest end on, never a chunk before what hangs at it."""
        yield from self._strays
        path = self._coldest()
        if path is not None:
            yield from self._paths.chunks(path, path.hi, path.floor)
        yield from rehearse(self._paths, path, self._rank)

    def evict(self, num_keys: int, is_kept: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        """See `Evicting`."""
        if num_keys <= 0:
            return []
        evicted = self._evict_strays(num_keys, is_kept) if self._num_strays else []
        num_looks = 0
        while len(evicted) < num_keys and num_looks < _MAX_LOOKS:
            path = self._coldest()
            if path is None:
                break
            chunks = self._paths.chunks(path, path.hi, path.floor)
            for key in list(islice(chunks, num_keys - len(evicted))):
                if is_kept(key):
                    self._set_aside(path)
                    num_looks += 1
                    break
                self.on_evict(key)
                evicted.append(key)
        if len(evicted) < num_keys and num_looks < _MAX_LOOKS:
            self._evict_above(evicted, num_keys, is_kept)
        return evicted

    def _evict_strays(self, num_keys: int, is_kept: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        chosen: list[ChunkKey] = []
        kept: list[ChunkKey] = []
        for key in self._strays:
            (kept if is_kept(key) else chosen).append(key)
            if len(chosen) == num_keys or len(kept) == _MAX_LOOKS:
                break
        for key in chosen:
            self._strays.remove(key)
        self._num_strays -= len(chosen)
        for key in kept:
            self._strays.pull(key)
        return chosen

    def _evict_above(
        self, evicted: list[ChunkKey], num_keys: int, is_kept: Callable[[ChunkKey], bool]
    ) -> None:
        """Every end is kept, or carries one that is: take what lies above."""
        num_looks = 0
        for path in list(self._paths):
            for key in list(self._paths.chunks(path, path.hi, 0)):
                if not is_kept(key):
                    self.on_evict(key)
                    evicted.append(key)
                num_looks += 1
                if len(evicted) == num_keys or num_looks == _MAX_LOOKS:
                    return

    def _set_aside(self, path: Path) -> None:
        """Its end has to stay: it is looked at again in a while."""
        path.cls = -1
        path.is_aside = True
        path.set_aside_s = self._now_s
        self._aside.append(path)

    def _take_back(self, until_s: float) -> None:
        """Those set aside before may go again; so many at most."""
        for _ in range(min(len(self._aside), _MAX_TAKEN_BACK)):
            path = self._aside[0]
            if path.is_aside and path.set_aside_s > until_s:
                return
            self._aside.popleft()
            path.is_aside = False
            self._paths.unsettled.add(path)

    def _coldest(self) -> Path | None:
        """The path to evict from; None if there is none from whose end one can."""
        path, unsettled = self._picked, self._paths.unsettled
        if path is not None and path.cls >= 0 and not unsettled:
            return path
        if unsettled:
            for each in unsettled:
                if each.cls < 0 and each.num and not each.is_aside:
                    self._paths.settle(each)
                    if each.cls >= 0:
                        heappush(self._oldest[each.cls], (each.serial, each.id))
                        heappush(self._newest[each.cls], (-each.serial, each.id))
            unsettled.clear()
        self._picked = path = self._choose()
        return path

    def _choose(self) -> Path | None:
        """Of each class, the longest unused and the newest path are candidates.

        What a class is worth rises with age, if at all, to fall for ever after: the worst is at
        either end. The newest lets a full level refuse what has just come, whose owner needs a
        while to come back, rather than evict what is about to be used.
        """
        best: Path | None = None
        least = (0.0, 0)
        for cls in range(NUM_CLASSES):
            oldest = self._oldest[cls]
            if not oldest:
                continue
            path = self._first(oldest, cls)
            if path is None:
                self._newest[cls].clear()
                continue
            for each in (path, self._first(self._newest[cls], cls) or path):
                rank = self._rank(each, cls)
                if best is None or rank < least:
                    best, least = each, rank
        return best

    def _first(self, heap: list[tuple[int, int]], cls: int) -> Path | None:
        """The first of a heap that still is where it was when it came."""
        while heap:
            serial, path_id = heap[0]
            path = self._paths.find(path_id)
            if path is not None and path.cls == cls and path.serial == abs(serial):
                return path
            heappop(heap)
        return None

    @property
    def is_acting_as_lru(self) -> bool:
        """Whether too little is known, or time stands still: then the longest unused goes first."""
        return self.known.curves.num_waits < _MIN_WAITS or self.known.is_stopped

    def _rank(self, path: Path, cls: int) -> tuple[float, int]:
        """The least goes first."""
        if self.is_acting_as_lru:
            return 0.0, path.serial
        age_s = self._now_s - path.used_s
        return self.known.curves.index[cls][bucket_of(age_s)], path.serial
