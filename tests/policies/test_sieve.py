"""SIEVE against a plain model: the paper's one list and its hand."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue, sieve
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.sieve import Sieve
from undercroft.testing.policy_replay import generate_trace, replay
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
VERBS = st.sampled_from(["use", "use", "use", "use", "drop", "evict", "evict any"])
GOLDEN_MISSES = {50: 35_365, 150: 24_253, 400: 19_228, 1_000: 17_211}


class TestSieve(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Sieve(capacity_chunks)


class ModelSieve:
    """Algorithm 1 of the paper."""

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []
        self.visited: set[ChunkKey] = set()
        self.hand = 0

    def evict(self, key: ChunkKey) -> None:
        while self.keys[self.hand] in self.visited:
            self.visited.remove(self.keys[self.hand])
            self.hand = (self.hand + 1) % len(self.keys)
        self.drop(key)

    def drop(self, key: ChunkKey) -> None:
        if key in self.keys:
            at = self.keys.index(key)
            self.keys.remove(key)
            self.visited.discard(key)
            self.hand -= at < self.hand
            self.hand %= max(1, len(self.keys))

    def victims(self) -> list[ChunkKey]:
        ahead = self.keys[self.hand :] + self.keys[: self.hand]
        return sorted(ahead, key=lambda key: key in self.visited)  # a stable sort


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 9), st.lists(st.tuples(VERBS, KEYS), max_size=300))
def test_orders_as_the_model(capacity: int, calls: list[tuple[str, ChunkKey]]) -> None:
    """With the victim evicted, another one, and drops in between."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 3):
        policy, model = Sieve(capacity), ModelSieve()
        for verb, key in calls:
            if verb == "drop":
                policy.on_drop(key)
                model.drop(key)
            elif key in model.keys and verb == "use":
                policy.on_hit(key)
                model.visited.add(key)
            elif key not in model.keys and len(model.keys) < capacity:
                policy.on_insert(key)
                model.keys.append(key)
            elif model.keys:
                victim = key if key in model.keys else next(policy.victims())
                policy.on_evict(victim)
                model.evict(victim)
            assert list(policy.victims()) == model.victims()


def test_the_hand_passes_a_bounded_number() -> None:
    """Of 9 visited keys, with a bound of 4: the fifth goes, then the hand goes on behind it."""
    with mock.patch.object(key_queue, "MAX_PASSED", 4), mock.patch.object(sieve, "MAX_PASSED", 4):
        policy = Sieve(9)
        keys = make_keys(9)
        for key in keys:
            policy.on_insert(key)
            policy.on_hit(key)
        assert sorted(policy.victims()) == sorted(keys)
        victim = next(policy.victims())
        assert victim == keys[4]
        policy.on_evict(victim)
        assert next(policy.victims()) == keys[0], "the four were spared, and are not visited now"


def test_what_is_used_outlives_a_scan() -> None:
    """What LRU loses to a scan of one-offs, SIEVE keeps."""
    policy = Sieve(100)
    loved, scan = make_keys(50), make_keys(1_000, start=50)
    for key in loved:
        policy.on_insert(key)
    for number, key in enumerate(scan):
        if number % 40 == 0:
            for each in loved:
                policy.on_hit(each)
        if number >= 50:
            policy.on_evict(next(policy.victims()))
        policy.on_insert(key)
    assert set(loved) <= set(policy.victims())


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(Sieve(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"sieve: capacity_chunks is {capacity}"):
        Sieve(capacity)
