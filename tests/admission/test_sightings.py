"""Counts of sights: exact for what was seen lately, bounded for the rest."""

import gc
import tracemalloc
from collections import Counter
from random import Random

import pytest

from undercroft.admission.sightings import Sightings
from undercroft.errors import ConfigError
from undercroft.testing.policy_suite import make_keys


def test_counts_exactly_while_there_is_room() -> None:
    """An eighth of what it may track, each key as often as it was seen, up to 255."""
    sightings, random, true = Sightings(4_096, "x"), Random(1), Counter()
    keys = make_keys(512)
    for _ in range(20_000):
        key = random.choice(keys)
        true[key] += 1
        assert sightings.see(key) == true[key]
    for _ in range(300):
        last = sightings.see(keys[0])
    assert last == 255


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    """Twice as many keys as places: the later half is known, but for some, the first is not."""
    sightings = Sightings(4_096, "x")
    keys = make_keys(8_192)
    for key in keys:
        assert sightings.see(key) == 1
    later = sum(sightings.see(key) == 2 for key in keys[-2_048:])
    first = sum(sightings.see(key) == 2 for key in keys[:2_048])
    assert later > 2_048 * 0.95
    assert first < 2_048 * 0.05


def test_a_key_seen_again_and_again_stays() -> None:
    """However many others pass by, for longer than the clock of ages goes round."""
    sightings = Sightings(16, "x")
    loved, *others = make_keys(80_000)
    for number, key in enumerate(others):
        sightings.see(key)
        if number % 4 == 0:
            count = sightings.see(loved)
    assert count == 255


def test_memory_is_taken_once_and_stays() -> None:
    """Eight to sixteen bytes a key, no object per key."""
    keys = make_keys(20_000)
    tracemalloc.start()
    try:
        sightings = Sightings(10_000, "x")
        taken, _ = tracemalloc.get_traced_memory()
        gc.collect()
        before = len(gc.get_objects())
        for key in keys:
            sightings.see(key)
        assert len(gc.get_objects()) - before < 100
        assert tracemalloc.get_traced_memory()[0] < taken + 10_000
    finally:
        tracemalloc.stop()
    assert 8 * 10_000 <= taken <= 16 * 10_000 + 10_000


@pytest.mark.parametrize("number", [0, -1, "5", True, 2.0])
def test_senseless_numbers_are_refused(number: object) -> None:
    """One line that names whose option it is, and the value."""
    with pytest.raises(ConfigError, match=r"mine: max_tracked is .*whole number >= 1"):
        Sightings(number, "mine")  # type: ignore[arg-type]
