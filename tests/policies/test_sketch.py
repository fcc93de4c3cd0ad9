"""Counts of uses: never too few, seldom too many, halved as time goes by, bounded in memory."""

from collections import Counter
from random import Random

from undercroft.policies.sketch import FrequencySketch
from undercroft.testing.policy_suite import make_keys


def test_counts_up_to_fifteen() -> None:
    """Exactly so while there is nobody else."""
    sketch = FrequencySketch()
    (key,) = make_keys(1)
    counts = []
    for _ in range(20):
        counts.append(sketch.count(key))
        sketch.use(key)
    assert counts == [*range(15), 15, 15, 15, 15, 15]


def test_never_too_few_and_seldom_too_many() -> None:
    """Of 2,000 keys, used as often as web pages are, one in fifty is counted too high."""
    sketch, random = FrequencySketch(), Random(3)
    sketch.fit(2_000)
    keys, true = make_keys(2_000), Counter()
    for _ in range(8_000):  # before anything is halved
        key = keys[min(1_999, int(random.paretovariate(0.8)))]
        sketch.use(key)
        true[key] += 1
    errors = [sketch.count(key) - min(15, true[key]) for key in keys]
    assert min(errors) == 0
    assert sum(error > 0 for error in errors) <= len(keys) / 50


def test_old_uses_fade() -> None:
    """After as many uses of others as halve every counter once, half of the count is left."""
    sketch = FrequencySketch()
    (key,) = make_keys(1)
    for _ in range(12):
        sketch.use(key)
    others = iter(make_keys(100_000, start=1))
    before = sketch.count(key)
    while sketch.count(key) >= before:
        sketch.use(next(others))
    assert sketch.count(key) in range(before // 2, before // 2 + 5)
    used = 100_000 - sum(1 for _ in others)
    assert 5 * 1024 - 12 <= used <= 5 * 1024


def test_growing_forgets_nothing() -> None:
    """Rows double as often as it takes; every count stays."""
    sketch = FrequencySketch()
    keys = make_keys(300)
    for number, key in enumerate(keys):
        for _ in range(number % 12):
            sketch.use(key)
    before = [sketch.count(key) for key in keys]
    sketch.fit(50_000)
    assert [sketch.count(key) for key in keys] == before


def test_every_stripe_is_halved_in_turn() -> None:
    """Wide rows are halved piece by piece: each key's count falls once before one falls twice."""
    sketch = FrequencySketch()
    sketch.fit(8_000)  # rows of 16,384 counters, four stripes
    keys = make_keys(50)
    for key in keys:
        for _ in range(15):
            sketch.use(key)
    for other in make_keys(4 * 5 * 4096, start=1_000):
        sketch.use(other)
    falls = [15 - sketch.count(key) for key in keys]
    assert min(falls) >= 4
    assert max(falls) == 8, "halved twice"


def test_forgets_one_key() -> None:
    """Its uses are taken back; those of others stay, counters that are shared aside."""
    sketch = FrequencySketch()
    keys = make_keys(40)
    for key in keys:
        for _ in range(5):
            sketch.use(key)
    sketch.forget(keys[0])
    assert sketch.count(keys[0]) == 0
    assert [sketch.count(key) for key in keys[1:]] == [5] * 39
