"""A path: what is left, resident or awaited, of what one request used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from struct import Struct

import numpy as np

from undercroft.errors import Bug
from undercroft.keys import ChunkKey
from undercroft.policies.known_prefixes import Seen

__all__ = ["Path", "PathStore"]

_MAX_PACKED = 4
_MAX_UNPACKED = 64
"""Short paths that rest and were asked for: so many are kept as objects for a while."""
_FIXED = Struct("<qdiiixxxx")  # rows follow, aligned

_PackedPath = tuple[bytes, *tuple[ChunkKey, ...]]
"""All there is to know of a short path that rests; the garbage collector passes such a one by."""


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
        self.keys = tuple(seen.keys)  # the garbage collector passes it by
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


class PathStore:
    """The paths, by number. Short ones that rest are packed.

    A path object is void once others have been asked for: it may have been packed since. So is one
    that was packed: it has no residents then, and no class.

    Cost: 1-3 us a call. Memory: 8 bytes a path besides itself.
    """

    def __init__(self) -> None:
        self._by_id: list[Path | _PackedPath | None] = []
        self._free: list[int] = []
        self._unpacked: deque[Path] = deque()

    def __iter__(self) -> Iterator[Path]:
        """All that have residents; of those packed, copies."""
        for path_id, path in enumerate(self._by_id):
            if isinstance(path, Path):
                if path.num:
                    yield path
            elif path is not None:
                yield _unpacked(path_id, path)

    def new(self, seen: Seen) -> Path:
        """The path of a request."""
        if self._free:
            path = Path(self._free.pop(), seen)
            self._by_id[path.id] = path
        else:
            path = Path(len(self._by_id), seen)
            self._by_id.append(path)
        return path

    def forget(self, path: Path) -> None:
        """There is nothing left of it."""
        self._by_id[path.id] = None
        self._free.append(path.id)

    def get(self, path_id: int) -> Path:
        """The path of that id.

        Raises:
            Bug: There is none.
        """
        path = self._by_id[path_id]
        if isinstance(path, Path):
            return path
        if path is None:
            raise Bug(f"hazard: there is no path {path_id}")
        whole = self._by_id[path_id] = _unpacked(path_id, path)
        self._unpacked.append(whole)
        if len(self._unpacked) > _MAX_UNPACKED:
            self.pack(self._unpacked.popleft())
        return whole

    def used(self, path_id: int) -> tuple[int, float]:
        """The request that used a path last, and when that was.

        Raises:
            Bug: There is none.
        """
        path = self._by_id[path_id]
        if path is None:
            raise Bug(f"hazard: there is no path {path_id}")
        return _used(path)

    def pack(self, path: Path) -> None:
        """Keep a path in little room, if that can be."""
        packed = _packed(path) if self._by_id[path.id] is path else None
        if packed is not None:
            self._by_id[path.id] = packed
            path.num = path.hi = 0
            path.cls = -1


def _packed(path: Path) -> _PackedPath | None:
    """`path` in little room, if it is short and rests; else None."""
    num = len(path.keys)
    if (
        num > _MAX_PACKED
        or not path.num == path.hi == num
        or path.cls < 0
        or path.is_young
        or path.branches
        or len(path.classes) > 1
    ):
        return None
    parent_row = path.parent_row if path.hangs else -1
    fixed = _FIXED.pack(path.serial, path.used_s, path.cls, path.cut, parent_row)
    return (fixed + path.rows.tobytes(), *path.keys)


def _unpacked(path_id: int, packed: _PackedPath) -> Path:
    """What was packed."""
    fixed, *keys = packed
    serial, used_s, cls, cut, parent_row = _FIXED.unpack_from(fixed)
    rows = np.frombuffer(fixed, np.int64, offset=_FIXED.size)
    path = Path(path_id, Seen(serial, used_s, keys, rows, [0], [cls], 0))
    path.cls, path.cut, path.parent_row = cls, cut, parent_row
    path.num = path.hi = len(keys)
    path.hangs = parent_row >= 0
    path.is_young = False
    return path


def _used(path: Path | _PackedPath) -> tuple[int, float]:
    """The request that used it last, and when that was."""
    if isinstance(path, Path):
        return path.serial, path.used_s
    serial, used_s, *_ = _FIXED.unpack_from(path[0])
    return serial, used_s
