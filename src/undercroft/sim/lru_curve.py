"""LRU at every capacity in one pass over a trace.

LRU is a stack algorithm (Mattson, Gecsei, Slutz & Traiger, "Evaluation techniques for storage
hierarchies", 1970): with room for C it holds the C blocks used last. A block is a hit at each
capacity from its *distance* on: the number of blocks used at or after its own last use. Requests
touch their blocks deepest first, so that the blocks that a request used last lie in the stack side
by side, the shallowest first, and the distances of a stretch (see `reuse`) are consecutive numbers:
one sum over a Fenwick tree for a stretch, not one for a reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from undercroft.sim.hits import Hits
from undercroft.sim.reuse import Stretches
from undercroft.traces import Trace

__all__ = ["lru_curve"]


def lru_curve(
    trace: Trace, stretches: Stretches, capacities: Sequence[int], *, num_warm: int = 0
) -> list[Hits]:
    """What `policies.lru.Lru` gets at each of `capacities`, touched deepest first.

    The counts are those of a replay, stores and evictions too. As in a replay a request whose
    blocks are being stored can lose those that it hit, and store them again.

    Args:
        trace: The requests.
        stretches: Of the trace.
        capacities: In blocks, each > 0.
        num_warm: Requests at the beginning that are replayed, not counted.

    Cost: O(stretches x log requests + capacities).
    """
    above = _num_above(trace, stretches)
    counted = stretches.request >= num_warm
    first, size = above[counted] + 1, stretches.size[counted].astype(np.int64)
    # One more from the first distance of a stretch on, one less after its last.
    steps = np.zeros(trace.num_blocks + 3, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, first + size, -1)
    hits = np.cumsum(np.cumsum(steps))
    short = np.cumsum(_short_tokens(trace, stretches, above, num_warm))
    # Where a block is looked for when those below it have been touched, the same for a stretch.
    length = trace.lengths[stretches.request[counted]]
    found_at = above[counted] - stretches.depth[counted] + length
    kept = np.cumsum(np.bincount(found_at, weights=size, minlength=trace.num_blocks + 3))
    num_references = int(trace.lengths[num_warm:].sum(dtype=np.int64))
    num_before = int(trace.num_new[:num_warm].sum(dtype=np.int64))
    rows = []
    for capacity in capacities:
        limit = min(capacity, trace.num_blocks + 2)
        num_stored = num_references - int(kept[limit])
        num_held = min(capacity, trace.num_blocks) - min(capacity, num_before)
        rows.append(
            Hits(
                capacity_blocks=capacity,
                num_requests=trace.num_requests - num_warm,
                num_references=num_references,
                hit_blocks=int(hits[limit]),
                num_tokens=int(trace.input_tokens[num_warm:].sum()),
                hit_tokens=int(hits[limit]) * trace.block_tokens - int(short[limit]),
                num_stored=num_stored,
                num_evicted=num_stored - num_held,
            )
        )
    return rows


def _num_above(trace: Trace, stretches: Stretches) -> NDArray[np.int64]:
    """Of each stretch, how many blocks were used after the request that used it last."""
    num_requests = trace.num_requests
    tree = [0] * (num_requests + 1)  # by request: blocks that it was the last one to use
    above = np.empty(len(stretches), np.int64)
    lengths = trace.lengths.tolist()
    lasts, sizes = stretches.last.tolist(), stretches.size.tolist()
    ends = np.searchsorted(stretches.request, np.arange(num_requests), "right").tolist()
    num_seen = begin = 0
    for request, end in enumerate(ends):
        for row in range(begin, end):
            index, num_until = lasts[row] + 1, 0
            while index:
                num_until += tree[index]
                index &= index - 1
            above[row] = num_seen - num_until
        num_old = 0
        for row in range(begin, end):
            num_old += sizes[row]
            _add(tree, lasts[row] + 1, -sizes[row])
        _add(tree, request + 1, lengths[request])
        num_seen += lengths[request] - num_old
        begin = end
    return above


def _add(tree: list[int], index: int, value: int) -> None:
    size = len(tree)
    while index < size:
        tree[index] += value
        index += index & -index


def _short_tokens(
    trace: Trace, stretches: Stretches, above: NDArray[np.int64], num_warm: int
) -> NDArray[np.int64]:
    """By distance: tokens that blocks lack to be full, as in a request's partly filled last one."""
    short = np.zeros(trace.num_blocks + 3, np.int64)
    size = trace.block_tokens
    num_tokens = trace.input_tokens[stretches.request]
    end = stretches.depth.astype(np.int64) + stretches.size
    partly = np.flatnonzero((end * size > num_tokens) & (stretches.request >= num_warm))
    for row in partly.tolist():
        tokens, start = int(num_tokens[row]), int(stretches.depth[row])
        for depth in range(max(start, tokens // size), int(end[row])):
            lacking = size - max(0, tokens - depth * size)
            short[above[row] + 1 + depth - start] += lacking
    return short
