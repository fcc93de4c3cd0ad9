"""W-TinyLFU against a plain model: three lists, exact counts, and the paper's rules."""

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.scans import pass_one_offs

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.wtinylfu import WTinyLfu
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
VERBS = st.sampled_from(["use", "use", "use", "use", "drop", "evict", "evict any"])
REQUESTS = st.lists(KEYS.map(lambda key: [key]), max_size=150)
GOLDEN_MISSES = {50: 25_978, 150: 19_388, 400: 16_588, 1_000: 14_405}


class TestWTinyLfu(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return WTinyLfu(capacity_chunks)


class ModelWTinyLfu:
    """The paper's rules with the departures that `wtinylfu.py` names."""

    def __init__(self, capacity: int) -> None:
        self.num_window = max(1, capacity // 100)
        self.num_protected = int(0.8 * (capacity - self.num_window))
        self.window: list[ChunkKey] = []
        self.probation: list[ChunkKey] = []
        self.protected: list[ChunkKey] = []
        self.counts: Counter[ChunkKey] = Counter()
        self.num_uses, self.period = 0, 5 * capacity

    def use(self, key: ChunkKey) -> None:
        self.counts[key] = min(15, self.counts[key] + 1)
        self.num_uses += 1
        if self.num_uses % self.period == 0:
            self.counts = Counter({key: count // 2 for key, count in self.counts.items()})

    def insert(self, key: ChunkKey) -> None:
        self.window.append(key)
        if len(self.window) > self.num_window:
            self.probation.append(self.window.pop(0))
        self.use(key)

    def hit(self, key: ChunkKey) -> None:
        queue = self.window if key in self.window else self.protected
        for keys in (self.window, self.probation, self.protected):
            if key in keys:
                keys.remove(key)
        queue.append(key)
        if len(self.protected) > self.num_protected:
            self.probation.append(self.protected.pop(0))
        self.use(key)

    def evict(self, key: ChunkKey) -> None:
        for keys in (self.window, self.probation, self.protected):
            if key in keys:
                keys.remove(key)

    def victims(self) -> list[ChunkKey]:
        main = self.probation + self.protected
        if len(self.window) < self.num_window:
            return main + self.window
        order, kept = [], []
        for newcomer in self.window:
            if main and self.counts[newcomer] > self.counts[main[0]]:
                order.append(main.pop(0))
                kept.append(newcomer)
            else:
                order.append(newcomer)
        return order + main + kept


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 9) | st.just(300), st.lists(st.tuples(VERBS, KEYS), max_size=300))
def test_orders_as_the_model(capacity: int, calls: list[tuple[str, ChunkKey]]) -> None:
    """At capacity and below it, with drops in between; a window of one key, and of three."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 3):
        policy, model = WTinyLfu(capacity), ModelWTinyLfu(capacity)
        for verb, key in calls:
            resident = model.window + model.probation + model.protected
            if verb == "drop":
                policy.on_drop(key)
                model.evict(key)
                del model.counts[key]
            elif key in resident and verb == "use":
                policy.on_hit(key)
                model.hit(key)
            elif key not in resident and len(resident) < capacity:
                policy.on_insert(key)
                model.insert(key)
            elif resident:
                victim = key if key in resident else next(policy.victims())
                policy.on_evict(victim)
                model.evict(victim)
            assert list(policy.victims()) == model.victims()


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_never_beats_the_oracle(requests: list[list[ChunkKey]], size: int) -> None:
    """On single chunks nobody does better than knowing the future."""
    assert replay(WTinyLfu(size), requests, size) >= replay_belady(requests, size)


def test_used_twice_outlives_a_scan() -> None:
    """What LRU loses to a scan of one-offs, W-TinyLFU keeps."""
    policy = WTinyLfu(100)
    loved = make_keys(50)
    for key in loved:
        policy.on_insert(key)
        policy.on_hit(key)
    pass_one_offs(policy, 350)
    assert set(loved) <= set(policy.victims())


def test_what_came_back_often_enough_gets_in() -> None:
    """Refused at first, it stays once it was wanted more often than the oldest of the main part."""
    policy = WTinyLfu(100)
    residents, newcomer = make_keys(100), make_keys(1, start=100)[0]
    for key in residents:
        policy.on_insert(key)
    policy.on_evict(next(policy.victims()))
    policy.on_insert(newcomer)
    assert next(policy.victims()) == newcomer
    policy.on_evict(newcomer)
    policy.on_insert(newcomer)
    assert next(policy.victims()) == residents[0]


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(WTinyLfu(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"wtinylfu: capacity_chunks is {capacity}"):
        WTinyLfu(capacity)
