"""S3-FIFO against a plain model: three lists and the paper's rules, written down once more."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.scans import pass_one_offs

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue, s3fifo
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.s3fifo import S3Fifo
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite, make_keys

KEYS = st.integers(0, 30).map(lambda number: bytes([number]))
VERBS = st.sampled_from(["use", "use", "use", "use", "drop", "evict", "evict any"])
REQUESTS = st.lists(KEYS.map(lambda key: [key]), max_size=150)
GOLDEN_MISSES = {50: 26_614, 150: 17_590, 400: 12_374, 1_000: 9_905}


class TestS3Fifo(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return S3Fifo(capacity_chunks)


class ModelS3Fifo:
    """Algorithm 1 of the paper with the departures that `s3fifo.py` names."""

    def __init__(self, capacity: int) -> None:
        self.target = max(1, capacity // 10)
        self.num_ghosts = max(1, capacity - self.target)
        self.s: list[ChunkKey] = []
        self.m: list[ChunkKey] = []
        self.g: list[ChunkKey] = []
        self.freq: dict[ChunkKey, int] = {}

    def insert(self, key: ChunkKey) -> None:
        (self.m if key in self.g else self.s).append(key)
        if key in self.g:
            self.g.remove(key)
        self.freq[key] = 0

    def hit(self, key: ChunkKey) -> None:
        self.freq[key] = min(3, self.freq[key] + 1)

    def find(self) -> ChunkKey:
        """EVICT, which passes what was used, and who goes."""
        if len(self.s) >= self.target:
            self._pass_small()
            if self.s:
                return self.s[0]
        if not self.m:
            self._pass_small()
        if not self.m:
            return self.s[0]
        self._pass_main()
        return self.m[0]

    def _pass_small(self) -> None:
        while self.s and self.freq[self.s[0]]:
            self.m.append(self.s.pop(0))
            self.freq[self.m[-1]] = 0

    def _pass_main(self) -> None:
        while self.freq[self.m[0]]:
            self.m.append(self.m.pop(0))
            self.freq[self.m[-1]] -= 1

    def evict(self, key: ChunkKey) -> None:
        """Another one than `find` would choose: what is passed is passed all the same."""
        if len(self.s) >= self.target:
            self._pass_small()
        if key in self.m:
            self._pass_main()
            self.m.remove(key)
            return
        self.s.remove(key)
        self.g.append(key)
        del self.g[: max(0, len(self.g) - self.num_ghosts)]

    def drop(self, key: ChunkKey) -> None:
        for keys in (self.s, self.m, self.g):
            if key in keys:
                keys.remove(key)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 25), st.lists(st.tuples(VERBS, KEYS), max_size=300))
def test_evicts_as_the_model(capacity: int, calls: list[tuple[str, ChunkKey]]) -> None:
    """With the victim evicted, another one, and drops in between."""
    with mock.patch.object(key_queue, "SEGMENT_KEYS", 3):
        policy, model = S3Fifo(capacity), ModelS3Fifo(capacity)
        for verb, key in calls:
            resident = model.s + model.m
            if verb == "drop":
                policy.on_drop(key)
                model.drop(key)
            elif key in resident and verb == "use":
                policy.on_hit(key)
                model.hit(key)
            elif key not in resident and len(resident) < capacity:
                policy.on_insert(key)
                model.insert(key)
            elif key in resident and verb == "evict any":
                policy.on_evict(key)
                model.evict(key)
            elif resident:
                victim = next(policy.victims())
                policy.on_evict(victim)
                assert victim == model.find()
                model.evict(victim)
            assert sorted(policy.victims()) == sorted(model.s + model.m)


def test_one_call_passes_a_bounded_number() -> None:
    """Of 9 used keys, with a bound of 4: the fifth goes; four are in the main queue then."""
    with mock.patch.object(key_queue, "MAX_PASSED", 4), mock.patch.object(s3fifo, "MAX_PASSED", 4):
        policy = S3Fifo(9)
        keys = make_keys(9)
        for key in keys:
            policy.on_insert(key)
            policy.on_hit(key)
        assert sorted(policy.victims()) == sorted(keys)
        victim = next(policy.victims())
        assert victim == keys[4]
        policy.on_evict(victim)
        assert next(policy.victims()) == keys[0]


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_never_beats_the_oracle(requests: list[list[ChunkKey]], size: int) -> None:
    """On single chunks nobody does better than knowing the future."""
    assert replay(S3Fifo(size), requests, size) >= replay_belady(requests, size)


def test_used_twice_outlives_a_scan() -> None:
    """What LRU loses to a scan of one-offs, S3-FIFO keeps."""
    policy = S3Fifo(100)
    loved = make_keys(50)
    for key in loved:
        policy.on_insert(key)
        policy.on_hit(key)
    pass_one_offs(policy, 1_000)
    assert set(loved) <= set(policy.victims())


def test_a_ghost_comes_back_to_the_main_queue() -> None:
    """Evicted from S and wanted again: newcomers go before it."""
    policy = S3Fifo(10)
    keys = make_keys(14)
    for key in keys[:10]:
        policy.on_insert(key)
    policy.on_evict(keys[0])
    policy.on_insert(keys[0])
    assert list(policy.victims()) == [*keys[1:10], keys[0]]


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert replay(S3Fifo(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"s3fifo: capacity_chunks is {capacity}"):
        S3Fifo(capacity)
