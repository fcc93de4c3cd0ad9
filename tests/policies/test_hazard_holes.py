"""`hazard` where requests are told of with holes, and chunks are lost anywhere.

An engine adapter that does not know all keys tells of what it has. Then the order of eviction is
nobody's promise; that every resident chunk can go, once, and that each call ends, is.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from undercroft.keys import ChunkKey
from undercroft.policies import request_paths
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes

PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=12)


def prefixes(path: Iterable[int]) -> list[ChunkKey]:
    path = list(path)
    return [ChunkKey(b"k" + bytes(path[: at + 1])) for at in range(len(path))]


def made() -> Hazard:
    policy = Hazard(64, KnownPrefixes(1 << 14))
    policy.known.curves.num_waits = 1_000
    return policy


def ask(policy: Hazard, keys: list[ChunkKey], now_s: float, num_told: int = 0) -> None:
    policy.on_request(keys, now_s, 0, num_told)
    policy.on_insert_all([key for key in reversed(keys) if key not in policy])


@pytest.mark.parametrize("told", [[2, 3], [0, 1, 4, 5], [1], [5], [0, 5], [2, 3, 7], [0, 2, 4, 6]])
def test_what_is_left_out_of_a_path_can_still_go(told: list[int]) -> None:
    """And goes after those that were used of what lies below: who uses these, uses that too."""
    policy, keys = made(), prefixes([0] * 8)
    ask(policy, keys[:6], 1.0)
    ask(policy, [keys[at] for at in told], 2.0)
    residents = {*keys[:6], *(keys[at] for at in told)}
    assert set(policy.victims()) == residents
    evicted = policy.evict(20, lambda _key: False)
    assert set(evicted) == residents
    for deepest in told:
        # That what was not known before hangs at what was left out, nobody can tell.
        for above in range(min(deepest, max(at for at in told if at < 6) + 1)):
            assert evicted.index(keys[deepest]) < evicted.index(keys[above])
    assert list(policy.victims()) == []


def test_what_is_awaited_above_comes_into_the_path() -> None:
    """Of a window only the last chunks are stored; those above may come at any time later."""
    policy, keys = made(), prefixes([0] * 8)
    policy.on_request(keys[:6], 1.0)
    policy.on_insert_all([keys[5], keys[4]])
    ask(policy, [keys[4], keys[5]], 2.0)
    for key in reversed(keys[:4]):
        policy.on_insert(key)
    assert list(policy.victims()) == keys[5::-1]
    assert policy.evict(20, lambda _key: False) == keys[5::-1]


class WithHoles(RuleBasedStateMachine):
    """Against a plain set of what is resident."""

    @initialize(seed=st.integers(0, 1_000))
    def start(self, seed: int) -> None:
        self.policy, self.random = made(), Random(seed)
        self.resident: set[ChunkKey] = set()
        self.now_s = 0.0

    @rule(path=PATHS, share=st.sampled_from([1.0, 0.8, 0.5, 0.2]), num_told=st.integers(0, 12))
    def request(self, path: list[int], share: float, num_told: int) -> None:
        keys = [key for key in prefixes(path) if self.random.random() < share]
        self.now_s += self.random.choice([0.0, 0.1, 5.0])
        self.policy.on_request(keys, self.now_s, 0, num_told)
        absent = [key for key in reversed(keys) if key not in self.resident]
        coming = [key for key in absent if self.random.random() < share]
        self.policy.on_insert_all(coming)
        self.resident.update(coming)

    @rule(path=PATHS)
    def stray(self, path: list[int]) -> None:
        key = prefixes(path)[-1]
        if key not in self.resident:
            self.policy.on_insert(key)
            self.resident.add(key)

    @rule(pick=st.integers(0, 1_000), evict=st.booleans())
    def lose(self, pick: int, evict: bool) -> None:
        if self.resident:
            key = sorted(self.resident)[pick % len(self.resident)]
            (self.policy.on_evict if evict else self.policy.on_drop)(key)
            self.resident.remove(key)

    @rule(pick=st.integers(0, 1_000))
    def use(self, pick: int) -> None:
        if self.resident:
            self.policy.on_hit(sorted(self.resident)[pick % len(self.resident)])

    @rule(num_keys=st.integers(1, 30), kept_share=st.sampled_from([0.0, 0.0, 0.2, 0.6]))
    def evict(self, num_keys: int, kept_share: float) -> None:
        kept = {key for key in sorted(self.resident) if self.random.random() < kept_share}
        evicted = self.policy.evict(num_keys, kept.__contains__)
        assert len(evicted) == len(set(evicted)) == min(num_keys, len(self.resident - kept))
        assert set(evicted) <= self.resident - kept
        self.resident.difference_update(evicted)

    @invariant()
    def everything_can_go_once(self) -> None:
        if hasattr(self, "policy"):
            assert sorted(self.policy.victims()) == sorted(self.resident)
            assert all(key in self.policy for key in self.resident)


@pytest.fixture(autouse=True)
def few_young() -> Iterable[None]:
    """Paths grow old within a test."""
    with mock.patch.object(request_paths, "_NUM_YOUNG", 6):
        yield


TestWithHoles = pytest.mark.usefixtures("few_young")(WithHoles.TestCase)
TestWithHoles.settings = settings(deadline=None, max_examples=80, stateful_step_count=60)
