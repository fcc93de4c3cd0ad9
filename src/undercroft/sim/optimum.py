"""Floor and ceiling of every report: the best possible policy, and room for everything.

`belady` keeps, after each request, the blocks that are needed again soonest, deepest first to go
where equal, and refuses the others (Belady, "A study of replacement algorithms for a
virtual-storage computer", 1966, with bypass). Under prefix semantics that is the exact optimum for
block hits: an ancestor is needed no later than its descendants. It bounds neither writes nor
seconds.

Blocks that are needed next by the same request lie side by side on its path. So what is kept is a
number for each coming request, its longest prefix that is there, and is computed by stretches (see
`reuse`), not by references.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from undercroft.sim.hits import Hits
from undercroft.sim.reuse import Stretches
from undercroft.traces import Trace

__all__ = ["belady_curve", "unbounded_row"]


def belady_curve(
    trace: Trace, stretches: Stretches, capacities: Sequence[int], *, num_warm: int = 0
) -> list[Hits]:
    """The optimum at each of `capacities`; stores only what it keeps.

    Args:
        trace: The requests.
        stretches: Of the trace.
        capacities: In blocks, each > 0.
        num_warm: Requests at the beginning that are replayed, not counted.

    Cost: O(stretches x log requests) each.
    """
    return [_belady(trace, stretches, capacity, num_warm) for capacity in capacities]


def unbounded_row(trace: Trace, *, num_warm: int = 0) -> Hits:
    """What is found where everything fits; its capacity is the number of blocks."""
    return _row(
        trace,
        trace.num_blocks,
        trace.lengths - trace.num_new,
        num_warm,
        (int(trace.num_new[num_warm:].sum(dtype=np.int64)), 0),
    )


def _belady(trace: Trace, stretches: Stretches, capacity: int, num_warm: int) -> Hits:
    # Which parts of a request's path are needed next by which one.
    order = np.argsort(stretches.last, kind="stable")
    parts = np.column_stack(
        (stretches.request[order], stretches.depth[order], stretches.size[order])
    ).tolist()
    begins = np.searchsorted(stretches.last[order], np.arange(trace.num_requests + 1)).tolist()
    kept = _Kept(trace.num_requests, capacity)
    prefixes = np.zeros(trace.num_requests, np.int64)
    num_stored = num_evicted = 0
    for request in range(trace.num_requests):
        num_before = kept.num_blocks
        # All that is there of its path is needed by it next, so it is a prefix.
        prefixes[request] = num_hits = kept.take(request)
        arrived = parts[begins[request] : begins[request + 1]]
        for later, _, size in arrived:
            kept.add(later, size)
        kept.trim()
        if request >= num_warm:
            num_new = 0
            for later, start, size in arrived:
                # What was trimmed of `later`'s blocks was deeper than what is left.
                end = start + min(size, kept.counts[later])
                num_new += max(0, end - max(start, num_hits))
            num_stored += num_new
            num_evicted += num_before + num_new - kept.num_blocks
    return _row(trace, capacity, prefixes, num_warm, (num_stored, num_evicted))


class _Kept:
    """How many blocks are kept for which coming request; those for the last one go first."""

    def __init__(self, num_requests: int, capacity: int) -> None:
        self.counts = [0] * num_requests
        self.num_blocks = 0
        self._capacity = capacity
        self._waiting: list[int] = []  # requests with blocks, negated; others may be among them

    def take(self, request: int) -> int:
        count, self.counts[request] = self.counts[request], 0
        self.num_blocks -= count
        return count

    def add(self, request: int, count: int) -> None:
        if not self.counts[request]:
            heappush(self._waiting, -request)
        self.counts[request] += count
        self.num_blocks += count

    def trim(self) -> None:
        while self.num_blocks > self._capacity:
            request = -self._waiting[0]
            cut = min(self.counts[request], self.num_blocks - self._capacity)
            self.counts[request] -= cut
            self.num_blocks -= cut
            if not self.counts[request]:
                heappop(self._waiting)


def _row(
    trace: Trace,
    capacity: int,
    prefixes: NDArray[np.int32] | NDArray[np.int64],
    num_warm: int,
    moved: tuple[int, int],
) -> Hits:
    return Hits(
        capacity_blocks=capacity,
        num_requests=trace.num_requests - num_warm,
        num_references=int(trace.lengths[num_warm:].sum(dtype=np.int64)),
        hit_blocks=int(prefixes[num_warm:].sum(dtype=np.int64)),
        num_tokens=int(trace.input_tokens[num_warm:].sum()),
        hit_tokens=int(trace.tokens_in(prefixes)[num_warm:].sum()),
        num_stored=moved[0],
        num_evicted=moved[1],
    )
