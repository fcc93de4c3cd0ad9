"""From pages to the fewest copies that a device's copy engine needs.

A copy engine spends about a microsecond on each copy, whatever its size, so pages that lie one
after the other on both sides (blocks of one chunk that the engine gave out in a row) become one
copy. No copy crosses a multiple of `piece_bytes` in the region: each such piece is registered with
the driver by itself, and a driver refuses a copy that touches two registrations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from undercroft.layout.plan import Fragments, Offsets

__all__ = ["Copies", "copies"]


class Copies(NamedTuple):
    """Copies of different lengths; three arrays, `(num_copies,)` int64.

    Args:
        engine: Addresses in the engine's tensors.
        region: Offsets in the region.
        sizes: Bytes.
    """

    engine: Offsets
    region: Offsets
    sizes: Offsets


def copies(pages: Fragments, *, piece_bytes: int, max_copies: int) -> Iterator[Copies]:
    """The copies that move `pages`, at most `max_copies` at a time.

    Args:
        pages: Addresses in the engine's tensors, and offsets in the region.
        piece_bytes: No copy crosses a multiple of it in the region.
        max_copies: >= 1.

    Cost: some numpy calls, together about 50 ns per page.
    """
    if not pages.engine.size:
        return
    # One column is one page of every block: that is how chunks are laid out.
    engine, region = pages.engine.T.ravel(), pages.region.T.ravel()
    size = pages.page_bytes
    breaks = (np.diff(engine) != size) | (np.diff(region) != size)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(np.append(starts, engine.size))
    merged = _split(Copies(engine[starts], region[starts], counts * size), piece_bytes)
    for first in range(0, len(merged.sizes), max_copies):
        yield Copies(*(values[first : first + max_copies] for values in merged))


def _split(merged: Copies, piece_bytes: int) -> Copies:
    """Cut copies at the multiples of `piece_bytes` in the region."""
    engine, region, sizes = merged
    first_piece = region // piece_bytes
    num_parts = (region + sizes - 1) // piece_bytes - first_piece + 1
    if num_parts.max() == 1:
        return merged
    index = np.repeat(np.arange(len(sizes)), num_parts)
    part = np.arange(len(index)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    piece_start = (first_piece[index] + part) * piece_bytes
    start = np.maximum(region[index], piece_start)
    end = np.minimum(region[index] + sizes[index], piece_start + piece_bytes)
    return Copies(engine[index] + (start - region[index]), start, end - start)
