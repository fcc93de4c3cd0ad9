"""When to leave the choice to LRU: whoever finds less than LRU would, for long, is overruled.

Both sides are counted on the same requests, all of them: what the level had, and what LRU would
have had (`lru_shadow`). A balance is kept of what was lost, as a share of what was asked for lately.
Gains pay losses back, but little credit is kept for bad times, else a regime that has gone would
pay for the one that is. Above `_MOST_LOST` the level acts as LRU, which costs nothing more; once
the loss has faded to `_LITTLE_LOST`, by asking going on or by having been long ago, the policy has
another try.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from undercroft.policies.known_prefixes import Seen
from undercroft.policies.lru_shadow import LruShadow

__all__ = ["Guard"]

_LOG = logging.getLogger(__name__)
_MOST_LOST, _LITTLE_LOST, _MOST_CREDIT = 0.004, 0.001, 0.004
"""Of all chunks asked for lately."""
_NUM_REQUESTS = 20_000
"""How many are lately, about."""
_MAX_RETURNED = 1 << 14


class Guard:
    """Of one level.

    Args:
        name: The policy's, for the log.
        capacity_chunks: How many chunks the level holds.
        num_rows: Of the table of known prefixes.

    Attributes:
        is_overruling: Whether the level has to act as LRU.
        num_times: How often that has begun.

    Threads: one. Memory, cost: those of `LruShadow`.
    """

    def __init__(self, name: str, capacity_chunks: int, num_rows: int) -> None:
        self.is_overruling = False
        self.num_times = 0
        self._name = name
        self._capacity = capacity_chunks
        self._shadow = LruShadow(capacity_chunks, num_rows)
        self._returned: set[int] = set()  # rows of chunks that were lost and have come again
        self._asked = 0.0
        self._lost = 0.0

    def on_request(self, seen: Seen, is_there: NDArray[np.bool_], num_told: int) -> None:
        """A request has ended.

        Args:
            seen: The request.
            is_there: Whether the level had each of its chunks.
            num_told: Of so many, from the root on, it was told of before: they are not asked again.
        """
        num_lru = self._shadow.on_request(seen, is_there)
        num_found = int(is_there.argmin()) or int(is_there[0]) * len(is_there)
        if self._returned:
            num_found = self._without_returned(seen, num_found)
        lost = max(num_lru, num_told) - max(num_found, num_told)
        fades = 1 - 1 / _NUM_REQUESTS
        self._asked = asked = self._asked * fades + max(0, len(is_there) - num_told)
        self._lost = lost = max(-_MOST_CREDIT * asked, self._lost * fades + lost)
        if not self.is_overruling:
            if lost > _MOST_LOST * asked:
                self._overrule()
        elif lost < _LITTLE_LOST * asked:
            self.is_overruling = False

    def on_come(self, row: int, serial: int) -> None:
        """The chunk of `row` has come in, of a path that request `serial` used last."""
        if not self._shadow.come(row, serial) and len(self._returned) < _MAX_RETURNED:
            self._returned.add(row)

    def on_come_all(self, rows: NDArray[np.int64], serial: int) -> None:
        """The same of many."""
        back = self._shadow.come_all(rows, serial)
        if len(back) and len(self._returned) < _MAX_RETURNED:
            self._returned.update(back.tolist())

    def on_drop(self, row: int) -> None:
        """The bytes of the chunk of `row` are void."""
        self._shadow.drop(row)

    def _without_returned(self, seen: Seen, num_found: int) -> int:
        """What was lost, and read again for the sake of this request, it had not found."""
        rows = seen.rows.tolist()
        lost_at = next((at for at in range(num_found) if rows[at] in self._returned), num_found)
        self._returned.difference_update(rows)
        return lost_at

    def _overrule(self) -> None:
        self.is_overruling = True
        self.num_times += 1
        if self.num_times == 1:
            _LOG.info(
                "policy %s of a level of %d chunks finds less than LRU would on this traffic (%.0f "
                "of the last %.0f chunks): it acts as LRU, and tries again later",
                self._name,
                self._capacity,
                self._lost,
                self._asked,
            )
