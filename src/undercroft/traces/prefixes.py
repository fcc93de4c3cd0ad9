"""Numbers prefixes in the order in which they are first seen, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

__all__ = ["PrefixNumbers"]

_MARK_BYTES = 8


class PrefixNumbers:
    """Which number each prefix has, by a mark of the key that names it.

    A mark is a keyed hash: with `salt` unknown, nobody can tell from the table which prefixes are
    in it. Two prefixes have the same mark once in 2^64 pairs; the one then counts for the other.

    Args:
        salt: Secret, up to 64 bytes.
        max_prefixes: How many there may be.

    Memory: 24 bytes a prefix, for `max_prefixes` rounded up to a power of two; what is not used
    is not resident. Threads: one at a time.
    """

    def __init__(self, salt: bytes, max_prefixes: int) -> None:
        num_places = 2 << (max_prefixes - 1).bit_length()
        self._salt = salt
        self._mask = num_places - 1
        self._max_prefixes = max_prefixes
        # Open addressing, at most half full. Views, as a NumPy scalar costs three times as much.
        self._marks = np.zeros(num_places, dtype=np.uint64).data
        self._ids = np.zeros(num_places, dtype=np.int32).data
        self._num_prefixes = 0

    def __len__(self) -> int:
        return self._num_prefixes

    def place(self, keys: Sequence[bytes]) -> tuple[int, int] | None:
        """Where a request hangs in the tree of prefixes; what is new gets the next numbers.

        Args:
            keys: Of each of its prefixes, the shortest first.

        Returns:
            The number of its longest prefix that is known (-1: none is) and how many are longer;
            None if there is no room for those.

        Cost: about 1 us for each new prefix and for each halving of `keys`: a prefix is known only
        if all that it begins with are.
        """
        num_known, end, deepest = 0, len(keys), -1
        while num_known < end:
            middle = (num_known + end) // 2
            place = self._find(self._mark(keys[middle]))
            if self._marks[place]:
                num_known, deepest = middle + 1, self._ids[place]
            else:
                end = middle
        num_new = len(keys) - num_known
        if self._num_prefixes + num_new > self._max_prefixes:
            return None
        for key in keys[num_known:]:
            mark = self._mark(key)
            place = self._find(mark)
            self._marks[place] = mark
            self._ids[place] = self._num_prefixes
            self._num_prefixes += 1
        return deepest, num_new

    def _mark(self, key: bytes) -> int:
        digest = blake2b(key, digest_size=_MARK_BYTES, key=self._salt).digest()
        return int.from_bytes(digest, "little") or 1  # 0 is an empty place

    def _find(self, mark: int) -> int:
        """The place of `mark`, or where it would be put."""
        marks, place = self._marks, mark & self._mask
        while (there := marks[place]) and there != mark:
            place = (place + 1) & self._mask
        return place
