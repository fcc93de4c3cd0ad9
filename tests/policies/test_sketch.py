"""Counts of uses: never too few, seldom too many, halved as time goes by, bounded in memory."""

import tracemalloc
from collections import Counter
from random import Random

from undercroft.policies.sketch import FrequencySketch
from undercroft.testing.policy_suite import make_keys


def test_counts_up_to_fifteen() -> None:
    """Exactly so while there is nobody else."""
    sketch = FrequencySketch(500)
    (key,) = make_keys(1)
    counts = []
    for _ in range(20):
        counts.append(sketch.count(key))
        sketch.use(key)
    assert counts == [*range(15), 15, 15, 15, 15, 15]


def test_never_too_few_and_seldom_too_many() -> None:
    """Of 2,000 keys, used as often as web pages are, one in fifty is counted too high."""
    sketch, random = FrequencySketch(2_000), Random(3)
    keys, true = make_keys(2_000), Counter()
    for _ in range(2_400):  # before anything is halved
        key = keys[min(1_999, int(random.paretovariate(0.8)))]
        sketch.use(key)
        true[key] += 1
    errors = [sketch.count(key) - min(15, true[key]) for key in keys]
    assert min(errors) == 0
    assert sum(error > 0 for error in errors) <= len(keys) / 50


def test_old_uses_fade() -> None:
    """Half of a count is left after five uses for each key that matters, whoever is used."""
    sketch = FrequencySketch(500)
    key, *others = make_keys(50)
    for _ in range(12):
        sketch.use(key)
    counts = []
    for number in range(12, 5_000):
        sketch.use(others[number % 20])
        counts.append(sketch.count(key))
    assert counts[2_486:2_488] == [12, 6]
    assert counts[-2:] == [6, 3]


def test_wide_rows_are_halved_as_one() -> None:
    """Whatever stripe a key lies in, and whether it was looked at meanwhile or not."""
    sketch = FrequencySketch(2_000)  # rows of 16,384 counters, four stripes
    other, *keys = make_keys(51)
    for key in keys:
        for _ in range(15):
            sketch.use(key)
    for _ in range(50 * 15, 5 * 2_000):
        sketch.use(other)
    assert {sketch.count(key) for key in keys[:25]} == {7}
    for _ in range(2 * 5 * 2_000):
        sketch.use(other)
    assert {sketch.count(key) for key in keys} == {1}
    for _ in range(9 * 5 * 2_000):
        sketch.use(other)
    assert {sketch.count(key) for key in keys} == {0}


def test_forgets_one_key() -> None:
    """Its uses are taken back; those of others stay, counters that are shared aside."""
    sketch = FrequencySketch(500)
    keys = make_keys(40)
    for key in keys:
        for _ in range(5):
            sketch.use(key)
    sketch.forget(keys[0])
    assert sketch.count(keys[0]) == 0
    assert [sketch.count(key) for key in keys[1:]] == [5] * 39


def test_memory_is_bounded() -> None:
    """Whatever number of keys a level without a bound is said to have."""
    tracemalloc.start()
    try:
        FrequencySketch(1 << 40)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 65 << 20
