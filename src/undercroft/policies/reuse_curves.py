"""How likely a prefix is to be used again after so long a wait, learned from the traffic.

For each class of prefixes: at what ages those waiting were used again, and how long they were
watched at each age. A wait that has not ended counts as time watched only, whether or not the
prefix is still resident: to evict early does not make reuse look rarer than it is.
"""

from __future__ import annotations

from math import inf, log

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENDS_S", "NUM_AT_ONCE", "NUM_BUCKETS", "ReuseCurves", "bucket_of"]

_RATIO = 1.3
NUM_BUCKETS = 64
"""Ages below 1 s, then each 1.3 times the one before; the last begins at 150 days."""
NUM_AT_ONCE = 8
"""Classes of which one call works out the index."""
_EDGES = np.concatenate([[0.0], _RATIO ** np.arange(NUM_BUCKETS)])
_WIDTHS = np.diff(_EDGES)
ENDS_S = (*_EDGES[1:-1].tolist(), inf)
"""Where each bucket ends."""
_PER_LOG = 1 / log(_RATIO)
_POOLED_WEIGHT = 8.0
"""Bucket-widths of watching that the pooled curve gives to its prior: the hazard falls as 1/age."""
_CLASS_WEIGHT = 5.0
"""The same for a class, whose prior is the pooled curve."""
_DECAY = 0.995
_SPAN_MARGIN = 1.5
_MAX_LOG = 600.0
_LEAST_SURVIVAL = 1e-200
"""Of fewer survivors nothing can be told by differences: the hazard itself stands in."""


def bucket_of(age_s: float) -> int:
    """The bucket of an age."""
    if age_s < 1.0:
        return 0
    return min(NUM_BUCKETS - 1, 1 + int(log(age_s) * _PER_LOG))


