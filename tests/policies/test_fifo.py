"""FIFO: arrival decides, and nothing else, but that what was passed over queues anew."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.fifo import Fifo
from undercroft.testing.policy_replay import generate_trace, replay
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
VERBS = st.sampled_from(["use", "use", "evict", "drop"])
GOLDEN_MISSES = {50: 30_914, 150: 22_808, 400: 15_190, 1_000: 9_659}


class TestFifo(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Fifo(capacity_chunks)


@settings(deadline=None)
@given(st.lists(st.tuples(VERBS, KEYS), max_size=300))
def test_orders_as_a_list(calls: list[tuple[str, ChunkKey]]) -> None:
    """The oldest arrival goes first, however often it was used."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 4):
        policy = Fifo(8)
        model: list[ChunkKey] = []
        for verb, key in calls:
            if verb == "use" and key in model:
                policy.on_hit(key)
            elif verb == "use":
                policy.on_insert(key)
                model.append(key)
            elif verb == "drop":
                policy.on_drop(key)
                model = [other for other in model if other != key]
            elif model:
                victim = next(policy.victims())
                assert victim == model.pop(0)
                policy.on_evict(victim)
        assert list(policy.victims()) == model


def test_what_was_passed_over_queues_anew() -> None:
    """A victim that is touched instead of evicted moves; a use at any other time does not."""
    policy = Fifo(8)
    a, b, c, d = make_keys(4)
    for key in (a, b, c, d):
        policy.on_insert(key)
    victims = policy.victims()
    assert [next(victims), next(victims)] == [a, b]
    policy.on_evict(b)
    policy.on_hit(a)
    policy.on_hit(c)
    assert list(policy.victims()) == [c, d, a]


def test_an_evicted_key_that_returns_was_not_passed_over() -> None:
    """Evicted or dropped, and stored again: a use of it is like any other."""
    policy = Fifo(8)
    a, b, c = make_keys(3)
    for key in (a, b, c):
        policy.on_insert(key)
    victims = policy.victims()
    assert [next(victims), next(victims)] == [a, b]
    policy.on_evict(a)
    policy.on_drop(b)
    for key in (a, b):
        policy.on_insert(key)
        policy.on_hit(key)
    policy.on_hit(a)
    assert list(policy.victims()) == [c, a, b]


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(Fifo(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"fifo: capacity_chunks is {capacity}"):
        Fifo(capacity)
