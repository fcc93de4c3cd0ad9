"""The suite's negative controls: for each rule, a policy that breaks it, and is caught."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from random import Random

import pytest

from undercroft.keys import ChunkKey
from undercroft.policies.arc import Arc
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.lru import Lru
from undercroft.testing.policy_replay import generate_trace, replay, replay_belady
from undercroft.testing.policy_suite import PolicySuite, evict_skipping, make_keys, play_history

CAUGHT = (AssertionError, pytest.fail.Exception)


class Tracked:
    """LRU on an OrderedDict: right, but the garbage collector walks over every key."""

    name = "tracked"

    def __init__(self, _capacity_chunks: int) -> None:
        self.keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def on_insert(self, key: ChunkKey) -> None:
        self.keys[key] = None

    def on_hit(self, key: ChunkKey) -> None:
        self.keys.move_to_end(key)

    def on_evict(self, key: ChunkKey) -> None:
        del self.keys[key]

    def on_drop(self, key: ChunkKey) -> None:
        self.keys.pop(key, None)

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self.keys)


class Eager(Lru):
    def victims(self) -> Iterator[ChunkKey]:
        return iter(list(super().victims()))


class Forgetful(Lru):
    def victims(self) -> Iterator[ChunkKey]:
        return iter(list(super().victims())[1:])


class Repeating(Lru):
    def victims(self) -> Iterator[ChunkKey]:
        keys = list(super().victims())
        return iter(keys + keys[:1])


class Consuming(Lru):
    def victims(self) -> Iterator[ChunkKey]:
        keys = list(super().victims())
        for key in keys[:1]:
            self.on_hit(key)
        return iter(keys)


class Fifo(Lru):
    def on_hit(self, key: ChunkKey) -> None:
        if self._store.owner_of(key) < 0:
            super().on_hit(key)


class Hoarder(Lru):
    def __init__(self, capacity_chunks: int) -> None:
        super().__init__(capacity_chunks)
        self.ghosts: dict[ChunkKey, None] = {}

    def on_evict(self, key: ChunkKey) -> None:
        super().on_evict(key)
        self.ghosts[key] = None


class Grudging(Arc):
    """Keeps the ghost of a dropped key."""

    def on_drop(self, key: ChunkKey) -> None:
        if self._store.owner_of(key) in (0, 1):
            super().on_drop(key)


class Moody(Lru):
    def __init__(self, capacity_chunks: int) -> None:
        super().__init__(capacity_chunks)
        self.random = Random()

    def on_hit(self, key: ChunkKey) -> None:
        if self.random.random() < 0.5:
            super().on_hit(key)


class Searching(Lru):
    """Walks over all keys to find the first."""

    def victims(self) -> Iterator[ChunkKey]:
        keys = super().victims()
        oldest = next(keys)
        num_younger = sum(1 for _ in keys)
        if num_younger >= 0:
            yield oldest


def suite_of(policy_class: Callable[[int], EvictionPolicy]) -> PolicySuite:
    suite = PolicySuite()
    suite.make = policy_class
    return suite


@pytest.mark.parametrize(
    ("policy_class", "test", "arguments"),
    [
        (Tracked, "test_the_garbage_collector_does_not_see_keys", {}),
        (Tracked, "test_inserting_a_resident_is_a_bug", {}),
        (Eager, "test_victims_are_lazy", {}),
        (Forgetful, "test_victims_are_a_permutation_of_the_residents", {"num_keys": 7, "seed": 1}),
        (Repeating, "test_victims_are_a_permutation_of_the_residents", {"num_keys": 7, "seed": 1}),
        (Consuming, "test_victims_change_nothing", {}),
        (Fifo, "test_pinned_keys_get_out_of_the_way", {}),
        (Hoarder, "test_memory_is_bounded", {}),
        (Grudging, "test_a_dropped_key_comes_back_as_a_stranger", {}),
        (Moody, "test_same_history_same_order", {}),
        (Searching, "test_eviction_costs_the_same_at_any_size", {}),
    ],
)
def test_the_suite_catches(
    policy_class: Callable[[int], EvictionPolicy], test: str, arguments: dict[str, int]
) -> None:
    """The rule's test fails on the policy that breaks the rule."""
    with pytest.raises(CAUGHT):
        getattr(suite_of(policy_class), test)(**arguments)


@pytest.mark.parametrize("verb", ["on_hit", "on_evict"])
def test_the_suite_catches_silence_about_strangers(verb: str) -> None:
    """A policy that shrugs at an unknown key hides bugs of its caller."""

    silent = type("Silent", (Lru,), {verb: lambda *_: None})
    with pytest.raises(CAUGHT):
        suite_of(silent).test_calls_about_strangers_are_bugs(verb)


def test_keys_are_distinct_and_repeatable() -> None:
    """Two calls that overlap agree where they do."""
    keys = make_keys(1_000)
    assert len(set(keys)) == 1_000
    assert make_keys(500, start=500) == keys[500:]
    assert {len(key) for key in keys} == {36}


def test_histories_depend_on_the_seed_alone() -> None:
    """So that a failure can be played again."""
    first, again, other = (play_history(Lru(50), make_keys(50), 300, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_evict_skipping_touches_what_it_stepped_over() -> None:
    """The first two are pinned: the third goes, and they end as the newest."""
    policy = Lru(4)
    a, b, c, d = make_keys(4)
    for key in (a, b, c, d):
        policy.on_insert(key)
    assert evict_skipping(policy, {a, b}) == (c, 2)
    assert list(policy.victims()) == [d, a, b]


def test_the_oracle_on_a_hand_worked_case() -> None:
    """A B C A B A at size 1: keeping A whenever it is needed sooner hits it twice."""
    requests = [[key] for key in (b"A", b"B", b"C", b"A", b"B", b"A")]
    assert replay_belady(requests, 1) == 4
    assert replay_belady(requests, 2) == 3
    assert replay_belady(requests, 0) == 6


def test_replay_counts_the_longest_resident_prefix() -> None:
    """A hole ends the hit, even if deeper chunks are there."""
    root, middle, leaf, other = make_keys(4)
    requests = [[root, middle, leaf], [other], [root, middle, leaf]]
    # `other` evicts the leaf, the deepest of the first request.
    assert replay(Lru(3), requests, 3) == 3 + 1 + 1


def test_the_oracle_is_never_beaten_on_a_trace_of_chats() -> None:
    """The generated trace has something to win, at every size."""
    requests = generate_trace(300, seed=3)
    for size in (20, 60, 200):
        assert replay_belady(requests, size) < replay(Lru(size), requests, size)
        assert replay_belady(requests, size) < replay(Arc(size), requests, size)