class ReuseCurves:
    """What was seen of finished waits, and what follows from it.

    Args:
        num_classes: Classes are 0 up to this.

    Attributes:
        index: `index[c][k]`, reuses a second of residence to be expected, at best, from keeping a
            prefix of class `c` that has waited as long as bucket `k` says.
        num_changes: Of `index`.
        num_waits: Waits that have ended, ever.

    Threads: one. Cost: `finish` O(1); `learn` O(classes x buckets); `go_on` O(buckets^2) a class.
    """

    def __init__(self, num_classes: int) -> None:
        shape = (num_classes, NUM_BUCKETS)
        self.ended = np.zeros(shape)
        self.partial_s = np.zeros(shape)
        self.num_waits = 0
        self.num_changes = 0
        self.index: list[list[float]] = [[0.0] * NUM_BUCKETS for _ in range(num_classes)]
        self._left: list[int] = []  # classes whose index is to be worked out, the last one first
        self._hazard = np.zeros((0, NUM_BUCKETS))  # of each of those

    def finish(self, cls: int, age_s: float) -> None:
        """A prefix of `cls` was used again after `age_s`."""
        bucket = bucket_of(age_s)
        self.ended[cls, bucket] += 1
        self.partial_s[cls, bucket] += age_s - _EDGES[bucket]
        self.num_waits += 1

    def learn(
        self, open_cls: NDArray[np.int64], open_s: NDArray[np.float64], span_s: float
    ) -> None:
        """Begin to work out `index` anew from what is known now; `go_on` does it.

        Args:
            open_cls: Classes of the waits under way.
            open_s: How long each has lasted.
            span_s: How long traffic has been watched; nothing is known of much greater ages.
        """
        num_classes = len(self.ended)
        bucket = np.searchsorted(_EDGES, open_s, side="right") - 1
        bucket = np.clip(bucket, 0, NUM_BUCKETS - 1)
        cells = open_cls * NUM_BUCKETS + bucket
        size = num_classes * NUM_BUCKETS
        lasting = np.bincount(cells, minlength=size).reshape(num_classes, NUM_BUCKETS)
        partial = np.bincount(cells, open_s - _EDGES[bucket], minlength=size)
        partial_s = self.partial_s + partial.reshape(num_classes, NUM_BUCKETS)
        passed = self.ended + lasting
        beyond = np.cumsum(passed[:, ::-1], axis=1)[:, ::-1] - passed
        exposure_s = beyond * _WIDTHS + partial_s
        num = min(NUM_BUCKETS, bucket_of(_SPAN_MARGIN * span_s) + 1)
        pooled = self._pooled(self.ended.sum(axis=0), exposure_s.sum(axis=0))
        weight = _CLASS_WEIGHT * _WIDTHS
        seen = np.flatnonzero(passed.any(axis=1))
        hazard = (self.ended[seen] + weight * pooled) / (exposure_s[seen] + weight)
        self._left, self._hazard = seen.tolist(), hazard[:, :num]
        # A class of which nothing was seen is worth what the pool is.
        (of_pool,) = _best_rates(pooled[None, :num])
        for cls in set(range(num_classes)).difference(self._left):
            self.index[cls] = of_pool
        self.num_changes += 1
        self.ended *= _DECAY
        self.partial_s *= _DECAY

    def go_on(self, num_classes: int = NUM_AT_ONCE) -> bool:
        """Work out the index of so many classes more; whether there are others left."""
        classes = self._left[-num_classes:]
        if classes:
            del self._left[-num_classes:]
            first = len(self._left)
            rows = _best_rates(self._hazard[first : first + len(classes)])
            for cls, row in zip(classes, rows, strict=True):
                self.index[cls] = row
            self.num_changes += 1
        return bool(self._left)

    @staticmethod
    def _pooled(ended: NDArray[np.float64], exposure_s: NDArray[np.float64]) -> NDArray[np.float64]:
        pooled: list[float] = []
        counts, seconds = ended.tolist(), exposure_s.tolist()
        prior = counts[0] / (seconds[0] + 1e-9) if counts[0] else 1e-3
        edges, widths = _EDGES.tolist(), _WIDTHS.tolist()
        for k in range(NUM_BUCKETS):
            if k:
                prior = pooled[k - 1] * (edges[k] / edges[k + 1] if k > 1 else 1.0)
            weight = _POOLED_WEIGHT * widths[k]
            pooled.append((counts[k] + weight * prior) / (seconds[k] + weight))
        return np.array(pooled)


def _best_rates(hazard: NDArray[np.float64]) -> list[list[float]]:
    """For each class and bucket: the most that P(reuse by then) / E[time until reuse or then] is.

    Over all ends of later buckets. With S the chance to wait on at the start of a bucket and A the
    time spent waiting up to there, both from age 0: (S[k] - S[j]) / (A[j] - A[k]), most over j > k.
    """
    num = hazard.shape[1]
    steps = np.maximum(hazard * _WIDTHS[:num], 1e-300)
    log_s = np.minimum(np.cumsum(steps, axis=1), _MAX_LOG)
    start = np.concatenate([np.zeros((len(hazard), 1)), log_s], axis=1)
    survival = np.exp(-start)
    waited = np.concatenate(
        [
            np.zeros((len(hazard), 1)),
            np.cumsum(survival[:, :-1] * -np.expm1(-steps) / hazard, axis=1),
        ],
        axis=1,
    )
    gained = survival[:, :num, None] - survival[:, None, 1:]
    spent = waited[:, None, 1:] - waited[:, :num, None]
    later = np.triu(np.ones((num, num), dtype=bool))
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(later & (spent > 0), gained / spent, 0.0)
    best = np.maximum(rates.max(axis=2), hazard * (survival[:, :num] < _LEAST_SURVIVAL))
    last = best[:, -1:]
    tail = np.repeat(last, NUM_BUCKETS - num, axis=1)
    if tail.shape[1]:
        tail = tail * (_EDGES[num] / _EDGES[num:NUM_BUCKETS])[None, :] if num else tail
    rows: list[list[float]] = np.concatenate([best, tail], axis=1).tolist()
    return rows
