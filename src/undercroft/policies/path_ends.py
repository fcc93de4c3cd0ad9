"""Paths from whose end a chunk can go: by class, each class in the order of last use."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from undercroft.errors import Bug

__all__ = ["PathEnds"]

_MAX_BLOCK = 512
_LOW = _MAX_BLOCK // 4
"""A block with fewer joins its neighbour, if the two are no more than half full together."""


class PathEnds:
    """Sorted lists in blocks: any may come or leave, and none that has left stays behind.

    Args:
        num_classes: Classes are 0 up to this.

    Attributes:
        changed: Classes whose first or last is another than when this was cleared.

    Cost: 1 us a call, and the move of a block; nothing is ever cleaned up. Memory: 12 bytes each,
    up to 50 where most of a class have left.
    """

    def __init__(self, num_classes: int) -> None:
        self._classes = [_Class() for _ in range(num_classes)]
        self.changed: set[int] = set()

    def add(self, cls: int, serial: int, path_id: int) -> None:
        """A path that was used last by request `serial`."""
        if self._classes[cls].add(serial, path_id):
            self.changed.add(cls)

    def remove(self, cls: int, serial: int, path_id: int) -> None:
        """It is none any more.

        Raises:
            Bug: It was none.
        """
        if self._classes[cls].remove(serial, path_id):
            self.changed.add(cls)

    def outermost(self, cls: int) -> tuple[int, int] | None:
        """The paths of a class that were used first and last; None if there are none."""
        blocks = self._classes[cls].blocks
        return (blocks[0][1][0], blocks[-1][1][-1]) if blocks else None

    def num(self, cls: int) -> int:
        """How many there are."""
        return sum(len(ids) for _, ids in self._classes[cls].blocks)


class _Class:
    __slots__ = ("blocks", "lasts")

    def __init__(self) -> None:
        self.blocks: list[tuple[array[int], array[int]]] = []  # serials, ids
        self.lasts: list[int] = []  # the greatest serial of each

    def add(self, serial: int, path_id: int) -> bool:
        """Whether it is the first or last now."""
        blocks, lasts = self.blocks, self.lasts
        if not blocks or (serial > lasts[-1] and len(blocks[-1][0]) == _MAX_BLOCK):
            blocks.append((array("q", (serial,)), array("i", (path_id,))))
            lasts.append(serial)
            return True
        number = min(bisect_left(lasts, serial), len(lasts) - 1)
        serials, ids = blocks[number]
        at = bisect_left(serials, serial)
        serials.insert(at, serial)
        ids.insert(at, path_id)
        lasts[number] = serials[-1]
        is_outermost = (number == 0 and at == 0) or (
            number == len(blocks) - 1 and at == len(serials) - 1
        )
        if len(serials) > _MAX_BLOCK:
            self._split(number)
        return is_outermost

    def _split(self, number: int) -> None:
        serials, ids = self.blocks[number]
        middle = len(serials) // 2
        self.blocks[number] = serials[:middle], ids[:middle]
        self.blocks.insert(number + 1, (serials[middle:], ids[middle:]))
        self.lasts[number : number + 1] = [serials[middle - 1], serials[-1]]

    def remove(self, serial: int, path_id: int) -> bool:
        """Whether it was the first or last."""
        number = bisect_left(self.lasts, serial)
        serials, ids = self.blocks[number] if number < len(self.blocks) else ((), ())
        at = bisect_left(serials, serial)
        if not (at < len(ids) and serials[at] == serial and ids[at] == path_id):
            raise Bug(f"hazard: path {path_id}, used by request {serial}, is no candidate")
        del serials[at], ids[at]
        is_outermost = (number == 0 and at == 0) or (
            number == len(self.blocks) - 1 and at == len(serials)
        )
        if not serials:
            del self.blocks[number], self.lasts[number]
            return is_outermost
        self.lasts[number] = serials[-1]
        if len(serials) < _LOW:
            self._join(number)
        return is_outermost

    def _join(self, number: int) -> None:
        """With the block before or after it, so that blocks do not all dwindle away."""
        blocks = self.blocks
        for first in (number - 1, number):
            if first < 0 or first + 1 >= len(blocks):
                continue
            (serials, ids), (more_serials, more_ids) = blocks[first : first + 2]
            if len(serials) + len(more_serials) <= _MAX_BLOCK // 2:
                serials.extend(more_serials)
                ids.extend(more_ids)
                self.lasts[first] = serials[-1]
                del blocks[first + 1], self.lasts[first + 1]
                return
