"""Which row a prefix gets, and that it is the same however many come at once."""

from __future__ import annotations

from random import Random
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from undercroft.keys import ChunkKey
from undercroft.policies import known_prefixes
from undercroft.policies.known_prefixes import KnownPrefixes


class EveryThird:
    """Rows that a level needs."""

    def __init__(self, first: int) -> None:
        self.first = first

    def are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        needed: NDArray[np.bool_] = rows % 3 == self.first
        return needed

    def is_needed(self, row: int) -> bool:
        return row % 3 == self.first


def played(seed: int, few: int) -> KnownPrefixes:
    """A small table, much too small, in which a third of the rows is needed by a level."""
    known = KnownPrefixes(256)
    known.in_use.append(EveryThird(seed % 3))
    random = Random(seed)
    with mock.patch.object(known_prefixes, "_FEW", few):
        for number in range(80):
            first, num = random.randrange(600), random.randrange(1, 60)
            keys = [ChunkKey(b"%d" % at) for at in range(first, first + num)]
            known.see(keys, number * random.choice((0.0, 1.0, 40.0)), 0)
    return known


@pytest.mark.parametrize("seed", range(6))
def test_rows_given_at_once_are_those_given_one_by_one(seed: int) -> None:
    """The longest unused of its set, two of one request never the same, none that is needed."""
    many, single = played(seed, 0), played(seed, 1_000)
    for column in ("_prints", "_used", "_state"):
        np.testing.assert_array_equal(getattr(many, column), getattr(single, column))


def test_keys_that_cannot_be_told_apart_count_once() -> None:
    """Within a request: the first of them is meant."""
    with mock.patch.object(known_prefixes, "xxh3_64_intdigest", lambda key: len(key) << 60):
        known = KnownPrefixes(64)
        seen = known.see([ChunkKey(b"a"), ChunkKey(b"bb"), ChunkKey(b"c")], 0.0, 0)
    assert list(seen.keys) == [b"a", b"bb"]
    assert len(set(seen.rows.tolist())) == 2
