"""What LRU would have found, counted without an LRU, beside a plain one."""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.policies import lru_shadow
from undercroft.policies.known_prefixes import Seen
from undercroft.policies.lru_shadow import LruShadow

NUM_ROWS = 4096


class PlainLru:
    """Keys, the longest unused first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: OrderedDict[int, None] = OrderedDict()

    def request(self, path: list[int]) -> int:
        """The hits, from the root on; then all are used or stored, deepest first."""
        num_hits = next((i for i, key in enumerate(path) if key not in self.keys), len(path))
        for key in reversed(path):
            self.keys.pop(key, None)
            self.keys[key] = None
            if len(self.keys) > self.capacity:
                self.keys.popitem(last=False)
        return num_hits


def paths(random: Random, num: int) -> list[list[int]]:
    """Paths in a random tree; a node's number is its row."""
    children: dict[int, list[int]] = {}
    num_nodes, found = 0, []
    for _ in range(num):
        node, path = -1, list[int]()
        for _ in range(random.randrange(1, 14)):
            below = children.setdefault(node, [])
            if below and random.random() < 0.85:
                node = random.choice(below[-6:])
            elif num_nodes < NUM_ROWS:
                node = num_nodes
                num_nodes += 1
                below.append(node)
            else:
                break
            path.append(node)
        found.append(path)
    return found


def seen(path: list[int], serial: int) -> Seen:
    return Seen(serial, 0.0, [], np.array(path, dtype=np.int64), [0], [0], num_known=len(path))


def store(shadow: LruShadow, path: list[int], serial: int) -> int:
    """A request finds what LRU has, and nothing else is there; the rest comes in at once."""
    rows = np.array(path, dtype=np.int64)
    num_hits = shadow.on_request(seen(path, serial), 0)
    if num_hits < len(path):
        shadow.come_all(rows[num_hits:], serial)
    return num_hits


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(0, 2**31 - 120))
def test_finds_what_lru_finds(seed: int, capacity: int, base: int) -> None:
    """Of each request exactly; also where a request is longer than LRU, and numbers run out."""
    random = Random(seed)
    shadow, lru = LruShadow(capacity, NUM_ROWS), PlainLru(capacity)
    shadow._base = base if base % 2 else 0
    for number, path in enumerate(paths(random, 120)):
        assert store(shadow, path, shadow._base + number + 1) == lru.request(path)
        assert shadow._inside == len(lru.keys)


def test_a_level_that_has_more_does_not_help_lru() -> None:
    """What is there in the level and gone in LRU comes into LRU as if it were computed."""
    shadow = LruShadow(2, NUM_ROWS)
    store(shadow, [1, 2], 1)
    store(shadow, [3, 4], 2)
    assert shadow.on_request(seen([1, 2], 3), 2) == 0
    assert shadow.on_request(seen([1, 2], 4), 2) == 2
    assert shadow.on_request(seen([3, 4], 5), 0) == 0


def test_what_is_refused_lru_has_not_either() -> None:
    """It asks for what came in, not for what was asked for."""
    shadow = LruShadow(10, NUM_ROWS)
    assert shadow.on_request(seen([1, 2, 3], 1), 0) == 0
    assert shadow.come(1, 1)
    assert shadow.on_request(seen([1, 2, 3], 2), 0) == 1


def test_what_comes_again_is_told() -> None:
    """One by one and many at once: it had been there since its last use."""
    shadow = LruShadow(10, NUM_ROWS)
    store(shadow, [1, 2, 3], 1)
    assert not shadow.come(2, 1)
    assert shadow.come_all(np.array([3, 4, 1]), 1).tolist() == [3, 1]
    assert shadow._inside == 4


def test_a_row_that_another_prefix_has_now_is_not_found() -> None:
    """Whose it was is gone for LRU too, sooner or later."""
    shadow = LruShadow(10, NUM_ROWS)
    store(shadow, [1, 2, 3], 1)
    new = seen([1, 2, 3], 2)
    new.num_known = 1
    assert shadow.on_request(new, 0) == 1


def test_what_is_void_is_gone_for_lru() -> None:
    """A dropped chunk is no hit of anybody."""
    shadow = LruShadow(10, NUM_ROWS)
    store(shadow, [1, 2, 3], 1)
    shadow.drop(3)
    shadow.drop(3)
    shadow.drop(9)
    assert shadow.on_request(seen([1, 2, 3], 2), 0) == 2
    assert shadow._inside == 2


@pytest.mark.parametrize("gap", [1, 16, 17, 40, 1_000_000_000])
def test_a_long_silence(gap: int) -> None:
    """A level that is told of nothing while others are: what is too old counts as gone."""
    with mock.patch.object(lru_shadow, "_MIN_SPANS", 16):
        shadow = LruShadow(1, NUM_ROWS)
    assert shadow._mask == 15
    store(shadow, [1], 1)
    assert store(shadow, [1], 1 + gap) == (1 if gap < 16 else 0)
    assert store(shadow, [1], 2 + gap) == 1


def test_memory() -> None:
    """Stated where it is made: 4 bytes a row, and a bounded ring."""
    shadow = LruShadow(1 << 20, NUM_ROWS)
    assert shadow._last.nbytes == 4 * NUM_ROWS
    assert shadow._counts.nbytes == 4 << 20
    assert LruShadow(1000, NUM_ROWS)._counts.nbytes == 64 * 1024
