from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from undercroft.errors import Bug, ConfigError
from undercroft.keys import ChunkKey
from undercroft.policies import known_prefixes, request_paths
from undercroft.policies.base import Evicting, EvictionPolicy, InsertingMany, Learning
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import NUM_CLASSES, KnownPrefixes
from undercroft.policies.lru import Lru
from undercroft.testing.policy_replay import generate_trace
from undercroft.testing.policy_suite import PolicySuite

GOLDEN_MISSES = {50: 26_562, 150: 17_787, 400: 10_815, 1_000: 8_647}


class TestHazard(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Hazard(capacity_chunks)


def play(
    policy: Hazard, requests: Sequence[Sequence[ChunkKey]], capacity: int, gap_s: float = 3.0
) -> int:
    """Misses of a replay that tells of requests as they end, one each `gap_s`."""
    resident: set[ChunkKey] = set()
    num_misses = 0
    for number, request in enumerate(requests):
        num_hits = next((i for i, key in enumerate(request) if key not in resident), len(request))
        num_misses += len(request) - num_hits
        policy.on_request(request, number * gap_s)
        for key in reversed(request):
            if key in resident:
                policy.on_hit(key)
                continue
            if len(resident) >= capacity:
                resident.difference_update(policy.evict(1, lambda _: False))
            policy.on_insert(key)
            resident.add(key)
        assert len(resident) <= capacity
    return num_misses


@pytest.mark.parametrize("size", GOLDEN_MISSES)
def test_golden_misses(size: int) -> None:
    """Frozen counts on a generated trace: a change of any is a change of the policy."""
    assert play(Hazard(size), generate_trace(2_000, seed=11), size) == GOLDEN_MISSES[size]


def test_is_found_by_what_it_can_do() -> None:
    """Levels find out by `isinstance`."""
    assert isinstance(Hazard(1), Learning)
    assert isinstance(Hazard(1), Evicting)
    assert isinstance(Hazard(1), InsertingMany)
    assert not isinstance(Lru(1), Learning | Evicting | InsertingMany)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    """The message names the policy and the value."""
    with pytest.raises(ConfigError, match=f"hazard: capacity_chunks is {capacity}"):
        Hazard(capacity)


class Tree:
    """Random requests on a small tree: keys name whole prefixes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def request(self, most: int = 12) -> list[ChunkKey]:
        path, keys = b"", []
        for _ in range(self.random.randrange(1, most)):
            path += bytes([self.random.choice((0, 0, 0, 1, 2))])
            keys.append(ChunkKey(b"k" + path))
        return keys


def parents_before_children(order: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Keys that come before one that they are a prefix of."""
    at = {key: i for i, key in enumerate(order)}
    return [key for key in order if at.get(ChunkKey(key[:-1]), len(order)) < at[key]]


@pytest.fixture
def few_young() -> Iterator[None]:
    """Paths grow old within a test."""
    with mock.patch.object(request_paths, "_NUM_YOUNG", 6):
        yield


@pytest.mark.usefixtures("few_young")
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_books_hold_in_any_history(seed: int, capacity: int, learned: bool) -> None:
    """Victims are the residents, each once; `evict` never takes what is kept."""
    tree, known = Tree(seed), KnownPrefixes(4096)
    known.curves.num_waits = 1000 * learned
    levels = [(Hazard(capacity, known), set[ChunkKey]()), (Hazard(capacity * 3, known), set())]
    random, now_s = tree.random, 0.0
    for _ in range(60):
        request = tree.request()
        now_s += random.choice((0.0, 0.1, 3.0, 400.0))
        for policy, resident in levels:
            policy.on_request(request, now_s, random.randrange(4))
            for key in reversed(request):
                if key in resident:
                    policy.on_hit(key)
                elif random.random() < 0.9:
                    policy.on_insert(key)
                    resident.add(key)
            if resident and random.random() < 0.1:
                dropped = random.choice(sorted(resident))
                policy.on_drop(dropped)
                resident.remove(dropped)
            kept = {key for key in resident if random.random() < 0.2}
            count = max(0, len(resident) - random.randrange(capacity + 1))
            evicted = policy.evict(count, kept.__contains__)
            assert len(set(evicted)) == len(evicted) <= count
            assert set(evicted) <= resident - kept
            assert len(evicted) == min(count, len(resident - kept))
            resident.difference_update(evicted)
            assert all(key in policy for key in resident)
            assert not any(key in policy for key in evicted)
            order = list(policy.victims())
            assert len(order) == len(resident)
            assert set(order) == resident


@pytest.mark.usefixtures("few_young")
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), st.booleans())
def test_no_prefix_goes_before_what_it_carries(seed: int, learned: bool) -> None:
    """As long as chunks come as requests do: `victims` and `evict` take leaves only."""
    tree, known = Tree(seed), KnownPrefixes(4096)
    known.curves.num_waits = 1000 * learned
    policy, resident = Hazard(30, known), set[ChunkKey]()
    for number in range(60):
        request = tree.request()
        policy.on_request(request, number * 2.0)
        for key in reversed(request):
            if key not in resident:
                policy.on_insert(key)
                resident.add(key)
        assert not parents_before_children(list(policy.victims()))
        evicted = policy.evict(max(0, len(resident) - 30), lambda _: False)
        assert not parents_before_children(evicted)
        resident.difference_update(evicted)
        assert not [key for key in resident if len(key) > 2 and key[:-1] not in resident]


