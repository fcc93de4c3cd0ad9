"""Let a chunk in when it has been offered often enough to be worth the write."""

from __future__ import annotations

from collections import OrderedDict

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey

__all__ = ["Frequency"]


class Frequency:
    """Admits a chunk from its `sights`-th offer on; most prompts are seen only once.

    An offer is one call of `admit`. Counts are kept for the keys offered last; a key that falls out
    of the table starts again. What comes by more often than that is found; a prompt of more chunks
    than the table holds is not, however often it comes.

    Args:
        sights: Offers it takes; 1 admits everything.
        max_tracked: Keys remembered, the latest offered.

    Raises:
        ConfigError: A number is not positive.

    Memory: some 200 bytes a tracked key, its own included; nothing per key that the garbage
    collector tracks. Threads: one. Cost: O(1).
    """

    name = "frequency"

    def __init__(self, sights: int = 2, max_tracked: int = 65536) -> None:
        for name, value in (("sights", sights), ("max_tracked", max_tracked)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"admission frequency: {name} is {value!r}, but must be a whole number >= 1"
                )
        self.sights = sights
        self.max_tracked = max_tracked
        self._counts: OrderedDict[ChunkKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:  # noqa: ARG002 - the seam's signature
        """Whether this is at least the `sights`-th offer of `key`."""
        counts = self._counts
        count = counts.pop(key, 0) + 1
        counts[key] = min(count, self.sights)
        if len(counts) > self.max_tracked:
            counts.popitem(last=False)
        return count >= self.sights
