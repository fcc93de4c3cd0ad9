from collections import OrderedDict
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.lru import Lru
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
REQUESTS = st.lists(KEYS.map(lambda key: [key]), max_size=150)
GOLDEN_MISSES = {50: 30_163, 150: 19_825, 400: 11_372, 1_000: 8_616}


class TestLru(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Lru(capacity_chunks)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["use", "use", "evict", "drop"]), KEYS), max_size=300))
def test_orders_as_an_ordered_dict(calls: list[tuple[str, ChunkKey]]) -> None:
    """The oldest use goes first."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 4):
        policy = Lru(8)
        model: OrderedDict[ChunkKey, None] = OrderedDict()
        for verb, key in calls:
            if verb == "use" and key in model:
                policy.on_hit(key)
                model.move_to_end(key)
            elif verb == "use":
                policy.on_insert(key)
                model[key] = None
            elif verb == "drop":
                policy.on_drop(key)
                model.pop(key, None)
            elif model:
                victim = next(policy.victims())
                assert victim == next(iter(model))
                policy.on_evict(victim)
                del model[victim]
        assert list(policy.victims()) == list(model)


@settings(deadline=None)
@given(REQUESTS)
def test_hits_never_fall_as_capacity_grows(requests: list[list[ChunkKey]]) -> None:
    """LRU is a stack algorithm."""
    misses = [replay(Lru(size), requests, size) for size in range(1, 12)]
    assert misses == sorted(misses, reverse=True)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_never_beats_the_oracle(requests: list[list[ChunkKey]], size: int) -> None:
    """Nor does it, on single chunks, do better than knowing the future."""
    assert replay(Lru(size), requests, size) >= replay_belady(requests, size)


def test_hand_worked() -> None:
    """A B C A B at size 3 and 2: 2 hits and none."""
    requests = [[key] for key in (b"A", b"B", b"C", b"A", b"B")]
    assert replay(Lru(3), requests, 3) == 3
    assert replay(Lru(2), requests, 2) == 5


def test_leaf_first_use_keeps_roots() -> None:
    """After a request touched deepest first, its leaf goes before its root."""
    policy = Lru(8)
    for key in reversed([b"root", b"middle", b"leaf"]):
        policy.on_insert(key)
    assert list(policy.victims()) == [b"leaf", b"middle", b"root"]


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(Lru(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"lru: capacity_chunks is {capacity}"):
        Lru(capacity)
