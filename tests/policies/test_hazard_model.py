"""`hazard` beside a model of it that is slow and plain: both must choose the same victims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from random import Random
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from undercroft.keys import ChunkKey
from undercroft.policies import guard, request_paths
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import NUM_CLASSES, KnownPrefixes
from undercroft.policies.reuse_curves import NUM_BUCKETS

NUM_YOUNG = 6
TICKS = 16


@dataclass
class Fact:
    """What is known of one prefix."""

    sights: int
    ticks: int
    near_end: bool
    cls: int
    serial: int
    used_s: float


class Model:
    """Everything is looked through for every question. Keys name whole prefixes."""

    def __init__(self, index: list[list[float]] | None) -> None:
        self.index = index  # None: as LRU
        self.facts: dict[ChunkKey, Fact] = {}
        self.resident: set[ChunkKey] = set()
        self.strays: list[ChunkKey] = []
        self.aside: list[tuple[int, float]] = []  # a request's serial, since when
        self.serial, self.now_s = 0, 0.0

    def request(self, keys: list[ChunkKey], now_s: float, kind: int) -> None:
        self.serial += 1
        self.now_s = now_s
        ticks = int(now_s * TICKS) + 1
        continuing, gap = 0, 0
        known = [self.facts[key] for key in keys if key in self.facts]
        if known:
            continuing = known[-1].near_end
            waited_s = (ticks - known[-1].ticks) / TICKS
            gap = sum(waited_s >= bound for bound in (5, 30, 300))
        for at, key in enumerate(keys):
            sights = self.facts[key].sights + 1 if key in self.facts else 1
            by_sights = sum(sights >= least for least in (2, 3, 6))
            cls = ((continuing * 4 + gap) * 4 + kind) * 4 + by_sights
            near_end = at >= len(keys) - 3
            self.facts[key] = Fact(sights, ticks, near_end, cls, self.serial, now_s)
            if key in self.strays:
                self.strays.remove(key)
                self.resident.add(key)
        while self.aside and self.aside[0][1] <= now_s - 1:
            self.aside.pop(0)

    def insert(self, key: ChunkKey) -> None:
        fact = self.facts.get(key)
        if fact is not None and fact.serial > self.serial - NUM_YOUNG:
            self.resident.add(key)
        else:
            self.strays.append(key)

    def drop(self, key: ChunkKey) -> None:
        self.resident.discard(key)
        if key in self.strays:
            self.strays.remove(key)

    def ends(self) -> Iterator[tuple[int, ChunkKey]]:
        """Of each request, the deepest resident chunk that none has used later, if it may go."""
        aside = {serial for serial, _ in self.aside}
        by_request: dict[int, ChunkKey] = {}
        for key in sorted(self.resident, key=len):
            by_request[self.facts[key].serial] = key
        for serial, key in by_request.items():
            if serial not in aside and not any(
                other != key and other.startswith(key) for other in self.resident
            ):
                yield serial, key

    def coldest(self) -> tuple[int, ChunkKey] | None:
        ends = sorted(self.ends())
        candidates = []
        for cls in {self.facts[key].cls for _, key in ends}:
            of_class = [end for end in ends if self.facts[end[1]].cls == cls]
            candidates += [of_class[0], of_class[-1]]
        return min(candidates, key=lambda end: (self.worth(end[1]), end[0]), default=None)

    def worth(self, key: ChunkKey) -> float:
        if self.index is None:
            return 0.0
        fact = self.facts[key]
        age_s, bucket = self.now_s - fact.used_s, 0
        while bucket < NUM_BUCKETS - 1 and age_s >= 1.3**bucket:
            bucket += 1
        return self.index[fact.cls][bucket]

    def evict(self, num_keys: int, kept: set[ChunkKey]) -> list[ChunkKey]:
        evicted = [key for key in self.strays if key not in kept][:num_keys]
        passed = self.strays
        if len(evicted) == num_keys:
            passed = self.strays[: self.strays.index(evicted[-1])] if evicted else []
        pulled = [key for key in passed if key in kept]
        rest = [key for key in self.strays if key not in evicted and key not in pulled]
        self.strays = rest + pulled
        while len(evicted) < num_keys:
            end = self.coldest()
            if end is None:
                break
            serial, key = end
            if key in kept:
                self.aside.append((serial, self.now_s))
            else:
                self.resident.remove(key)
                evicted.append(key)
        return evicted


PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=14)
GAPS = st.sampled_from([0.01, 0.3, 3.0, 20.0, 400.0])


class BesideTheModel(RuleBasedStateMachine):
    """Requests, evictions with pins, drops and chunks that no request has told of."""

    @initialize(seed=st.integers(0, 1_000), learned=st.booleans())
    def start(self, seed: int, learned: bool) -> None:
        """Nothing is there, and what is expected of whom is arbitrary."""
        self.begin(seed, learned)

    def begin(self, seed: int, learned: bool) -> None:
        known = KnownPrefixes(1 << 14)
        random = Random(seed)
        # Few values, so that many ends are worth the same.
        index = [[random.randrange(4) / 8 for _ in range(NUM_BUCKETS)] for _ in range(NUM_CLASSES)]
        known.curves.index = index
        known.curves.num_waits = 1_000 * learned
        self.policy = Hazard(64, known)
        self.model = Model(index if learned else None)
        self.now_s = 0.0
        self.random = random

    def residents(self) -> list[ChunkKey]:
        return sorted(self.model.resident | set(self.model.strays))

    @rule(path=PATHS, gap_s=GAPS, kind=st.integers(0, 3), many=st.booleans())
    def request(self, path: list[int], gap_s: float, kind: int, many: bool) -> None:
        """All that is missing comes in, deepest first."""
        keys = [ChunkKey(b"k" + bytes(path[: at + 1])) for at in range(len(path))]
        self.now_s += gap_s
        self.policy.on_request(keys, self.now_s, kind)
        self.model.request(keys, self.policy.known._elapsed_s, kind)
        absent = [key for key in reversed(keys) if key not in self.policy]
        assert absent == [key for key in reversed(keys) if key not in self.residents()]
        if many:
            self.policy.on_insert_all(absent)
        for key in absent:
            if not many:
                self.policy.on_insert(key)
            self.model.insert(key)
        for key in reversed(keys):
            self.policy.on_hit(key)

    @rule(name=st.integers(0, 30))
    def stray(self, name: int) -> None:
        """A chunk that was found at the start, say."""
        key = ChunkKey(b"s%d" % name)
        if key not in self.policy:
            self.policy.on_insert(key)
            self.model.insert(key)

    @rule(name=st.integers(0, 30), gap_s=GAPS)
    def request_of_a_stray(self, name: int, gap_s: float) -> None:
        """It becomes a chunk like others, if it is there."""
        key = ChunkKey(b"s%d" % name)
        self.now_s += gap_s
        self.policy.on_request([key], self.now_s, 0)
        self.model.request([key], self.policy.known._elapsed_s, 0)
        assert (key in self.policy) == (key in self.residents())

    @rule(num_keys=st.integers(0, 30), kept_share=st.sampled_from([0.0, 0.0, 0.1, 0.4]))
    def evict(self, num_keys: int, kept_share: float) -> None:
        """The same ones go, in the same order, as long as an end can."""
        kept = {key for key in self.residents() if self.random.random() < kept_share}
        residents = set(self.residents())
        expected = self.model.evict(num_keys, kept)
        evicted = self.policy.evict(num_keys, kept.__contains__)
        assert evicted[: len(expected)] == expected
        assert len(evicted) == len(set(evicted)) == min(num_keys, len(residents - kept))
        assert set(evicted) <= residents - kept
        if len(evicted) > len(expected):  # what carries something that is kept had to go
            self.give_up()

    def give_up(self) -> None:
        """Prefixes with holes are not in the model: begin anew."""
        for key in self.residents():
            self.policy.on_drop(key)
        self.begin(self.random.randrange(1_000), True)

    @rule(pick=st.integers(0, 1_000))
    def drop(self, pick: int) -> None:
        """A chunk is void that nothing hangs at."""
        leaves = [*(key for _, key in self.model.ends()), *self.model.strays]
        if leaves:
            key = sorted(leaves)[pick % len(leaves)]
            self.policy.on_drop(key)
            self.model.drop(key)

    @invariant()
    def hold_the_same(self) -> None:
        """And the next victim is the same."""
        if not hasattr(self, "policy"):
            return
        victims = list(self.policy.victims())
        assert sorted(victims) == self.residents()
        if self.model.strays:
            assert victims[0] == self.model.strays[0]
        elif (end := self.model.coldest()) is not None:
            assert victims[0] == end[1]


@pytest.fixture(autouse=True)
def few_young() -> Iterable[None]:
    """Paths grow old within a test."""
    with mock.patch.object(request_paths, "_NUM_YOUNG", NUM_YOUNG):
        yield


@pytest.fixture(autouse=True)
def no_guard() -> Iterable[None]:
    """What is expected here is arbitrary: LRU would be better."""
    with mock.patch.object(guard, "_MOST_LOST", inf):
        yield


TestBesideTheModel = pytest.mark.usefixtures("few_young")(BesideTheModel.TestCase)
TestBesideTheModel.settings = settings(deadline=None, max_examples=80, stateful_step_count=60)
