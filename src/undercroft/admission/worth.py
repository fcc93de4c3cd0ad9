"""How often a chunk will be used again, given how often it was seen: learned from the traffic."""

from __future__ import annotations

__all__ = ["NUM_CLASSES", "Worth"]

NUM_CLASSES = 8
"""Chunks seen once, twice, ..., and eight times or more."""

_DECAY = 0.97
"""An hour's; half of a count is left after a day."""
_PRIOR_SIGHTS = 32.0
"""So many sights of each class say that what was seen more often is used more often again."""


class Worth:
    """Expected further uses of a chunk, by class of sights.

    Of the chunks seen s times, as many are seen again as chunks are seen for the s+1st time. So
    counting arrivals in each class is enough: nobody has to wait for what does not come.

    Threads: one. Cost: O(1).
    """

    def __init__(self) -> None:
        self._arrivals = [0.0] * NUM_CLASSES
        self._first_in_last = 0.0

    def see(self, num_sights: int) -> int:
        """A chunk was seen for the `num_sights`-th time, > 0; its class."""
        last = NUM_CLASSES - 1
        if num_sights <= last:
            self._arrivals[num_sights - 1] += 1.0
            return num_sights - 1
        self._arrivals[last] += 1.0
        self._first_in_last += num_sights == NUM_CLASSES
        return last

    def fade(self, num_hours: int) -> None:
        """So many hours went by."""
        factor = _DECAY**num_hours
        self._arrivals = [count * factor for count in self._arrivals]
        self._first_in_last *= factor

    def expected_uses(self) -> list[float]:
        """Of each class, how often a chunk in it will be used again."""
        expected = []
        later = self._arrivals[-1] - self._first_in_last
        arrived = self._first_in_last
        for index in reversed(range(NUM_CLASSES)):
            prior = (index + 1) / 2
            expected.append((later + prior * _PRIOR_SIGHTS) / (arrived + _PRIOR_SIGHTS))
            later = sum(self._arrivals[index:])
            arrived = self._arrivals[index - 1]
        return expected[::-1]
