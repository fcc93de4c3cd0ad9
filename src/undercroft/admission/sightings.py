"""How often each of many keys was seen, in eight bytes a key."""

from __future__ import annotations

from array import array

import xxhash

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey

__all__ = ["MAX_TRACKED", "Sightings"]

MAX_TRACKED = 1 << 20
_WAYS = 8
_COUNT_BITS, _AGE_BITS = 8, 16
_MOST_COUNT, _AGE_MASK = (1 << _COUNT_BITS) - 1, (1 << _AGE_BITS) - 1
_TAG_SHIFT = _COUNT_BITS + _AGE_BITS
_TICKS = 256  # of the age, while as many keys are seen as there are places


class Sightings:
    """Counts by key, of the keys seen last.

    A table of buckets of eight places, as a processor's cache has them: a key that is new takes the
    place in its bucket that was not seen for longest. A place holds 40 bits of the key's hash, the
    count, 255 at most, and when it was last seen. A new key is taken for another once in 10^11.

    Args:
        max_tracked: Keys remembered, > 0; of the last half as many one in twenty is lost, as
            buckets fill unevenly.
        what: Whose option `max_tracked` is, for the error.

    Raises:
        ConfigError: `max_tracked` is not a whole number above 0.

    Memory: 8 to 16 bytes for each of `max_tracked`, at once. Threads: one. Cost: O(1), about a
    microsecond.
    """

    def __init__(self, max_tracked: int, what: str) -> None:
        if not isinstance(max_tracked, int) or isinstance(max_tracked, bool) or max_tracked < 1:
            raise ConfigError(
                f"{what}: max_tracked is {max_tracked!r}, but must be a whole number >= 1"
            )
        num_buckets = 1 << max(0, (-(-max_tracked // _WAYS) - 1).bit_length())
        self._mask = num_buckets - 1
        self._places = array("Q", bytes(8 * _WAYS * num_buckets))
        self._now = 1
        self._per_tick = self._left = max(1, _WAYS * num_buckets // _TICKS)

    def see(self, key: ChunkKey) -> int:
        """Count a sight of `key`; how many that makes, 255 at most."""
        self._left -= 1
        if not self._left:
            self._left = self._per_tick
            self._now = self._now % _AGE_MASK + 1  # never 0: that is a place nobody took
        places, now = self._places, self._now
        digest = xxhash.xxh3_64_intdigest(key)
        first, tag = (digest & self._mask) * _WAYS, digest >> _TAG_SHIFT
        oldest, oldest_age = first, -1
        for index in range(first, first + _WAYS):
            place = places[index]
            if place >> _TAG_SHIFT == tag and place & _AGE_MASK:
                count = min(_MOST_COUNT, (place >> _AGE_BITS & _MOST_COUNT) + 1)
                places[index] = tag << _TAG_SHIFT | count << _AGE_BITS | now
                return count
            seen = place & _AGE_MASK
            age = (now - seen) % _AGE_MASK if seen else _AGE_MASK + 1
            if age > oldest_age:
                oldest, oldest_age = index, age
        places[oldest] = tag << _TAG_SHIFT | 1 << _AGE_BITS | now
        return 1
