"""The residents of a level by the request that used them last: a tree of paths.

A request uses a path from the root. What no later request has used of it is always the lower end of
that path, and chunks are evicted from its deepest on: so a *path* here is a stretch of chunks, all
used last by one request. Where a later request took the upper part over, the rest hangs at the
deepest chunk that both have. To use a prefix of thousands of chunks again costs a few array
operations, not thousands of moves in a list.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from undercroft.errors import Bug
from undercroft.keys import ChunkKey
from undercroft.policies.known_prefixes import NUM_CLASSES, Seen
from undercroft.policies.path import Path, PathStore
from undercroft.policies.path_ends import PathEnds
from undercroft.policies.runs import Run, runs_of

__all__ = ["Paths"]

_ABSENT = -1
_ADOPTED = 2**31 - 1
_OF_OWNER = 0 if sys.byteorder == "little" else 1
_LOW_HALF = (1 << 32) - 1
_FEW = 12
"""So few rows are quicker one by one than in arrays."""
_NUM_DEPTHS = 256
_NUM_YOUNG = 256
"""So many requests back, a chunk that comes in is still recognized as part of its path."""
_YOUNG_SHARE = 4
"""One in so many rows, at most, is kept for chunks that may still come in."""


class Paths:
    """The paths of one level.

    Args:
        num_rows: Of the table of known prefixes whose rows these are.

    Attributes:
        unsettled: Paths whose end has changed: see `settle`.
        ends: Those that are settled, and from whose end a chunk can go.

    A path object is void once others have been asked for: it may have been packed since.

    Memory: 12 bytes a row of the table; 16-32 a resident chunk, and 500-600 a path; a path of up to
    4 chunks that rests takes some 150. Threads: one.
    """

    def __init__(self, num_rows: int) -> None:
        pairs = np.zeros((num_rows, 2), dtype=np.int32)
        self._pairs = pairs.reshape(-1).view(np.int64)
        # The path that a row's chunk is resident in; -2 - path: it would be, once it comes in.
        self._owner = pairs[:, _OF_OWNER]
        self._owner.fill(_ABSENT)
        self._owner_of = self._owner.data
        self._depth = pairs[:, 1 - _OF_OWNER]  # in the path before anything was cut off
        self._depth_of = self._depth.data
        self._depths = _depths(_NUM_DEPTHS)
        self._hanging = np.zeros(num_rows, dtype=np.int32)  # paths that hang at a row
        self._hanging_of = self._hanging.data
        for column in (self._depth, self._hanging):
            column.fill(0)  # the scheduler's thread pays for no page when it comes to it
        self._store = PathStore()
        self.get, self.used = self._store.get, self._store.used
        self._young: deque[tuple[Path, int]] = deque()
        self._num_young_rows, self._most_young_rows = 0, num_rows // _YOUNG_SHARE
        self._newest = 0
        self._was_adopted = False
        self.unsettled: set[Path] = set()
        self.ends = PathEnds(NUM_CLASSES)

    def are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows must not be given to another prefix."""
        needed: NDArray[np.bool_] = (self._owner[rows] != _ABSENT) | (self._hanging[rows] != 0)
        return needed

    def is_needed(self, row: int) -> bool:
        """The same, of one row."""
        return self._owner_of[row] != _ABSENT or self._hanging_of[row] != 0

    def __iter__(self) -> Iterator[Path]:
        """All that have residents."""
        return iter(self._store)

    def withdraw(self, path: Path) -> None:
        """Nothing can go from its end, until it is settled anew."""
        if path.cls >= 0:
            self.ends.remove(path.cls, path.serial, path.id)
            path.cls = -1

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
        self._was_adopted = True

    def give_up(self, row: int) -> None:
        """The chunk of `row` was not taken by that `add`: it is in no path for good."""
        self._owner_of[row] = _ABSENT

    def is_adopted(self, row: int) -> bool:
        """Whether the chunk of `row` is still to be taken."""
        return self._owner_of[row] == _ADOPTED

    def add(self, seen: Seen) -> Path:
        """The path of a request; it takes over what is resident, and awaits what is not."""
        # Nothing is there, nor hangs, at rows that were given to their keys just now.
        num_known = seen.num_known
        if self._was_adopted or seen.serial <= self._newest:
            num_known = len(seen.rows)
        self._was_adopted, self._newest = False, max(self._newest, seen.serial)
        runs = self._owners(seen.rows[:num_known])
        path = self._store.new(seen)
        num_true = self._num_true(path, runs)
        if num_true < len(path.rows):
            path.rows, path.keys = path.rows[:num_true], path.keys[:num_true]
            num_known = min(num_known, num_true)
            runs = [(at, min(stop, num_true), old) for at, stop, old in runs if at < num_true]
        if not all(self._is_whole(path.rows, run) for run in runs if run[2] != _ADOPTED):
            self._fill_in(path, [run for run in runs if run[2] != _ADOPTED])
            num_known = len(path.rows)
            runs = self._owners(path.rows)
        rows = path.rows
        # First of all: what is emptied below must be found as the owner of nothing.
        depths = [self._depth_of[rows[stop - 1]] for _, stop, _ in runs]
        self._take(path, runs)
        self._take_over(rows, runs, depths)
        path.branches = self._branches(rows[:num_known])
        if runs:
            path.num = sum(stop - start for start, stop, _ in runs)
            path.hi = runs[-1][1]
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

    def _owners(self, rows: NDArray[np.int64]) -> list[Run]:
        """The runs of rows that one path owns, or that are adopted."""
        if len(rows) > _FEW:
            return [run for run in runs_of(self._owner[rows]) if run[2] >= 0]
        owner_of, runs = self._owner_of, list[Run]()
        start, last = 0, _ABSENT
        for at, row in enumerate(rows.tolist()):
            owner = owner_of[row]
            if owner != last:
                if last >= 0:
                    runs.append((start, at, last))
                start, last = at, owner
        if last >= 0:
            runs.append((start, len(rows), last))
        return runs

    def _take(self, path: Path, runs: list[Run]) -> None:
        """What is resident is the path's; all the rest it awaits."""
        rows = path.rows
        num = len(rows)
        if num > len(self._depths):
            self._depths = _depths(2 * num)
        self._pairs[rows] = self._depths[:num] | (-2 - path.id & _LOW_HALF)
        for start, stop, _ in runs:
            if stop - start == 1:
                self._owner_of[int(rows[start])] = path.id
            else:
                self._owner[rows[start:stop]] = path.id

    def _branches(self, rows: NDArray[np.int64]) -> list[int]:
        """Positions at which paths hang."""
        if len(rows) > _FEW:
            return self._hanging[rows].nonzero()[0].tolist()
        hanging_of = self._hanging_of
        return [at for at, row in enumerate(rows.tolist()) if hanging_of[row]]

    def _is_whole(self, rows: NDArray[np.int64], run: Run) -> bool:
        """Whether a run of a request is in order, and leaves out nothing that is there above it."""
        start, stop, old_id = run
        old = self.get(old_id)
        if old.hangs and (not start or rows[start - 1] != old.parent_row):
            return False
        last = self._depth_of[rows[stop - 1]] - old.cut
        if last == stop - start - 1 and self._depth_of[rows[start]] == old.cut:
            return True  # by far the most; out of order and yet so is next to impossible
        above = rows[:stop]
        places = self._depth[above[_is_of(self._owner[above], old_id)]]
        num_above = np.count_nonzero(_is_of(self._owner[old.rows[: last + 1]], old_id))
        return len(places) == num_above and bool((places[1:] > places[:-1]).all())

    def _fill_in(self, path: Path, runs: list[Run]) -> None:
        """Of a request that was told of with holes: all that is there above what it has, as well.

        Or the lower part of a path would go to another, and what lies above be nobody's. The class
        of what is filled in is that of what follows.
        """
        above_of = {
            start: self._down_to(self.get(old_id), int(self._depth[path.rows[start:stop]].max()))
            for start, stop, old_id in runs
        }
        whole: dict[int, tuple[ChunkKey, int]] = {}
        for at, (row, key) in enumerate(zip(path.rows.tolist(), path.keys, strict=True)):
            cls = path.classes[bisect_right(path.starts, at) - 1]
            for above, its_key in above_of.get(at, ()):
                whole.setdefault(above, (its_key, cls))
            whole.setdefault(row, (key, cls))
        classes = [cls for _, cls in whole.values()]
        path.rows = np.array(list(whole), dtype=path.rows.dtype)
        path.keys = tuple(key for key, _ in whole.values())
        path.starts = [at for at, cls in enumerate(classes) if not at or cls != classes[at - 1]]
        path.classes = [classes[at] for at in path.starts]

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

    def _num_true(self, path: Path, runs: list[Run]) -> int:
        """How many keys of a new path are who their rows say, as far as that matters here.

        A row knows its key by a fingerprint. That two have the same one is next to impossible, but
        the chunk of the one must never be called by the name of the other.
        """
        for start, stop, old_id in runs:
            if old_id == _ADOPTED:
                continue
            old = self.get(old_id)
            at = self._depth_of[path.rows[start]] - old.cut
            if old.keys[at : at + stop - start] != path.keys[start:stop]:
                for i, row in enumerate(path.rows[start:stop].tolist(), start):
                    if old.keys[self._depth_of[row] - old.cut] != path.keys[i]:
                        return i
        return len(path.rows)

    def _take_over(self, rows: NDArray[np.int64], runs: list[Run], depths: list[int]) -> None:
        """Runs are another's now; `depths`: at which the last of each was before."""
        for (start, stop, old_id), depth in zip(runs, depths, strict=True):
            if old_id == _ADOPTED:
                continue
            old = self.get(old_id)
            old.num -= stop - start
            self._unhang(old)
            if old.num:
                self._cut_off(old, int(rows[stop - 1]), depth)
                self._hang(old)
            else:
                self._empty(old)

    def _cut_off(self, path: Path, row: int, depth: int) -> None:
        """What lies above and at `row` is another's."""
        cut = depth - path.cut + 1
        if path.rows[cut - 1] != row:
            raise Bug(f"hazard: row {row} is not in path {path.id}")
        path.cut += cut
        path.rows, path.keys = path.rows[cut:].copy(), path.keys[cut:]
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
        if path.num < len(path.rows):
            mine = path.rows[self._owner[path.rows] == -2 - path.id]
            if len(mine):
                self._owner[mine] = _ABSENT
        if path.num:
            self._store.pack(path)
        else:
            self._store.forget(path)

    def _hang(self, path: Path) -> None:
        if path.parent_row >= 0:
            path.hangs = True
            self._hanging_of[path.parent_row] += 1

    def _unhang(self, path: Path) -> None:
        if not path.hangs:
            return
        path.hangs = False
        row = path.parent_row
        self._hanging_of[row] -= 1
        owner = self._owner_of[row]
        if owner >= 0 and owner != _ADOPTED and not self._hanging_of[row]:
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
        num = at + 1 - first
        if path is not self._young[-1][0] or path.hi > first:  # else all are its own, and to come
            is_next = self._owner[path.rows[first : at + 1]] == -2 - path.id
            if not is_next.all():
                num = int(np.argmin(is_next[::-1]))
        awaited = list(path.keys[at + 1 - num : at + 1])
        awaited.reverse()
        if awaited == keys[:num]:
            return num
        pairs = zip(awaited, keys, strict=False)
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
            self.withdraw(path)
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
        gone = -2 - path.id if path.is_young else _ABSENT
        rows = path.rows[at : path.hi]
        if len(places) < len(rows):
            rows = path.rows[list(places)]
        if len(rows) <= _FEW:
            for row in rows.tolist():
                self._owner_of[row] = gone
        else:
            self._owner[rows] = gone
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
            if at <= path.floor or not (path.num == at or self.holds(path, at - 1)):
                self.withdraw(path)
                self.unsettled.add(path)

    def _empty(self, path: Path) -> None:
        self.withdraw(path)
        path.hi = 0
        self.unsettled.discard(path)
        if not path.is_young:
            self._store.forget(path)

    # --- ends ---------------------------------------------------------------------------------

    def settle(self, path: Path) -> None:
        """Work out `hi`, `floor` and `cls`; if its end may go, it is one of `ends` then."""
        path.hi = hi = self.deepest(path, path.hi)
        if not path.is_young and hi * 2 < len(path.rows):
            path.rows, path.keys = path.rows[:hi].copy(), path.keys[:hi]
        while path.branches:
            at = path.branches[-1]
            if at < hi and self._hanging_of[int(path.rows[at])]:
                break
            path.branches.pop()
        path.floor, cls = self.stretch(path, hi)
        if path.branches:
            path.floor = max(path.floor, path.branches[-1] + 1)
            if path.floor == hi:
                return
        path.cls = cls
        self.ends.add(cls, path.serial, path.id)
        if not path.is_young:
            self._store.pack(path)

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
        keys = list(path.keys[lowest : path.hi])
        keys.reverse()
        places = range(path.hi - 1, lowest - 1, -1)
        if path.num == path.hi:
            return places, keys
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


def _depths(num: int) -> NDArray[np.int64]:
    """The half of a pair that is a depth; of the first so many."""
    return np.arange(num, dtype=np.int64) << np.int64(32 if _OF_OWNER == 0 else 0)
