"""The residents of a level by the request that used them last: a tree of paths.

A request uses a path from the root. What no later request has used of it is always the lower end of
that path, and chunks are evicted from its deepest on: so a *path* here is a stretch of chunks, all
used last by one request. Where a later request took the upper part over, the rest hangs at the
deepest chunk that both have. To use a prefix of thousands of chunks again costs a few array
operations, not thousands of moves in a list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from undercroft.errors import Bug
from undercroft.keys import ChunkKey
from undercroft.policies.known_prefixes import Seen

__all__ = ["Path", "Paths"]

_Run = tuple[int, int, int]
"""Start, stop, and the path that owns what lies between."""
_ABSENT = -1
_ADOPTED = 2**31 - 1
_NUM_YOUNG = 256
"""So many requests back, a chunk that comes in is still recognized as part of its path."""
_YOUNG_SHARE = 4
"""One in so many rows, at most, is kept for chunks that may still come in."""


class Path:
    """What is left of one request's path. Positions count from the root end of what is left."""

    __slots__ = (
        "branches", "classes", "cls", "cut", "floor", "hangs", "hi", "id", "is_aside", "is_young",
        "keys", "num", "parent_row", "rows", "serial", "set_aside_s", "starts", "used_s",
    )  # fmt: skip

    def __init__(self, path_id: int, seen: Seen) -> None:
        self.id = path_id
        self.serial = seen.serial
        self.used_s = seen.now_s
        self.rows = seen.rows
        self.keys = np.array(seen.keys, dtype=object)  # the garbage collector passes it by
        self.cut = 0  # how much is gone of the root end
        self.starts = seen.starts  # where a stretch of one class begins
        self.classes = seen.classes
        self.branches: list[int] = []  # positions at which other paths may hang, ascending
        self.num = 0  # resident chunks
        self.hi = 0  # no resident chunk lies here or deeper
        self.floor = 0  # down to here all are of class `cls`, and nothing hangs at them
        self.cls = -1  # the class of the deepest if it may be evicted, else -1
        self.parent_row = -1
        self.hangs = False  # counted at its parent
        self.is_young = True
        self.is_aside = False
        self.set_aside_s = 0.0


