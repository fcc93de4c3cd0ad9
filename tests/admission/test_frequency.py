"""Frequency: from the Nth offer on, with a bounded memory."""

import gc

import pytest

from undercroft.admission.frequency import Frequency
from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.plugins import find


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(36, "big"))


@pytest.mark.parametrize("sights", [1, 2, 5, 300])
def test_admits_from_the_nth_offer_on(sights):
    """Refused N-1 times, then admitted each time."""
    rule = Frequency(sights=sights)
    answers = [rule.admit(key(1), 4096) for _ in range(sights + 3)]
    assert answers == [False] * (sights - 1) + [True] * 4


def test_keys_are_counted_apart():
    """One key's offers say nothing about another's."""
    rule = Frequency(sights=2)
    assert not rule.admit(key(1), 1)
    assert not rule.admit(key(2), 1)
    assert rule.admit(key(1), 1)
    assert rule.admit(key(2), 1)


def test_the_table_is_bounded_and_forgets_the_longest_unseen():
    """Never more keys than asked for; a key offered again stays."""
    rule = Frequency(sights=3, max_tracked=4)
    for number in range(4):
        rule.admit(key(number), 1)
    rule.admit(key(0), 1)  # the newest by now
    rule.admit(key(9), 1)  # 1 falls out
    assert len(rule) == 4
    assert rule.admit(key(0), 1)
    assert not rule.admit(key(1), 1)
    assert not rule.admit(key(1), 1)
    for number in range(10_000):
        rule.admit(key(number), 1)
        assert len(rule) <= 4


def test_no_object_per_key_that_the_collector_tracks():
    """Tracking ten thousand keys adds a handful of tracked objects, not thousands."""
    rule = Frequency(max_tracked=20_000)
    keys = [key(number) for number in range(10_000)]
    gc.collect()
    before = len(gc.get_objects())
    for each in keys:
        rule.admit(each, 1)
    assert len(gc.get_objects()) - before < 100


@pytest.mark.parametrize("options", [{"sights": 0}, {"max_tracked": 0}, {"sights": "2"}])
def test_senseless_numbers_are_refused(options):
    """One line that names the option and its value."""
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*whole number >= 1"):
        Frequency(**options)


def test_is_installed_under_its_name():
    """Found as a stranger's plug-in would be."""
    assert find("admission", "frequency") is Frequency
    assert find("admission", "frequency").name == "frequency"
