"""2Q against a plain model: three lists and the paper's rules, written down once more."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.scans import pass_one_offs

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.two_q import TwoQ
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
VERBS = st.sampled_from(["use", "use", "use", "use", "drop", "evict", "pass over"])
REQUESTS = st.lists(KEYS.map(lambda key: [key]), max_size=150)
GOLDEN_MISSES = {50: 28_328, 150: 18_661, 400: 13_745, 1_000: 9_285}


class Test2Q(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return TwoQ(capacity_chunks)

    def test_has_a_name(self) -> None:
        """The paper's, which begins with a digit."""
        assert self.make(4).name == "2q"


class Model2Q:
    """The paper's full version with the departures that `two_q.py` names."""

    def __init__(self, capacity: int) -> None:
        self.k_in, self.k_out = max(1, capacity // 4), max(1, capacity // 2)
        self.a1in: list[ChunkKey] = []
        self.a1out: list[ChunkKey] = []
        self.am: list[ChunkKey] = []

    def insert(self, key: ChunkKey) -> None:
        if key in self.a1out:
            self.a1out.remove(key)
            self.am.append(key)
        else:
            self.a1in.append(key)

    def hit(self, key: ChunkKey, *, passed_over: bool) -> None:
        queue = self.am if key in self.am else self.a1in
        if queue is self.am or passed_over:
            queue.remove(key)
            queue.append(key)

    def evict(self, key: ChunkKey) -> None:
        if key in self.am:
            self.am.remove(key)
            return
        self.a1in.remove(key)
        self.a1out.append(key)
        del self.a1out[: max(0, len(self.a1out) - self.k_out)]

    def drop(self, key: ChunkKey) -> None:
        for keys in (self.a1in, self.a1out, self.am):
            if key in keys:
                keys.remove(key)

    def victims(self) -> list[ChunkKey]:
        over = max(0, len(self.a1in) - self.k_in)
        return self.a1in[:over] + self.am + self.a1in[over:]


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 25), st.lists(st.tuples(VERBS, KEYS), max_size=300))
def test_orders_as_the_model(capacity: int, calls: list[tuple[str, ChunkKey]]) -> None:
    """At capacity and below it, with drops and passed over victims in between."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 3):
        policy, model = TwoQ(capacity), Model2Q(capacity)
        for verb, key in calls:
            resident = model.a1in + model.am
            if verb == "drop":
                policy.on_drop(key)
                model.drop(key)
            elif key in resident and verb == "use":
                next(iter(policy.victims()))  # asked before the use, but `key` is not ...
                offered = model.victims()[0] == key  # ... offered, unless it is the first
                policy.on_hit(key)
                model.hit(key, passed_over=offered and key in model.a1in)
            elif key not in resident and len(resident) < capacity:
                policy.on_insert(key)
                model.insert(key)
            elif resident and verb == "pass over":
                victims = policy.victims()
                passed, *chosen = [next(victims) for _ in range(min(2, len(resident)))]
                for victim in chosen:
                    policy.on_evict(victim)
                    model.evict(victim)
                policy.on_hit(passed)
                model.hit(passed, passed_over=True)
            elif resident:
                victim = next(policy.victims())
                policy.on_evict(victim)
                model.evict(victim)
            assert list(policy.victims()) == model.victims()


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_never_beats_the_oracle(requests: list[list[ChunkKey]], size: int) -> None:
    """On single chunks nobody does better than knowing the future."""
    assert replay(TwoQ(size), requests, size) >= replay_belady(requests, size)


def test_what_came_back_outlives_a_scan() -> None:
    """A key that was wanted again as a ghost is in Am: one-offs pass it by."""
    policy = TwoQ(100)
    loved = make_keys(50)
    for key in loved:
        policy.on_insert(key)
        policy.on_evict(key)
        policy.on_insert(key)
    pass_one_offs(policy, 1_000)
    assert set(loved) <= set(policy.victims())


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(TwoQ(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"2q: capacity_chunks is {capacity}"):
        TwoQ(capacity)