def test_a_table_far_too_small_does_no_harm() -> None:
    """Rows run out, sets overflow: the books hold, and nothing is evicted twice."""
    policy, resident = Hazard(200, KnownPrefixes(64)), set[ChunkKey]()
    for number, request in enumerate(generate_trace(300, seed=3)):
        policy.on_request(request, number * 1.0)
        for key in reversed(request):
            if key not in resident:
                policy.on_insert(key)
                resident.add(key)
        evicted = policy.evict(max(0, len(resident) - 200), lambda _: False)
        assert len(set(evicted)) == len(evicted) == max(0, len(resident) - 200)
        resident.difference_update(evicted)
    assert sorted(policy.victims()) == sorted(resident)


def test_a_key_twice_in_a_request_counts_once() -> None:
    """An adapter's slip must not break the books."""
    policy = Hazard(8)
    keys = [ChunkKey(b"a"), ChunkKey(b"b"), ChunkKey(b"a")]
    policy.on_request(keys, 0.0)
    policy.on_insert(keys[1])
    policy.on_insert(keys[0])
    assert list(policy.victims()) == [b"b", b"a"]


def test_a_clock_that_stands_or_goes_back_is_lru() -> None:
    """Ages then mean nothing: what was used longest ago goes first."""
    policy = Hazard(1000)
    policy.known.curves.num_waits = 1000
    requests = [[ChunkKey(b"%d" % number)] for number in range(600)]
    for number, request in enumerate(requests):
        policy.on_request(request, 5.0 - number)
        policy.on_insert(request[0])
    assert list(policy.victims()) == [key for (key,) in requests]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["leaf first", "root first", "mixed"]))
def test_many_at_once_are_the_same_as_one_by_one(seed: int, order: str) -> None:
    """Whatever the order, holes and strays; also with chunks of an earlier request among them."""
    tree = Tree(seed)
    random, resident = tree.random, set[ChunkKey]()
    single, many = Hazard(50), Hazard(50)
    for policy in (single, many):
        policy.known.curves.num_waits = 1000
    earlier: list[ChunkKey] = []
    for number in range(40):
        request = tree.request(40)
        for policy in (single, many):
            policy.on_request(request, number * 3.0)
        wanted = earlier + request + [ChunkKey(b"stray%d" % number)] * (random.random() < 0.2)
        new = [key for key in dict.fromkeys(wanted) if key not in resident][::-1]
        if order == "root first":
            new.reverse()
        elif order == "mixed":
            random.shuffle(new)
        earlier = [new.pop(random.randrange(len(new))) for _ in range(min(3, len(new)))]
        for key in new:
            single.on_insert(key)
        many.on_insert_all(new)
        resident.update(new)
        evicted = single.evict(max(0, len(resident) - 50), lambda _: False)
        assert many.evict(max(0, len(resident) - 50), lambda _: False) == evicted
        resident.difference_update(evicted)
        assert list(many.victims()) == list(single.victims())
        assert set(many.victims()) == resident


def test_a_resident_key_among_many_is_a_bug() -> None:
    """As it is alone."""
    policy = Hazard(100)
    keys = [ChunkKey(b"%d" % number) for number in range(20)]
    policy.on_request(keys, 0.0)
    policy.on_insert(keys[5])
    with pytest.raises(Bug, match="resident already"):
        policy.on_insert_all(keys[::-1])


@pytest.mark.usefixtures("few_young")
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 40]))
@example(18, 40)
@example(25, 40)
@example(149, 40)
def test_keys_that_cannot_be_told_apart_do_no_harm(seed: int, num_prints: int) -> None:
    """Fingerprints of 64 bits never agree by chance; were they made to, the books still hold."""
    tree = Tree(seed)

    def weak(key: ChunkKey) -> int:
        return (sum(key) * 7 % num_prints) << 57 | 1

    with mock.patch.object(known_prefixes, "xxh3_64_intdigest", weak):
        policy, resident = Hazard(30, KnownPrefixes(4096)), set[ChunkKey]()
        for number in range(60):
            request = tree.request()
            policy.on_request(request, number * 2.0)
            for key in reversed(request):
                if key in resident:
                    policy.on_hit(key)
                elif tree.random.random() < 0.9:
                    policy.on_insert(key)
                    resident.add(key)
            if resident and tree.random.random() < 0.1:
                dropped = tree.random.choice(sorted(resident))
                policy.on_drop(dropped)
                resident.remove(dropped)
            evicted = policy.evict(max(0, len(resident) - 30), lambda _: False)
            assert len(set(evicted)) == len(evicted)
            assert set(evicted) <= resident
            resident.difference_update(evicted)
            assert all(key in policy for key in resident)
            assert sorted(policy.victims()) == sorted(resident)


def test_candidates_that_are_gone_leave_nothing() -> None:
    """A session that goes on for ever takes its last path's place, beside one that stays."""
    policy, keys = Hazard(10_000), [ChunkKey(b"first")]
    policy.on_request(keys, 0.0)
    policy.on_insert(keys[0])
    session: list[ChunkKey] = []
    for number in range(3_000):
        session = [*session[:20], ChunkKey(b"%d" % number)]
        policy.on_request(session, number * 1.0)
        policy.on_insert_all([key for key in session[::-1] if key not in policy])
        policy.evict(1 if number > 50 else 0, lambda key: key == keys[0])
    num_ends = sum(policy._paths.ends.num(cls) for cls in range(NUM_CLASSES))
    assert 1 <= num_ends <= sum(1 for _ in policy._paths)


def test_the_first_eviction_finds_little_to_settle() -> None:
    """However many paths came in while there was room."""
    policy = Hazard(10_000)
    for number in range(2_000):
        keys = [ChunkKey(b"%d %d" % (number, at)) for at in range(2)]
        policy.on_request(keys, number * 1.0)
        policy.on_insert_all(keys[::-1])
    assert len(policy._paths.unsettled) <= 256 + 1
    assert policy.evict(3, lambda _: False) == [b"0 1", b"0 0", b"1 1"]
