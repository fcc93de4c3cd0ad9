"""ARC against a plain model: four lists and the paper's rules, written down once more."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.scans import pass_one_offs

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.arc import Arc
from undercroft.policies.base import EvictionPolicy
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
REQUESTS = st.lists(KEYS.map(lambda key: [key]), max_size=150)
GOLDEN_MISSES = {50: 27_271, 150: 17_966, 400: 11_731, 1_000: 8_908}


class TestArc(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Arc(capacity_chunks)


class ModelArc:
    """Figure 4 of the paper with the departures that `arc.py` names."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[ChunkKey] = []
        self.t2: list[ChunkKey] = []
        self.b1: list[ChunkKey] = []
        self.b2: list[ChunkKey] = []

    def insert(self, key: ChunkKey) -> None:
        if key in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.c and self.b1 + self.b2:
            (self.b2 or self.b1).pop(0)

    def hit(self, key: ChunkKey) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def evict(self, key: ChunkKey) -> None:
        source, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
        source.remove(key)
        ghosts.append(key)

    def drop(self, key: ChunkKey) -> None:
        for keys in (self.t1, self.t2, self.b1, self.b2):
            if key in keys:
                keys.remove(key)

    def victims(self) -> list[ChunkKey]:
        t1, t2, order = list(self.t1), list(self.t2), []
        while t1 or t2:
            order.append(t1.pop(0) if t1 and (len(t1) > self.p or not t2) else t2.pop(0))
        return order


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.sampled_from(["use", "use", "use", "drop", "evict"]), KEYS), max_size=300
    ),
)
def test_orders_as_the_model(capacity: int, calls: list[tuple[str, ChunkKey]]) -> None:
    """At capacity, below it, and above it, with drops in between."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 3):
        policy, model = Arc(capacity), ModelArc(capacity)
        for verb, key in calls:
            resident = model.t1 + model.t2
            if verb == "drop":
                policy.on_drop(key)
                model.drop(key)
            elif key in resident:
                call = ("on_evict", "evict") if verb == "evict" else ("on_hit", "hit")
                getattr(policy, call[0])(key)
                getattr(model, call[1])(key)
            else:
                if len(resident) >= capacity and verb == "use":
                    victim = next(policy.victims())
                    policy.on_evict(victim)
                    model.evict(victim)
                policy.on_insert(key)
                model.insert(key)
            assert list(policy.victims()) == model.victims()


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_never_beats_the_oracle(requests: list[list[ChunkKey]], size: int) -> None:
    """On single chunks nobody does better than knowing the future."""
    assert replay(Arc(size), requests, size) >= replay_belady(requests, size)


def test_used_twice_outlives_a_scan() -> None:
    """What LRU loses to a scan of one-offs, ARC keeps."""
    policy = Arc(100)
    loved = make_keys(50)
    for key in loved:
        policy.on_insert(key)
        policy.on_hit(key)
    pass_one_offs(policy, 1_000)
    assert set(loved) <= set(policy.victims())


def test_a_ghost_comes_back_as_used_again() -> None:
    """Evicted from T1 and wanted again: it goes to T2, behind newcomers used once."""
    policy = Arc(3)
    a, b, c, d, e = make_keys(5)
    for key in (a, b, c):
        policy.on_insert(key)
    policy.on_hit(c)
    policy.on_evict(a)
    policy.on_insert(d)
    policy.on_evict(b)
    policy.on_insert(a)
    policy.on_evict(d)
    policy.on_insert(e)
    # p is 1 after a's return, T1 = [e] is not above it: T2 goes first.
    assert list(policy.victims()) == [c, a, e]


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(Arc(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"arc: capacity_chunks is {capacity}"):
        Arc(capacity)
