"""What a chunk is worth, learned from how many of its kind came back."""

from collections import Counter
from random import Random

import pytest

from undercroft.admission.worth import NUM_CLASSES, Worth


def test_learns_how_often_each_class_returns() -> None:
    """Half return once; of those nine in ten each time: 0.5 * 10 uses more, then 9."""
    worth, random = Worth(), Random(5)
    for _ in range(20_000):
        sights = 1
        worth.see(sights)
        going_on = random.random() < 0.5
        while going_on:
            sights += 1
            worth.see(sights)
            going_on = random.random() < 0.9
    expected = worth.expected_uses()
    assert expected[0] == pytest.approx(5.0, rel=0.05)
    assert expected[1:] == pytest.approx([9.0] * (NUM_CLASSES - 1), rel=0.1)


def test_prefers_what_was_seen_more_often_while_it_knows_nothing() -> None:
    """Before the first arrival, and after a few one-offs."""
    worth = Worth()
    for _ in range(3):
        expected = worth.expected_uses()
        assert expected == sorted(expected)
        assert len(set(expected)) == NUM_CLASSES
        worth.see(1)


def test_forgets_old_traffic() -> None:
    """Chunks that always returned count for little two days after they stopped to."""
    worth = Worth()
    for _ in range(1_000):
        worth.see(1)
        worth.see(2)
    assert worth.expected_uses()[0] > 0.9
    for _ in range(48):
        worth.fade(1)
        for _ in range(100):
            worth.see(1)
    assert worth.expected_uses()[0] < 0.2
    assert Counter(map(worth.see, (1, 7, 8, 9, 255))) == {0: 1, 6: 1, 7: 3}
