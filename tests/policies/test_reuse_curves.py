"""What is expected of a wait, against the plain formula."""

from __future__ import annotations

from math import exp, expm1

import numpy as np
import pytest

from undercroft.policies.reuse_curves import NUM_AT_ONCE, NUM_BUCKETS, ReuseCurves, bucket_of

EDGES = [0.0, *(1.3**k for k in range(NUM_BUCKETS))]
NUM_CLASSES = 24


def filled(seed: int) -> tuple[ReuseCurves, np.ndarray, np.ndarray]:
    """Curves with waits that ended, and the waits under way."""
    random = np.random.default_rng(seed)
    curves = ReuseCurves(NUM_CLASSES)
    for _ in range(2_000):
        curves.finish(int(random.integers(NUM_CLASSES - 2)), float(10 ** random.uniform(-1, 4)))
    return curves, random.integers(0, NUM_CLASSES - 2, 500), 10 ** random.uniform(-1, 5, 500)


def plain_index(
    curves: ReuseCurves, open_cls: np.ndarray, open_s: np.ndarray, span_s: float
) -> list[list[float]]:
    """As POLICY says, a class and a bucket at a time."""
    width = [EDGES[k + 1] - EDGES[k] for k in range(NUM_BUCKETS)]
    ended, exposure = curves.ended.copy(), curves.partial_s.copy()
    for cls in range(NUM_CLASSES):
        for k in range(NUM_BUCKETS):
            exposure[cls, k] += ended[cls, k + 1 :].sum() * width[k]
    for cls, age_s in zip(open_cls.tolist(), open_s.tolist(), strict=True):
        last = max(k for k in range(NUM_BUCKETS) if EDGES[k] <= age_s)
        for k in range(last):
            exposure[cls, k] += width[k]
        exposure[cls, last] += age_s - EDGES[last]
    pooled: list[float] = []
    all_ended, all_exposure = ended.sum(axis=0), exposure.sum(axis=0)
    for k in range(NUM_BUCKETS):
        prior = all_ended[0] / (all_exposure[0] + 1e-9)
        if k:
            prior = pooled[-1] * (EDGES[k] / EDGES[k + 1] if k > 1 else 1.0)
        pooled.append((all_ended[k] + 8 * width[k] * prior) / (all_exposure[k] + 8 * width[k]))
    num = min(NUM_BUCKETS, bucket_of(1.5 * span_s) + 1)
    index = []
    for cls in range(NUM_CLASSES):
        hazard = [
            (ended[cls, k] + 5 * width[k] * pooled[k]) / (exposure[cls, k] + 5 * width[k])
            for k in range(num)
        ]
        row = []
        for k in range(num):
            survival, spent, best = 1.0, 0.0, 0.0
            for j in range(k, num):
                spent += survival * -expm1(-hazard[j] * width[j]) / hazard[j]
                survival *= exp(-hazard[j] * width[j])
                best = max(best, (1 - survival) / spent)
            row.append(best)
        row += [row[-1] * EDGES[num] / EDGES[k] for k in range(num, NUM_BUCKETS)]
        index.append(row)
    return index


@pytest.mark.parametrize("span_s", [50.0, 3_000.0, 1e6])
def test_the_index_is_the_plain_formula(span_s: float) -> None:
    """Also of classes of which nothing was seen, and once it has been worked out anew."""
    curves, open_cls, open_s = filled(seed=int(span_s))
    for _ in range(2):
        expected = plain_index(curves, open_cls, open_s, span_s)
        curves.learn(open_cls, open_s, span_s)
        while curves.go_on():
            pass
        np.testing.assert_allclose(curves.index, expected, rtol=1e-6)
        curves.finish(3, 77.0)


def test_it_is_worked_out_in_parts() -> None:
    """A call does so many classes; what has not come up keeps its old index."""
    curves, open_cls, open_s = filled(seed=1)
    curves.learn(open_cls, open_s, 1e4)
    num_calls, num_done = 0, 0
    while True:
        num_calls += 1
        has_more = curves.go_on()
        done = sum(any(row) for row in curves.index[: NUM_CLASSES - 2])
        assert 0 < done - num_done <= NUM_AT_ONCE
        num_done = done
        if not has_more:
            break
    assert num_done == NUM_CLASSES - 2
    assert num_calls == -(-num_done // NUM_AT_ONCE)
    assert not curves.go_on()