class Paths:
    """The paths of one level.

    Args:
        num_rows: Of the table of known prefixes whose rows these are.

    Attributes:
        unsettled: Paths whose end has changed: see `settle`.

    Memory: 12 bytes a row of the table; 16-32 a resident chunk, and 500-600 a path. Threads: one.
    """

    def __init__(self, num_rows: int) -> None:
        # The path that a row's chunk is resident in; -2 - path: it would be, once it comes in.
        self._owner = np.full(num_rows, _ABSENT, dtype=np.int32)
        self._owner_of = self._owner.data
        self._depth = np.zeros(num_rows, dtype=np.int32)  # in the path before anything was cut off
        self._depth_of = self._depth.data
        self._hanging = np.zeros(num_rows, dtype=np.int32)  # paths that hang at a row
        for column in (self._depth, self._hanging):
            column.fill(0)  # the scheduler's thread pays for no page when it comes to it
        self._by_id: list[Path | None] = []
        self._free: list[int] = []
        self._young: deque[tuple[Path, int]] = deque()
        self._num_young_rows, self._most_young_rows = 0, num_rows // _YOUNG_SHARE
        self.unsettled: set[Path] = set()

    def are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows must not be given to another prefix."""
        needed: NDArray[np.bool_] = (self._owner[rows] != _ABSENT) | (self._hanging[rows] != 0)
        return needed

    def __iter__(self) -> Iterator[Path]:
        """All that have residents."""
        return (path for path in self._by_id if path is not None and path.num)

    def find(self, path_id: int) -> Path | None:
        """The path of that id, if there is one."""
        return self._by_id[path_id]

    def get(self, path_id: int) -> Path:
        """The path of that id.

        Raises:
            Bug: There is none.
        """
        path = self._by_id[path_id]
        if path is None:
            raise Bug(f"hazard: there is no path {path_id}")
        return path

    # --- a request ----------------------------------------------------------------------------

    def num_leading(self, seen: Seen) -> int:
        """How many of a request's chunks are resident, from the root on.

        None is without what it continues; where one is after all, about as many.
        """
        owner_of, item, num = self._owner_of, seen.rows.item, len(seen.rows)
        if owner_of[item(num - 1)] >= 0:
            return num
        return bisect_left(range(num), 1, key=lambda at: owner_of[item(at)] < 0)

    def absent(self, seen: Seen) -> list[int]:
        """Positions of a request's chunks that are not resident."""
        return np.flatnonzero(self._owner[seen.rows] < 0).tolist()

    def adopt(self, row: int) -> None:
        """The chunk of `row` is resident, in no path yet; the next `add` takes it."""
        self._owner_of[row] = _ADOPTED

    def give_up(self, row: int) -> None:
        """The chunk of `row` was not taken by that `add`: it is in no path for good."""
        self._owner_of[row] = _ABSENT

    def is_adopted(self, row: int) -> bool:
        """Whether the chunk of `row` is still to be taken."""
        return self._owner_of[row] == _ADOPTED

    def add(self, seen: Seen) -> Path:
        """The path of a request; it takes over what is resident, and awaits what is not."""
        owner, runs = self._owners(seen.rows)
        if not all(self._is_whole(seen.rows, owner, run) for run in runs):
            seen = self._whole(seen, runs)
            owner, runs = self._owners(seen.rows)
        if self._free:
            path = Path(self._free.pop(), seen)
            self._by_id[path.id] = path
        else:
            path = Path(len(self._by_id), seen)
            self._by_id.append(path)
        rows = path.rows
        num_true = self._num_true(path, runs)
        if num_true < len(rows):
            path.rows, path.keys = rows[:num_true], path.keys[:num_true]
            rows, owner = path.rows, owner[:num_true]
            runs = [(at, min(stop, num_true), old) for at, stop, old in runs if at < num_true]
        resident = owner >= 0
        is_any = bool(resident.any())
        # First of all: what is emptied below must be found as the owner of nothing.
        self._owner[rows] = np.where(resident, path.id, -2 - path.id) if is_any else -2 - path.id
        self._take_over(rows, runs)
        self._depth[rows] = np.arange(len(rows))
        path.branches = self._hanging[rows].nonzero()[0].tolist()
        if is_any:
            path.num = int(resident.sum())
            path.hi = len(rows)
            if not resident[-1]:
                path.hi = int(np.flatnonzero(resident)[-1]) + 1
            self.unsettled.add(path)
        self._young.append((path, len(rows)))
        self._num_young_rows += len(rows)
        while len(self._young) > 1 and (
            len(self._young) > _NUM_YOUNG or self._num_young_rows > self._most_young_rows
        ):
            old, num_rows = self._young.popleft()
            self._num_young_rows -= num_rows
            self._grow_up(old)
        return path

    def _owners(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[_Run]]:
        """The owner of each row, and the runs of rows that one path owns."""
        owner = self._owner[rows]
        return owner, [run for run in _runs(owner) if run[2] >= 0 and run[2] != _ADOPTED]

    def _is_whole(self, rows: NDArray[np.int64], owner: NDArray[np.int32], run: _Run) -> bool:
        """Whether a run of a request is in order, and leaves out nothing that is there above it."""
        start, stop, old_id = run
        old = self.get(old_id)
        if old.hangs and (not start or rows[start - 1] != old.parent_row):
            return False
        last = self._depth_of[rows[stop - 1]] - old.cut
        if last == stop - start - 1 and self._depth_of[rows[start]] == old.cut:
            return True  # by far the most; out of order and yet so is next to impossible
        places = self._depth[rows[:stop][_is_of(owner[:stop], old_id)]]
        num_above = np.count_nonzero(_is_of(self._owner[old.rows[: last + 1]], old_id))
        return len(places) == num_above and bool((places[1:] > places[:-1]).all())

    def _whole(self, seen: Seen, runs: list[_Run]) -> Seen:
        """A request that was told of with holes, with all that is there above what it has.

        Or the lower part of a path would go to another, and what lies above be nobody's. The class
        of what is filled in is that of what follows.
        """
        above_of = {
            start: self._down_to(self.get(old_id), int(self._depth[seen.rows[start:stop]].max()))
            for start, stop, old_id in runs
        }
        whole: dict[int, tuple[ChunkKey, int]] = {}
        for at, row in enumerate(seen.rows.tolist()):
            cls = seen.classes[bisect_right(seen.starts, at) - 1]
            for above, key in above_of.get(at, ()):
                whole.setdefault(above, (key, cls))
            whole.setdefault(row, (seen.keys[at], cls))
        classes = [cls for _, cls in whole.values()]
        starts = [at for at, cls in enumerate(classes) if not at or cls != classes[at - 1]]
        return replace(
            seen,
            rows=np.array(list(whole), dtype=seen.rows.dtype),
            keys=[key for key, _ in whole.values()],
            starts=starts,
            classes=[classes[at] for at in starts],
        )

    def _down_to(self, path: Path, depth: int) -> list[tuple[int, ChunkKey]]:
        """What is resident or awaited of a path down to a depth, and of those that it hangs at."""
        parts: list[list[tuple[int, ChunkKey]]] = []
        ids: set[int] = set()
        while path.id not in ids:
            ids.add(path.id)
            rows = path.rows[: depth - path.cut + 1]
            own = _is_of(self._owner[rows], path.id).nonzero()[0].tolist()
            parts.append([(int(rows[at]), path.keys[at]) for at in own])
            owner = self._owner_of[path.parent_row] if path.hangs else _ABSENT
            if owner >= 0 and owner != _ADOPTED:
                path, depth = self.get(owner), self._depth_of[path.parent_row]
        return [each for part in reversed(parts) for each in part]

    def _num_true(self, path: Path, runs: list[_Run]) -> int:
        """How many keys of a new path are who their rows say, as far as that matters here.

        A row knows its key by a fingerprint. That two have the same one is next to impossible, but
        the chunk of the one must never be called by the name of the other.
        """
        for start, stop, old_id in runs:
            old = self.get(old_id)
            is_same = (
                old.keys[self._depth[path.rows[start:stop]] - old.cut] == path.keys[start:stop]
            )
            if not is_same.all():
                return start + int(np.argmin(is_same))
        return len(path.rows)

    def _take_over(self, rows: NDArray[np.int64], runs: list[_Run]) -> None:
        for start, stop, old_id in runs:
            old = self.get(old_id)
            old.num -= stop - start
            self._unhang(old)
            if old.num:
                self._cut_off(old, int(rows[stop - 1]))
                self._hang(old)
            else:
                self._empty(old)

    def _cut_off(self, path: Path, row: int) -> None:
        """What lies above and at `row` is another's."""
        cut = self._depth_of[row] - path.cut + 1
        if path.rows[cut - 1] != row:
            raise Bug(f"hazard: row {row} is not in path {path.id}")
        path.cut += cut
        path.rows, path.keys = path.rows[cut:].copy(), path.keys[cut:].copy()
        path.hi -= cut
        path.floor = max(0, path.floor - cut)
        first = bisect_right(path.starts, cut) - 1
        path.starts = [0, *(start - cut for start in path.starts[first + 1 :])]
        path.classes = path.classes[first:]
        path.branches = [at - cut for at in path.branches if at >= cut]
        path.parent_row = row

    def _grow_up(self, path: Path) -> None:
        """It was long ago: nothing more is awaited."""
        path.is_young = False
        rows = path.rows
        self._owner[rows[self._owner[rows] == -2 - path.id]] = _ABSENT
        if not path.num:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        self._by_id[path.id] = None
        self._free.append(path.id)

    def _hang(self, path: Path) -> None:
        if path.parent_row >= 0:
            path.hangs = True
            self._hanging[path.parent_row] += 1

    def _unhang(self, path: Path) -> None:
        if not path.hangs:
            return
        path.hangs = False
        row = path.parent_row
        self._hanging[row] -= 1
        owner = self._owner_of[row]
        if owner >= 0 and owner != _ADOPTED and not self._hanging[row]:
            above = self.get(owner)
            if above.cls < 0:
                self.unsettled.add(above)

    # --- a chunk ------------------------------------------------------------------------------

    def place(self, row: int, key: ChunkKey) -> tuple[Path, int] | None:
        """The path and position where the chunk of `row` is, or is awaited; None if nowhere."""
        owner = self._owner_of[row]
        if owner == _ABSENT:
            return None
        path = self.get(owner if owner >= 0 else -2 - owner)
        at = self._depth_of[row] - path.cut
        return (path, at) if path.keys[at] == key else None

    def holds(self, path: Path, at: int) -> bool:
        """Whether the chunk at that position of a path is resident."""
        return self._owner_of[int(path.rows[at])] == path.id

    def awaited(self, path: Path, at: int, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, deepest first, are those awaited at `at` of a path and above."""
        first = max(0, at + 1 - len(keys))
        is_next = self._owner[path.rows[first : at + 1]] == -2 - path.id
        num = at + 1 - first
        if not is_next.all():
            num = int(np.argmin(is_next[::-1]))
        if path.keys[at + 1 - num : at + 1][::-1].tolist() == keys[:num]:
            return num
        pairs = zip(path.keys[at + 1 - num : at + 1][::-1].tolist(), keys, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), num)

    def come(self, path: Path, at: int, num: int = 1) -> None:
        """What was awaited at `at` and so many above, down to `at`, is resident."""
        if num == 1:
            self._owner_of[int(path.rows[at])] = path.id
        else:
            self._owner[path.rows[at + 1 - num : at + 1]] = path.id
        if not path.num:
            self._hang(path)
        path.num += num
        if at >= path.hi:
            path.hi = at + 1
            path.cls = -1
            self.unsettled.add(path)

    def leave(self, path: Path, at: int) -> None:
        """The chunk at that position of a path is not resident any more."""
        self._owner_of[int(path.rows[at])] = -2 - path.id if path.is_young else _ABSENT
        self._left(path, 1, at)

    def leave_all(self, path: Path, places: Sequence[int]) -> None:
        """The same of many, the deepest resident one first."""
        at = places[-1]
        if len(places) == 1:
            self.leave(path, at)
            return
        rows = path.rows[at : path.hi]
        if len(places) < len(rows):
            rows = path.rows[list(places)]
        self._owner[rows] = -2 - path.id if path.is_young else _ABSENT
        path.hi = at + 1
        self._left(path, len(places), at)

    def _left(self, path: Path, num: int, at: int) -> None:
        path.num -= num
        if not path.num:
            self._unhang(path)
            self._empty(path)
            return
        if at == path.hi - 1:
            path.hi = at
            if at <= path.floor or not self.holds(path, at - 1):
                path.cls = -1
                self.unsettled.add(path)

    def _empty(self, path: Path) -> None:
        path.hi = 0
        path.cls = -1
        self.unsettled.discard(path)
        if not path.is_young:
            self._forget(path)

    # --- ends ---------------------------------------------------------------------------------

    def settle(self, path: Path) -> None:
        """Work out `hi`, `floor` and `cls`."""
        path.hi = hi = self.deepest(path, path.hi)
        if not path.is_young and hi * 2 < len(path.rows):
            path.rows, path.keys = path.rows[:hi].copy(), path.keys[:hi].copy()
        while path.branches:
            at = path.branches[-1]
            if at < hi and self._hanging[path.rows[at]]:
                break
            path.branches.pop()
        path.floor, path.cls = self.stretch(path, hi)
        if path.branches:
            path.floor = max(path.floor, path.branches[-1] + 1)
            if path.floor == hi:
                path.cls = -1

    @staticmethod
    def stretch(path: Path, hi: int) -> tuple[int, int]:
        """Where the stretch that ends at `hi` begins, and its class."""
        i = bisect_right(path.starts, hi - 1) - 1
        return path.starts[i], path.classes[i]

    def deepest(self, path: Path, hi: int) -> int:
        """One more than the position of the deepest resident chunk before `hi`, or 0."""
        if hi and self._owner_of[int(path.rows[hi - 1])] != path.id:
            own = np.flatnonzero(self._owner[path.rows[:hi]] == path.id)
            return int(own[-1]) + 1 if len(own) else 0
        return hi

    def end(self, path: Path, num: int) -> tuple[Sequence[int], list[ChunkKey]]:
        """Positions and keys of up to `num` chunks at the end of a settled path, deepest first.

        Not below its floor; and at least one.
        """
        if num == 1:
            return [path.hi - 1], [path.keys[path.hi - 1]]
        lowest = max(path.floor, path.hi - num)
        keys: list[ChunkKey] = path.keys[lowest : path.hi][::-1].tolist()
        places = range(path.hi - 1, lowest - 1, -1)
        is_own = self._owner[path.rows[lowest : path.hi]] == path.id
        if is_own.all():
            return places, keys
        own = is_own[::-1].tolist()
        return list(compress(places, own)), list(compress(keys, own))

    def chunks(self, path: Path, hi: int, floor: int) -> Iterator[ChunkKey]:
        """The resident ones of a stretch, deepest first."""
        rows, owner_of, path_id = path.rows, self._owner_of, path.id
        for at in range(hi - 1, floor - 1, -1):
            if owner_of[int(rows[at])] == path_id:
                yield path.keys[at]

    def num_hanging(self, row: int) -> int:
        """How many paths hang at a row."""
        return int(self._hanging[row])


def _is_of(owner: NDArray[np.int32], path_id: int) -> NDArray[np.bool_]:
    """Which rows are resident in a path, or awaited there."""
    is_of: NDArray[np.bool_] = (owner == path_id) | (owner == -2 - path_id)
    return is_of


def _runs(owner: NDArray[np.int32]) -> list[_Run]:
    """Start, stop and value of each run of equal values; of none, none."""
    if not len(owner):
        return []
    cuts = ((owner[1:] != owner[:-1]).nonzero()[0] + 1).tolist()
    starts = [0, *cuts]
    return [
        (at, stop, owner.item(at)) for at, stop in zip(starts, [*cuts, len(owner)], strict=True)
    ]
