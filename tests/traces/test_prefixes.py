"""Prefixes get the numbers that a plain dictionary would give them, in memory that is bounded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from undercroft.traces.prefixes import PrefixNumbers


def keys_of(*path: int) -> list[bytes]:
    """Of each prefix of `path`: a key names all that leads to it."""
    return [b"key of " + bytes(path[: end + 1]) for end in range(len(path))]


def requests(rng: random.Random, count: int) -> list[list[bytes]]:
    return [
        keys_of(*(rng.choice((0, 0, 1)) for _ in range(rng.randrange(14)))) for _ in range(count)
    ]


@given(seed=st.integers(0, 1 << 32))
def test_numbers_are_those_of_first_appearance(seed: int) -> None:
    """As a dictionary that looks up every key."""
    numbers, expected = PrefixNumbers(b"salt", 4096), dict[bytes, int]()
    for keys in requests(random.Random(seed), 40):
        known = [key for key in keys if key in expected]
        place = numbers.place(keys)
        assert place == (expected[known[-1]] if known else -1, len(keys) - len(known))
        for key in keys[len(known) :]:
            expected[key] = len(expected)
        assert len(numbers) == len(expected)


def test_what_has_no_room_changes_nothing() -> None:
    """Neither a part of the request is numbered, nor is what was known forgotten."""
    numbers = PrefixNumbers(b"salt", 4)
    assert numbers.place(keys_of(1, 2, 3)) == (-1, 3)
    assert numbers.place(keys_of(1, 2, 9, 9)) is None
    assert len(numbers) == 3
    assert numbers.place(keys_of(1, 2, 9)) == (1, 1)
    assert numbers.place(keys_of(1, 2, 3)) == (2, 0)
    assert numbers.place(keys_of(7)) is None
    assert numbers.place([]) == (-1, 0)


def test_a_long_prefix_that_is_known_costs_few_hashes() -> None:
    """It is halved, not walked: ten thousand keys of which one is new."""
    numbers = PrefixNumbers(b"salt", 1 << 14)
    keys = [b"%d" % number for number in range(10_001)]
    numbers.place(keys[:-1])
    hashed = []
    mark = numbers._mark
    numbers._mark = lambda key: (hashed.append(key), mark(key))[1]  # type: ignore[method-assign]
    assert numbers.place(keys) == (9_999, 1)
    assert len(hashed) <= 16


def test_marks_depend_on_the_secret() -> None:
    """Two processes have nothing in common by which a prefix could be found in both."""
    marks = {PrefixNumbers(salt, 4)._mark(b"a key") for salt in (b"one", b"two", b"three")}
    assert len(marks) == 3


def test_it_works_full() -> None:
    """Every place it may have is used, and all are found again."""
    numbers = PrefixNumbers(b"salt", 1000)
    keys = [b"%d" % number for number in range(1000)]
    for end in range(1, 1001):
        assert numbers.place(keys[:end]) == (end - 2, 1)
    assert numbers.place(keys) == (999, 0)
    assert numbers.place([*keys, b"more"]) is None
