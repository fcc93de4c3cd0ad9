"""How much a level may evict because its tier says that it is full."""

from __future__ import annotations

from collections.abc import Sequence

from undercroft.clock import Clock

__all__ = ["Relief"]

_PAUSE_S = 60.0


class Relief:
    """Evicting helps if the tier is full of our chunks, and is of no use if others filled the disk.

    So many chunks of a size class may go for nothing; a write that works shows that it helped, and
    then as many may go again. Else a full disk would cost the whole cache, chunk by chunk.

    Args:
        most: For each size class the most that may go.
        clock: After a minute it is tried again.

    Threads: the scheduler's.
    """

    def __init__(self, most: Sequence[int], clock: Clock) -> None:
        self._most = tuple(most)
        self._clock = clock
        self._left = list(most)
        self._spent_s = [float("-inf")] * len(self._left)

    def left(self, size_class: int) -> int:
        """Chunks that may be evicted now."""
        if (
            not self._left[size_class]
            and self._clock.now_s() - self._spent_s[size_class] > _PAUSE_S
        ):
            self._left[size_class] = self._most[size_class]
        return self._left[size_class]

    def spend(self, size_class: int, num_chunks: int) -> None:
        """So many were evicted."""
        self._left[size_class] -= num_chunks
        self._spent_s[size_class] = self._clock.now_s()

    def helped(self, size_class: int) -> None:
        """A write worked."""
        self._left[size_class] = self._most[size_class]
