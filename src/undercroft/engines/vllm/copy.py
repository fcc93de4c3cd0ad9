"""Copies of pages between engine memory and host slots, in as few calls as the addresses allow.

Pages whose addresses advance evenly on both sides (consecutive blocks, or the layers of one block
in evenly spaced tensors) go as one strided numpy copy: one call, one row copy per page, the
GIL released all the while. Pages without such a pattern go through a small buffer that stays in
the processor's cache, if they are small: gather, then scatter, two calls per tile; big ones go
one by one. No torch operator is used: its worker threads collapse on a busy machine. Numbers:
bench/run.py copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercroft.errors import Bug
from undercroft.layout.plan import Offsets

__all__ = ["STEP_BYTES", "Span", "copy_pages", "copy_pages_singly"]

STEP_BYTES = 8 << 20
"""About the most that is copied between two looks at whether something else is due."""

_TILE_BYTES = 128 << 10
_MIN_RUN_BYTES = 24 << 10
_MAX_ROWS_BYTES = 1 << 63
"""numpy makes no array that would have so many bytes if its elements did not overlap."""


class Span:
    """A stretch of addresses of this process.

    Nothing is checked here beyond the ends of the stretch: whoever names offsets has made sure
    that memory is there.

    Args:
        address: Where it starts.
        num_bytes: Its length.
        owners: Objects that keep the memory alive; held as long as the span is.
    """

    __slots__ = ("_owners", "buffer", "num_bytes")

    def __init__(self, address: int, num_bytes: int, owners: Iterable[object]) -> None:
        self.buffer: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
        self.num_bytes = num_bytes
        self._owners = tuple(owners)

    @classmethod
    def of(cls, array: NDArray[np.uint8]) -> Span:
        """The memory of a contiguous array."""
        return cls(array.ctypes.data, array.nbytes, (array,))

    def rows(self, row_bytes: int) -> NDArray[np.void]:
        """A row of opaque bytes at every offset: element `i` starts at byte `i`.

        Rows that are evenly spaced are a slice of it, which numpy makes sooner than a new array.
        """
        count = self.num_bytes - row_bytes + 1
        return np.ndarray((count,), f"V{row_bytes}", self.buffer, 0, (1,))


def copy_pages(
    target: Span,
    target_offsets: Offsets,
    source: Span,
    source_offsets: Offsets,
    page_bytes: int,
) -> Iterator[int]:
    """Copy pages; each step of the iterator copies some and gives the number of bytes.

    Args:
        target: Where to.
        target_offsets: `(num_blocks, num_refs)` offsets in `target`, none overlapping.
        source: Where from.
        source_offsets: Offsets in `source`, same shape.
        page_bytes: Bytes of every page.

    Raises:
        Bug: An offset outside its span.

    Threads: any, if targets are disjoint; the GIL is free during copies. Cost: one row copy
    per page from 16 KiB up or when addresses are even; otherwise two.
    """
    if max(target.num_bytes, source.num_bytes) * page_bytes >= _MAX_ROWS_BYTES:
        # Tensors on the heap and elsewhere are 2^45 bytes apart. The page is big then, so that
        # a call for each costs little.
        yield from copy_pages_singly(target, target_offsets, source, source_offsets, page_bytes)
        return
    _check(target, target_offsets, page_bytes)
    _check(source, source_offsets, page_bytes)
    if not target_offsets.size:
        return
    orders = [(target_offsets.ravel(), source_offsets.ravel())]
    if 1 not in target_offsets.shape:
        orders.append((target_offsets.T.ravel(), source_offsets.T.ravel()))
    turns = [_turns(to, of) for to, of in orders]
    best = min(range(len(turns)), key=lambda index: turns[index].size)
    to, of = orders[best]
    has_runs = turns[best].size <= to.size // 2
    starts = _run_starts(turns[best]) if has_runs else np.arange(to.size)
    if to.size * page_bytes >= _MIN_RUN_BYTES * len(starts):
        yield from _copy_runs(target, to, source, of, page_bytes, starts)
    else:
        yield from _copy_tiles(target, to, source, of, page_bytes)


def copy_pages_singly(
    target: Span,
    target_offsets: Offsets,
    source: Span,
    source_offsets: Offsets,
    page_bytes: int,
) -> Iterator[int]:
    """As `copy_pages`, page by page: slow, with nothing clever to go wrong."""
    _check(target, target_offsets, page_bytes)
    _check(source, source_offsets, page_bytes)
    to = np.frombuffer(target.buffer, np.uint8)
    of = np.frombuffer(source.buffer, np.uint8)
    pairs = zip(target_offsets.ravel().tolist(), source_offsets.ravel().tolist(), strict=True)
    for start, origin in pairs:
        to[start : start + page_bytes] = of[origin : origin + page_bytes]
        yield page_bytes


def _check(span: Span, offsets: Offsets, page_bytes: int) -> None:
    if not offsets.size:
        return
    lowest, highest = int(offsets.min()), int(offsets.max())
    if lowest < 0 or highest + page_bytes > span.num_bytes:
        raise Bug(
            f"pages of {page_bytes} bytes at {lowest}..{highest} reach outside {span.num_bytes}"
        )


def _turns(to: Offsets, of: Offsets) -> Offsets:
    """Indices of pages whose step to the next page differs from the step that led to them."""
    to_steps, of_steps = np.diff(to), np.diff(of)
    return np.flatnonzero((np.diff(to_steps) != 0) | (np.diff(of_steps) != 0)) + 1


def _run_starts(turns: Offsets) -> Offsets:
    """Starts of runs in which both sides advance evenly; greedy, so at most twice the fewest."""
    # A run ends at a turn, and the odd step leads to the start of the next one: another turn.
    ends, nexts = turns[::2], turns[1::2]
    if len(ends) == len(nexts) and np.array_equal(ends + 1, nexts):
        return np.concatenate([[0], nexts])
    starts = [0]
    for turn in turns.tolist():
        if turn > starts[-1]:
            starts.append(turn + 1)
    return np.array(starts, np.int64)


def _copy_runs(
    target: Span, to: Offsets, source: Span, of: Offsets, page_bytes: int, starts: Offsets
) -> Iterator[int]:
    into, origin = target.rows(page_bytes), source.rows(page_bytes)
    most = max(1, STEP_BYTES // page_bytes)
    lengths = np.diff(starts, append=to.size)
    if lengths.max() > most:
        runs = pairwise([*starts.tolist(), to.size])
        starts = np.concatenate([np.arange(start, end, most) for start, end in runs])
        lengths = np.diff(starts, append=to.size)
    there, here = _slices(to, starts, lengths), _slices(of, starts, lengths)
    copied = 0
    for length, target_rows, source_rows in zip(lengths.tolist(), there, here, strict=True):
        into[target_rows] = origin[source_rows]
        copied += length * page_bytes
        if copied >= STEP_BYTES:
            yield copied
            copied = 0
    if copied:
        yield copied


def _slices(offsets: Offsets, starts: Offsets, lengths: Offsets) -> Iterator[slice]:
    """Of `Span.rows`, the rows of each run; only the first one if all are the same."""
    firsts = offsets[starts]
    steps = offsets[starts + (lengths > 1)] - firsts
    lengths = np.where(steps != 0, lengths, 1)
    steps[lengths == 1] = 1
    ends = firsts + lengths * steps
    stops: list[int | None] = ends.tolist()
    if ends.min() < 0:  # downwards, to the very first byte
        stops = [None if stop < 0 else stop for stop in ends.tolist()]
    return map(slice, firsts.tolist(), stops, steps.tolist())


def _copy_tiles(
    target: Span, to: Offsets, source: Span, of: Offsets, page_bytes: int
) -> Iterator[int]:
    tile_rows = max(1, _TILE_BYTES // page_bytes)
    into, origin = target.rows(page_bytes), source.rows(page_bytes)
    copied = 0
    for row in range(0, to.size, tile_rows):
        tile = slice(row, row + tile_rows)
        into[to[tile]] = origin[of[tile]]
        copied += min(tile_rows, to.size - row) * page_bytes
        if copied >= STEP_BYTES:
            yield copied
            copied = 0
    if copied:
        yield copied
