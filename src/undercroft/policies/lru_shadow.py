"""What LRU would have found in a level of one size, without an LRU.

LRU is a stack (Mattson, Gecsei, Slutz & Traiger, 1970): with room for C it holds the C chunks used
last. So it is enough to know which request used each last, and how many chunks each of the recent
requests was the last to use: where those add up to C, LRU ends. There is no second cache and no
sample of the traffic, and so the noise of neither.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from undercroft.policies.known_prefixes import Seen

__all__ = ["LruShadow"]

_SPANS_PER_CHUNK, _MIN_SPANS, _MAX_SPANS = 16, 1 << 12, 1 << 20
_INT32_MAX = 2**31 - 1


class LruShadow:
    """Counts the hits of an LRU of `capacity_chunks`, leaf first, prefix semantics.

    It holds what has come into the level since its last use, or was there: what an admission
    refuses, LRU would not have had either. What was used longer ago than some requests, at least
    16 for each chunk of the capacity up to a million, counts as gone.

    Args:
        capacity_chunks: How many chunks the level holds.
        num_rows: Of the table of known prefixes.

    Threads: one. Memory: 4 bytes a row of that table, 64-128 a chunk up to 4 MiB. Cost: some us a
    request, and some tenths of one a stretch of it that another request was the last to use.
    """

    __slots__ = (
        "_base", "_capacity", "_counts", "_first", "_gone", "_inside", "_last", "_last_of", "_mask",
    )  # fmt: skip

    def __init__(self, capacity_chunks: int, num_rows: int) -> None:
        self._capacity = capacity_chunks
        num_spans = _MIN_SPANS
        while num_spans < min(_MAX_SPANS, _SPANS_PER_CHUNK * capacity_chunks):
            num_spans *= 2
        self._mask = num_spans - 1
        self._last = np.zeros(num_rows, dtype=np.int32)  # by row: the request that used it last
        self._last.fill(0)  # the scheduler's thread pays for no page when it comes to it
        self._last_of = self._last.data
        self._counts = memoryview(bytearray(4 * num_spans)).cast("i")  # by request, round and round
        self._base = 0  # requests are counted from here
        self._first = 1  # the request that used the oldest chunk that is there
        self._gone = 0  # how many of its chunks are not
        self._inside = 0

    def on_request(self, seen: Seen, num_found: int) -> int:
        """A request used a path; how many chunks of it LRU would have found, from the root on.

        Args:
            seen: The request.
            num_found: How many of its chunks the level has, from the root on.
        """
        now = self._now(seen.serial)
        item, last_of = seen.rows.item, self._last_of
        num = seen.num_known  # what deeper rows say is of prefixes that they had before
        num_hits = 0
        while num_hits < num:
            span = last_of[item(num_hits)]
            if span < self._first:
                break
            stop = self._end_of(span, item, num_hits, num)
            size = stop - num_hits
            found = self._take(span, size)
            num_hits += found
            if found < size:
                break
        num_in = max(num_hits, num_found)
        if num_in:
            self._last[seen.rows[:num_in]] = now
            self._add(now, num_in)
        return num_hits

    def _end_of(self, span: int, item: Callable[[int], int], start: int, num: int) -> int:
        """Where a stretch ends that was used last by one request, or by it and later ones.

        Nobody uses a chunk without what it continues: the deeper, the longer ago.
        """
        last_of = self._last_of
        if last_of[item(num - 1)] >= span:
            return num
        deeper = range(start + 1, num)
        return start + 1 + bisect_left(deeper, 1, key=lambda at: last_of[item(at)] < span)

    def come(self, row: int, serial: int) -> bool:
        """The chunk of `row` has come in, of a path that request `serial` used last.

        Returns:
            False if it had been there since, and so was evicted: to LRU that is nothing new.
        """
        now, last = serial - self._base, self._last_of[row]
        if last == now:
            return False
        if now >= self._first:
            if last >= self._first:  # above a hole of what the request was told to have
                self._take(last, 1)
            self._last_of[row] = now
            self._add(now, 1)
        return True

    def come_all(self, rows: NDArray[np.int64], serial: int) -> NDArray[np.int64]:
        """The same of one or more; returns those that had been there since."""
        now = serial - self._base
        last = self._last[rows]
        if last.max() >= self._first:  # rare
            back = [row for row in rows.tolist() if not self.come(row, serial)]
            return np.array(back, dtype=rows.dtype)
        if now >= self._first:
            self._last[rows] = now
            self._add(now, len(rows))
        return rows[:0]

    def drop(self, row: int) -> None:
        """The bytes of a chunk are void: LRU would not have it either."""
        span = self._last_of[row]
        if span >= self._first:
            self._take(span, 1)
            self._last_of[row] = 0

    def _now(self, serial: int) -> int:
        now = serial - self._base
        if now > _INT32_MAX:
            self._clear(serial)
            now = serial - self._base
        gap = now - self._mask - self._first
        if gap > 0:
            counts = np.frombuffer(self._counts, dtype=np.int32)
            spans = np.arange(self._first, self._first + min(gap, len(counts))) & self._mask
            self._inside -= int(counts[spans].sum()) - self._gone
            counts[spans] = 0
            self._gone = 0
            self._first += gap
        return now

    def _clear(self, serial: int) -> None:
        """The numbers have run out: begin with nothing."""
        self._last.fill(0)
        self._counts = memoryview(bytearray(4 * len(self._counts))).cast("i")
        self._base, self._first = serial - 1, 1
        self._gone = self._inside = 0

    def _take(self, span: int, size: int) -> int:
        """`size` chunks leave the request that used them last; how many were there."""
        at = span & self._mask
        gone = self._gone if span == self._first else 0  # its deepest went first
        found = max(0, min(size, self._counts[at] - gone))
        self._counts[at] -= found
        self._inside -= found
        return found

    def _add(self, span: int, num: int) -> None:
        counts, mask = self._counts, self._mask
        counts[span & mask] += num
        self._inside += num
        excess = self._inside - self._capacity
        if excess <= 0:
            return
        first = self._first
        there = counts[first & mask] - self._gone
        while there <= excess:
            excess -= there
            counts[first & mask] = self._gone = 0
            first += 1
            there = counts[first & mask]
        self._first = first
        self._gone += excess
        self._inside = self._capacity
