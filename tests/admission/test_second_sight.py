"""The second request that brings a chunk gets it in."""

import pytest

from undercroft.admission.base import Admission
from undercroft.admission.frequency import Frequency
from undercroft.admission.second_sight import SecondSight
from undercroft.errors import ConfigError
from undercroft.testing.policy_suite import make_keys


def test_admits_from_the_second_offer_on() -> None:
    """Each key for itself."""
    rule: Admission = SecondSight()
    a, b = make_keys(2)
    assert [rule.admit(key, 4096) for key in (a, b, a, a, b)] == [False, False, True, True, True]


def test_agrees_with_frequency_while_both_remember() -> None:
    """It is `frequency` with two sights, and remembers more for the same memory."""
    ours, exact = SecondSight(8_192), Frequency(sights=2, max_tracked=8_192)
    keys = make_keys(2_000)
    offers = [keys[number * number % 2_000] for number in range(6_000)]
    assert [ours.admit(key, 1) for key in offers] == [exact.admit(key, 1) for key in offers]


def test_its_memory_is_bounded() -> None:
    """A key that fell out of the table begins again."""
    rule = SecondSight(max_tracked=64)
    first, *others = make_keys(1_000)
    rule.admit(first, 1)
    for key in others:
        rule.admit(key, 1)
    assert not rule.admit(first, 1)


def test_senseless_numbers_are_refused() -> None:
    """The message names the rule."""
    with pytest.raises(ConfigError, match="admission second_sight: max_tracked is 0"):
        SecondSight(0)
