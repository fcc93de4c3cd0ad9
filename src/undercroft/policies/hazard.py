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
from itertools import compress, count
from math import inf
from operator import attrgetter

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies.guard import Guard
from undercroft.policies.key_queue import KeyQueue
from undercroft.policies.known_prefixes import NUM_CLASSES, KnownPrefixes, Seen
from undercroft.policies.path import Path
from undercroft.policies.rehearsal import rehearse
from undercroft.policies.request_paths import Paths
from undercroft.policies.reuse_curves import ENDS_S, NUM_BUCKETS, bucket_of

__all__ = ["Hazard"]

_MIN_WAITS = 300
"""Finished waits before what was learned is trusted."""
_NONE_LEARNED = [[0.0] * NUM_BUCKETS] * NUM_CLASSES
_MAX_LOOKS = 512
_MAX_TAKEN_BACK = 64
_MAX_UNSETTLED = 256
"""A level that fills evicts nothing: the first eviction must not have to settle all paths."""
_FEW = 4
"""So few chunks come quicker one by one than all at once."""
_ASIDE_S = 1.0


class Hazard:
    """The policy of one level.

    Args:
        capacity_chunks: How many chunks the level holds, > 0.
        known: What is known of prefixes, if other levels share it.

    Raises:
        ConfigError: `capacity_chunks` is not positive.

    Memory: see `KnownPrefixes` and `Paths`; nothing else for each chunk.
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
        known.in_use.append(self._paths)
        self._guard = Guard(self.name, capacity_chunks, known.num_rows)
        # Chunks that no request has told of: newly read from a lower level, found at the start.
        self._strays = KeyQueue()
        self._num_strays = 0
        self._current: Path | None = None
        self._at = -1  # where in it the next chunk is expected: they come deepest first
        self._now_s, self._serial = 0.0, 0
        self._found: dict[int, _Found] = {}
        self._found_by = _NONE_LEARNED  # which index, and how often that had changed
        self._num_changes = 0
        self._until_s = -inf
        self._picked: Path | None = None
        self._aside: deque[Path] = deque()

    def __contains__(self, key: ChunkKey) -> bool:
        return self._find(key) is not None or key in self._strays

    def _find(self, key: ChunkKey) -> tuple[Path, int] | None:
        """The path and position of a resident chunk that is no stray."""
        row = self.known.find(key)
        place = self._paths.place(row, key) if row >= 0 else None
        return place if place is not None and self._paths.holds(*place) else None

    def _is_expected(self, key: ChunkKey) -> bool:
        """Whether `key` is the next of the last request, from its deepest chunk up."""
        path, at = self._current, self._at
        if at < 0 or path is None or path.keys[at] != key:
            return False
        self._at = at - 1
        return True

    # --- requests -----------------------------------------------------------------------------

    def on_request(
        self, keys: Sequence[ChunkKey], now_s: float, kind: int = 0, num_told: int = 0
    ) -> None:
        """See `Learning`."""
        if not keys:
            return
        seen = self.known.see(keys, now_s, kind, num_told, self._serial)
        self._now_s, self._serial = seen.now_s, seen.serial
        self._picked = None
        self._take_back(seen.now_s - _ASIDE_S)
        if not seen.keys:
            return
        self._guard.on_request(seen, self._paths.num_leading(seen), num_told)
        if len(self._paths.unsettled) > _MAX_UNSETTLED:
            self._settle(len(self._paths.unsettled) - _MAX_UNSETTLED)
        adopted = self._adopt(seen) if self._num_strays else []
        self._current = path = self._paths.add(seen)
        self._at = len(path.keys) - 1
        for at in adopted:
            row = int(seen.rows[at])
            if self._paths.is_adopted(row):
                self._paths.give_up(row)
                self._strays.push(seen.keys[at])
                self._num_strays += 1
            else:
                self._guard.on_come(int(seen.rows[at]), seen.serial)

    def _adopt(self, seen: Seen) -> list[int]:
        """Make the strays of a request part of its path; their positions."""
        strays = [at for at in self._paths.absent(seen) if seen.keys[at] in self._strays]
        for at in strays:
            self._strays.remove(seen.keys[at])
            self._paths.adopt(int(seen.rows[at]))
        self._num_strays -= len(strays)
        return strays

    # --- chunks -------------------------------------------------------------------------------

    def on_insert(self, key: ChunkKey) -> None:
        """Part of the path of the last request that used it, or a stray."""
        place = self._place(key)
        if place is None:
            self._strays.push(key)
            self._num_strays += 1
        elif self._paths.holds(*place):
            raise Bug(f"hazard: key {key.hex()} is resident already")
        else:
            self._paths.come(*place)
            self._guard.on_come(int(place[0].rows[place[1]]), place[0].serial)

    def on_insert_all(self, keys: Sequence[ChunkKey]) -> None:
        """See `InsertingMany`."""
        keys = list(keys)
        while keys:
            expected, place = self._at, self._place(keys[0])
            num = 0 if place is None else self._paths.awaited(*place, keys)
            if num < _FEW or place is None:
                self._at = expected
                for key in keys[:_FEW]:
                    self.on_insert(key)
                del keys[:_FEW]
                continue
            self._paths.come(*place, num)
            self._guard.on_come_all(
                place[0].rows[place[1] + 1 - num : place[1] + 1], place[0].serial
            )
            if place[0] is self._current:
                self._at = place[1] - num
            del keys[:num]

    def _place(self, key: ChunkKey) -> tuple[Path, int] | None:
        """The path and position where `key` is, or is awaited."""
        if self._is_expected(key) and self._current is not None:
            return self._current, self._at + 1
        row = self.known.find(key)
        return self._paths.place(row, key) if row >= 0 else None

    def on_hit(self, key: ChunkKey) -> None:
        """Uses are told of by `on_request`. Another's means: leave it alone for a while."""
        place = self._place(key)
        if place is None or not self._paths.holds(*place):
            self._strays.pull(key)
            return
        path, at = place
        if path is not self._current and path.cls >= 0 and at == path.hi - 1:
            self._set_aside(path)

    def on_evict(self, key: ChunkKey) -> None:
        """What is known of it stays."""
        path = self._picked
        if path is not None and path.hi and path.keys[path.hi - 1] == key:
            at = path.hi - 1  # the first of `victims`
            if self._paths.holds(path, at):
                self._paths.leave(path, at)
                return
        place = self._find(key)
        if place is not None:
            self._paths.leave(*place)
        else:
            self._strays.remove(key)
            self._num_strays -= 1

    def on_drop(self, key: ChunkKey) -> None:
        """Its bytes are void. What is known of its uses stays true."""
        place = self._find(key)
        if place is not None:
            self._guard.on_drop(int(place[0].rows[place[1]]))
        if place is not None or key in self._strays:
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
            places, keys = self._paths.end(path, num_keys - len(evicted))
            if not keys:
                raise Bug(f"hazard: nothing is resident at the end of path {path.id}")
            num = next(compress(count(), map(is_kept, keys)), len(keys))
            if num:
                self._paths.leave_all(path, places[:num])
                evicted += keys[:num]
            if num < len(keys):
                self._set_aside(path)
                num_looks += 1
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
        self._paths.withdraw(path)
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
            self._settle(len(unsettled))
        self._picked = path = self._choose()
        return path

    def _settle(self, num_paths: int) -> None:
        """So many of those whose end has changed."""
        unsettled = self._paths.unsettled
        for _ in range(num_paths):
            path = unsettled.pop()
            if path.cls < 0 and path.num and not path.is_aside:
                self._paths.settle(path)

    def _choose(self) -> Path | None:
        """Of each class, the longest unused and the newest path are candidates.

        What a class is worth rises with age, if at all, to fall for ever after: the worst is at
        either end. The newest lets a full level refuse what has just come, whose owner needs a
        while to come back, rather than evict what is about to be used.
        """
        index, changed, now_s = self._index(), self._paths.ends.changed, self._now_s
        num_changes = self.known.curves.num_changes
        for cls in changed:
            self._look(cls, index[cls])
        changed.clear()
        if (
            now_s >= self._until_s
            or num_changes != self._num_changes
            or index is not self._found_by
        ):
            for cls, found in list(self._found.items()):
                if now_s >= found.until_s or found.row is not index[cls]:
                    self._look(cls, index[cls])
            self._until_s = min((found.until_s for found in self._found.values()), default=inf)
            self._found_by, self._num_changes = index, num_changes
        if not self._found:
            return None
        return self._paths.get(min(self._found.values(), key=_rank_of).path_id)

    def _look(self, cls: int, row: list[float]) -> None:
        """The candidates of a class, if it has any, and the worse of them."""
        outermost = self._paths.ends.outermost(cls)
        if outermost is None:
            self._found.pop(cls, None)
            return
        oldest, newest = outermost
        found = _Found(oldest, *self._paths.used(oldest), row, self._now_s)
        if newest != oldest:
            found.compare(newest, *self._paths.used(newest), self._now_s)
        self._found[cls] = found
        self._until_s = min(self._until_s, found.until_s)

    @property
    def is_acting_as_lru(self) -> bool:
        """Whether too little is known, time stands still, or LRU has proved to be better."""
        known = self.known
        too_little = known.curves.num_waits < _MIN_WAITS
        return too_little or known.is_stopped or self._guard.is_overruling

    def _index(self) -> list[list[float]]:
        return _NONE_LEARNED if self.is_acting_as_lru else self.known.curves.index

    def _rank(self, path: Path, cls: int) -> tuple[float, int]:
        """The least goes first."""
        return self._index()[cls][bucket_of(self._now_s - path.used_s)], path.serial


class _Found:
    """The worse candidate of a class, so that it need not be looked for each time."""

    __slots__ = ("path_id", "rank", "row", "until_s")

    def __init__(
        self, path_id: int, serial: int, used_s: float, row: list[float], now_s: float
    ) -> None:
        bucket = bucket_of(now_s - used_s)
        self.path_id = path_id
        self.row = row
        self.rank = row[bucket], serial
        self.until_s = used_s + ENDS_S[bucket]
        """Until then it is worth the same, and so is whatever it was compared with."""

    def compare(self, path_id: int, serial: int, used_s: float, now_s: float) -> None:
        """With another of the class; whose rank is less, is it."""
        bucket = bucket_of(now_s - used_s)
        self.until_s = min(self.until_s, used_s + ENDS_S[bucket])
        rank = self.row[bucket], serial
        if rank < self.rank:
            self.rank, self.path_id = rank, path_id


_rank_of = attrgetter("rank")
