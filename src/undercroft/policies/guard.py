"""When to leave the choice to LRU: whoever finds less than LRU would, for long, is overruled.

Both sides are counted on the same requests, all of them: what the level had, and what LRU would
have had (`lru_shadow`). A balance is kept of what was lost. Gains pay losses back, but little
credit is kept for bad times, else a regime that has gone would pay for the one that is. Where more
was lost than may be, the level acts as LRU, which costs nothing more. After a while the policy has
another try; the while is twice as long each time, until it has done clearly better than LRU.

This bounds what is lost on the whole, not at once: until its chunks have turned over, an overruled
level still lacks what the policy has evicted.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from undercroft.policies.known_prefixes import Seen
from undercroft.policies.lru_shadow import LruShadow

__all__ = ["Guard"]

_LOG = logging.getLogger(__name__)
_MOST_LOST, _MOST_CREDIT = 0.004, 0.004
"""Of all chunks asked for lately."""
_NUM_FREE = 8
"""Beside that, as many requests' worth, or chance would decide at the start."""
_FIRST_PATIENCE, _MAX_PATIENCE = 512, 65_536
"""Requests for which the policy is overruled, twice as many each time until it does better."""
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
        self._asked = self._lost = self._num_requests = 0.0  # lately
        self._num_overruled, self._patience = 0, _FIRST_PATIENCE

    def on_request(self, seen: Seen, num_found: int, num_told: int) -> None:
        """A request has ended.

        Args:
            seen: The request.
            num_found: How many of its chunks the level had, from the root on.
            num_told: Of so many, from the root on, it was told of before: they are not asked again.
        """
        num_lru = self._shadow.on_request(seen, num_found)
        if self._returned:
            num_found = self._without_returned(seen, num_found)
        more = max(num_lru, num_told) - max(num_found, num_told)
        fades = 1 - 1 / _NUM_REQUESTS
        self._asked = asked = self._asked * fades + max(0, len(seen.keys) - num_told)
        self._num_requests = number = self._num_requests * fades + 1
        self._lost = lost = max(-_MOST_CREDIT * asked, self._lost * fades + more)
        if self.is_overruling:
            self._num_overruled += 1
            if self._num_overruled >= self._patience:
                self._try_again()
        elif lost > _MOST_LOST * asked + _NUM_FREE * asked / number:
            self._overrule()
        elif lost <= -_MOST_CREDIT / 2 * asked:
            self._patience = _FIRST_PATIENCE

    def _try_again(self) -> None:
        self.is_overruling = False
        self._num_overruled, self._patience = 0, min(_MAX_PATIENCE, 2 * self._patience)
        self._lost = 0.0

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
