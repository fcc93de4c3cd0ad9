"""In which order everything would be evicted: gone through on paper, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from undercroft.keys import ChunkKey
from undercroft.policies.path import Path
from undercroft.policies.request_paths import Paths

__all__ = ["rehearse"]

_Rank = Callable[[Path, int], tuple[float, int]]


def rehearse(paths: Paths, first: Path | None, rank: _Rank) -> Iterator[ChunkKey]:
    """What goes after the run of chunks at the end of `first`; each resident chunk of a path once.

    Args:
        paths: All there are.
        first: Its end, down to its floor, has gone; None: nothing has.
        rank: Of a path whose end is of that class; the least goes first.

    Cost: O(paths) before the first chunk, then O(log paths) a run.
    """
    rehearsal = _Rehearsal(paths, first, rank)
    yield from rehearsal.play()


class _Rehearsal:
    """One go through everything."""

    def __init__(self, paths: Paths, first: Path | None, rank: _Rank) -> None:
        self._paths = paths
        self._rank = rank
        self._every = {path.id: path for path in paths}
        self._left = {path.id: path.hi for path in paths}
        if first is not None:
            self._left[first.id] = first.floor
        self._gone: dict[int, int] = {}  # paths that hung at a row
        self._waiting: dict[int, Path] = {}  # by the row of its end, at which others hang
        self._heap: list[tuple[tuple[float, int], int, int]] = []

    def play(self) -> Iterator[ChunkKey]:
        paths, left = self._paths, self._left
        for path in self._every.values():
            self._queue(path)
        while self._heap:
            _, path_id, floor = heappop(self._heap)
            path = self._every[path_id]
            yield from paths.chunks(path, left[path_id], floor)
            left[path_id] = floor
            self._queue(path)
        for path in self._every.values():  # nothing, unless the books are wrong
            yield from paths.chunks(path, left[path.id], 0)

    def _queue(self, path: Path) -> None:
        """The next run of a path, if its end may go; else what waited for it."""
        hi = self._left[path.id] = self._paths.deepest(path, self._left[path.id])
        if not hi:
            self._end(path)
            return
        floor, cls = self._paths.stretch(path, hi)
        lowest = self._lowest_free(path, floor, hi)
        if lowest == hi:
            self._waiting[int(path.rows[hi - 1])] = path
        else:
            heappush(self._heap, (self._rank(path, cls), path.id, lowest))

    def _lowest_free(self, path: Path, floor: int, hi: int) -> int:
        """How far down from `hi` nothing hangs."""
        for at in reversed(path.branches):
            if at < floor:
                break
            if at < hi and self._num_hanging(int(path.rows[at])):
                return at + 1
        return floor

    def _num_hanging(self, row: int) -> int:
        return self._paths.num_hanging(row) - self._gone.get(row, 0)

    def _end(self, path: Path) -> None:
        row = path.parent_row
        if path.hangs:
            self._gone[row] = self._gone.get(row, 0) + 1
            if row in self._waiting and not self._num_hanging(row):
                self._queue(self._waiting.pop(row))
