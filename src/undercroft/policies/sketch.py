"""How often keys were used lately, about right, in a few bytes a key.

A count-min sketch (Cormode & Muthukrishnan 2005) with conservative update (Estan & Varghese 2002):
four rows of counters up to 15; a key has one in each, and the least of the four is its count.
Counts are halved again and again, so that they tell of the recent past ("reset" in TinyLFU). Two
things differ from what the TinyLFU papers do, so that no call takes long:

* one stripe of the rows is halved at a time, in turn, rather than all at once;
* the rows begin small and double with the number of keys. Every counter is copied to the place
  where the wider row looks for it, so no count is lost.
"""

from __future__ import annotations

import xxhash

from undercroft.keys import ChunkKey

__all__ = ["FrequencySketch"]

_MOST = 15
_MIN_WIDTH, _MAX_WIDTH = 1 << 10, 1 << 24
_STRIPE = 1 << 12
_USES_PER_COUNTER = 5  # two counters of a row a key: ten uses a key, as in the paper's evaluation
_HALF = bytes(value // 2 for value in range(256))


class FrequencySketch:
    """Approximate counts of recent uses.

    Memory: 8 to 16 bytes a key; for more than 8 million keys 64 MiB, and it gets less exact.
    Threads: one. Cost: O(1), about a microsecond; to double the rows copies them.
    """

    def __init__(self) -> None:
        self._width = _MIN_WIDTH
        self._rows = [bytearray(_MIN_WIDTH) for _ in range(4)]
        self._cursor = 0
        self._left = self._stripe_uses()

    def _stripe_uses(self) -> int:
        return _USES_PER_COUNTER * min(_STRIPE, self._width)

    def fit(self, num_keys: int) -> None:
        """There are `num_keys` keys whose counts matter: have two counters for each."""
        while 2 * num_keys > self._width < _MAX_WIDTH:
            self._rows = [row + row for row in self._rows]
            self._width *= 2

    def use(self, key: ChunkKey) -> None:
        """Count a use of `key`."""
        digest = xxhash.xxh3_64_intdigest(key)
        place, step, mask = digest, digest >> 32 | 1, self._width - 1
        first, second, third, fourth = self._rows
        i, j, k, m = (
            place & mask,
            place + step & mask,
            place + 2 * step & mask,
            place + 3 * step & mask,
        )
        count = min(first[i], second[j], third[k], fourth[m])
        if count == _MOST:
            return
        if first[i] == count:
            first[i] = count + 1
        if second[j] == count:
            second[j] = count + 1
        if third[k] == count:
            third[k] = count + 1
        if fourth[m] == count:
            fourth[m] = count + 1
        self._left -= 1
        if not self._left:
            self._age()

    def count(self, key: ChunkKey) -> int:
        """How often `key` was used lately; too much at times, 15 at most."""
        digest = xxhash.xxh3_64_intdigest(key)
        step, mask = digest >> 32 | 1, self._width - 1
        first, second, third, fourth = self._rows
        return min(
            first[digest & mask],
            second[digest + step & mask],
            third[digest + 2 * step & mask],
            fourth[digest + 3 * step & mask],
        )

    def forget(self, key: ChunkKey) -> None:
        """Take the uses of `key` back; a key that shares counters with it may lose some, too."""
        count, digest = self.count(key), xxhash.xxh3_64_intdigest(key)
        step, mask = digest >> 32 | 1, self._width - 1
        for number, row in enumerate(self._rows):
            row[digest + number * step & mask] -= count

    def _age(self) -> None:
        """Halve the counters of the next stripe."""
        self._left = self._stripe_uses()
        start = self._cursor
        stop = min(start + _STRIPE, self._width)
        for row in self._rows:
            row[start:stop] = row[start:stop].translate(_HALF)
        self._cursor = stop % self._width
