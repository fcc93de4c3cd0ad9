"""In which order everything would be evicted: gone through on paper, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from undercroft.keys import ChunkKey
from undercroft.policies.request_paths import Path, Paths

__all__ = ["rehearse"]


def rehearse(
    paths: Paths, first: Path | None, rank: Callable[[Path, int], tuple[float, int]]
) -> Iterator[ChunkKey]:
    """What goes after the run of chunks at the end of `first`; each resident chunk of a path once.

    Args:
        paths: All there are.
        first: Its end, down to its floor, has gone; None: nothing has.
        rank: Of a path whose end is of that class; the least goes first.

    Cost: O(paths) before the first chunk, then O(log paths) a run.
    """
    left = {path.id: path.hi for path in paths}
    gone: dict[int, int] = {}  # paths that hung at a row
    waiting: dict[int, Path] = {}  # by the row of its end, at which others hang
    heap: list[tuple[tuple[float, int], int, int]] = []
    every = {path.id: path for path in paths}

    def queue(path: Path) -> None:
        hi = left[path.id] = paths.deepest(path, left[path.id])
        if not hi:
            row = path.parent_row
            if path.hangs:
                gone[row] = gone.get(row, 0) + 1
                if row in waiting and paths.num_hanging(row) == gone[row]:
                    queue(waiting.pop(row))
            return
        floor, cls = paths.stretch(path, hi)
        for at in reversed(path.branches):
            if at < floor:
                break
            row = int(path.rows[at])
            if at < hi and paths.num_hanging(row) > gone.get(row, 0):
                if at == hi - 1:
                    waiting[row] = path
                    return
                floor = at + 1
                break
        heappush(heap, (rank(path, cls), path.id, floor))

    if first is not None:
        left[first.id] = first.floor
    for path in every.values():
        queue(path)
    while heap:
        _, path_id, floor = heappop(heap)
        path = every[path_id]
        yield from paths.chunks(path, left[path_id], floor)
        left[path_id] = floor
        queue(path)
    for path in every.values():  # nothing, unless the books are wrong
        yield from paths.chunks(path, left[path.id], 0)
