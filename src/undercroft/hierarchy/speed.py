"""How fast a tier has lately been: what its movers saw."""

from __future__ import annotations

from collections import deque
from statistics import median

from undercroft.hierarchy.outcome import Op

__all__ = ["LEAST_READS", "Speeds"]

LEAST_READS = 4
"""Reads that must have been seen before their speed counts as known."""
_NUM_READS = 8
_WEIGHT = 0.1


class Speeds:
    """Seconds per byte that one mover thread needs. Threads: the caller serialises what adds.

    Cost: about 1 us a read.
    """

    def __init__(self) -> None:
        self._averages: dict[Op, float] = {}
        self._reads: deque[float] = deque(maxlen=_NUM_READS)
        self.read_s_per_byte: float | None = None
        """The median of the last reads, those past their deadline included; None: too few seen.

        For deciding whether to read at all, so neither one hiccup nor one lucky read changes it,
        and half a dozen reads do."""

    def served(self, op: Op, seconds: float, num_bytes: int) -> None:
        """A call moved so many bytes."""
        s_per_byte = seconds / num_bytes
        before = self._averages.get(op, s_per_byte)
        self._averages[op] = before + _WEIGHT * (s_per_byte - before)
        if op is Op.READ:
            self._see_read(s_per_byte)

    def overdue(self, op: Op, seconds: float, num_bytes: int) -> None:
        """A call has taken so long already, and is left to itself."""
        if op is Op.READ and num_bytes:
            self._see_read(seconds / num_bytes)

    def _see_read(self, s_per_byte: float) -> None:
        self._reads.append(s_per_byte)
        if len(self._reads) >= LEAST_READS:
            self.read_s_per_byte = median(self._reads)

    def average(self, op: Op) -> float | None:
        """A moving average of what was served; None: nothing yet.

        A call that hangs says nothing of it: it would make whoever asks how long to wait wait for
        the next one all the longer.
        """
        return self._averages.get(op)
