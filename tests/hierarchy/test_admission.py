"""Who is asked for a chunk to come in, and how often: once for each request that uses it."""

from __future__ import annotations

from collections import Counter

import pytest
from worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.admission.base import Purse
from undercroft.admission.write_budget import WriteBudget
from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.tiers.base import Allowance
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


class Watching:
    """Admits from the so many-th sight on, and writes down what it is told."""

    name = "watching"

    def __init__(self, sights: int = 1) -> None:
        self.sights = sights
        self.offers: Counter[ChunkKey] = Counter()
        self.uses: Counter[ChunkKey] = Counter()
        self.calls: list[ChunkKey | None] = []
        self.purse: Purse | None = None

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:
        self.offers[key] += 1
        self.calls.append(key)
        return self.offers[key] >= self.sights

    def on_begin(self) -> None:
        self.calls.append(None)

    def on_use(self, key: ChunkKey) -> None:
        self.uses[key] += 1

    def open(self, purse: Purse) -> None:
        self.purse = purse


def run(world: World, label: str, num_chunks: int = 4) -> None:
    """One request, until all that it caused is done."""
    world.engine.submit(keys_of(label, num_chunks))
    for _ in range(12):
        world.engine.step()
        world.wait_for_tiers()


def test_each_request_is_one_offer_or_one_use(worlds: list[World]) -> None:
    """The request that stores a chunk offers it, and it is no use as well; later ones use it."""
    rule = Watching()
    world = make_world(16, [MemoryTier(1 << 20, name="below")], admission=rule)
    worlds.append(world)
    keys = keys_of("a", 4)
    run(world, "a")
    assert rule.offers == dict.fromkeys(keys, 1)
    assert not rule.uses
    run(world, "a")
    run(world, "a")
    assert rule.offers == dict.fromkeys(keys, 1)
    assert rule.uses == dict.fromkeys(keys, 2)


def test_a_refused_chunk_is_offered_once_a_request(worlds: list[World]) -> None:
    """At its store, and then when a request that used it has ended: the third one gets it in."""
    rule = Watching(sights=3)
    world = make_world(16, [MemoryTier(1 << 20, name="below")], admission=rule)
    worlds.append(world)
    keys = keys_of("a", 4)
    for num_requests in (1, 2, 3):
        run(world, "a")
        assert rule.offers == dict.fromkeys(keys, num_requests)
        assert world.counters.cascaded_chunks["below"] == (4 if num_requests == 3 else 0)
    assert not rule.uses
    run(world, "a")
    assert rule.uses == dict.fromkeys(keys, 1)


def test_a_chunk_that_found_no_room_is_not_asked_for_twice(worlds: list[World]) -> None:
    """The tier was full after all, and the write is tried again: it was let in already."""
    tier = FaultyTier(
        MemoryTier(1 << 20, name="below"), Injector(Effect.FULL, on_verb("write_from"), at_most=1)
    )
    rule = Watching()
    world = make_world(16, [tier], admission=rule)
    worlds.append(world)
    run(world, "a")
    assert world.counters.cascaded_chunks["below"] == 4
    assert not world.counters.dropped_chunks
    assert rule.offers == dict.fromkeys(keys_of("a", 4), 1)


def test_requests_are_told_apart(worlds: list[World]) -> None:
    """Before the first chunk of each, from its root on; also of what is offered at its end."""
    rule = Watching(sights=2)
    world = make_world(32, [MemoryTier(1 << 20, name="below")], admission=rule)
    worlds.append(world)
    a, b = keys_of("a", 3), keys_of("b", 3)
    run(world, "a", 3)
    run(world, "b", 3)
    run(world, "a", 3)
    assert rule.calls == [None, *a, None, *b, None, *a]


def test_host_memory_tells_its_admission_the_same(worlds: list[World]) -> None:
    """What is offered and there already is a use."""
    rule = Watching(sights=2)
    world = make_world(16, host_admission=rule)
    worlds.append(world)
    keys = keys_of("a", 4)
    run(world, "a")
    assert world.counters.stored_chunks == 0
    run(world, "a")
    assert world.counters.stored_chunks == 4
    assert rule.offers == dict.fromkeys(keys, 2)
    request = world.engine.submit(keys).request
    world.hierarchy.prepare_store(keys, request)
    assert rule.uses == dict.fromkeys(keys, 1)


class Paying(MemoryTier):
    """Memory with a budget, of which some is left; a chunk costs a page more than it has."""

    day: tuple[int, int] | None = (10 * CHUNK_BYTES, 64 * CHUNK_BYTES)

    def written_bytes(self) -> int:
        return 0

    def write_cost_bytes(self, num_bytes: int) -> int:
        return num_bytes + 4096

    def allowance(self) -> Allowance | None:
        if self.day is None:
            return None
        left, budget = self.day
        return Allowance(left, left, budget, is_spent=True)


def test_the_purse_is_the_tiers(worlds: list[World]) -> None:
    """Cost, budget, and what is left of it; what is under way is spent already."""
    rule = Watching()
    world = make_world(16, [Paying(1 << 20, name="below")], admission=rule)
    worlds.append(world)
    assert rule.purse is not None
    assert rule.purse.is_kept
    assert rule.purse.cost_bytes(CHUNK_BYTES) == CHUNK_BYTES + 4096
    assert rule.purse.day_bytes() == (10 * CHUNK_BYTES, 64 * CHUNK_BYTES)
    world.hierarchy.levels[0]._spending.begin(CHUNK_BYTES)
    assert rule.purse.day_bytes() == (10 * CHUNK_BYTES - CHUNK_BYTES - 4096, 64 * CHUNK_BYTES)
    world.hierarchy.levels[0]._spending.end(CHUNK_BYTES)


def test_a_tier_without_a_budget_has_an_empty_purse(worlds: list[World]) -> None:
    """One that cannot keep a budget, and one that could."""
    for tier, is_kept in ((MemoryTier(1 << 20, name="below"), False), (Paying(1 << 20), True)):
        tier.day = None
        rule = Watching()
        worlds.append(make_world(16, [tier], admission=rule))
        assert rule.purse is not None
        assert rule.purse.day_bytes() is None
        assert rule.purse.is_kept is is_kept


def test_the_budget_goes_to_what_comes_back(worlds: list[World]) -> None:
    """Through the whole hierarchy: once one-offs have shown that they are, they stay out."""
    clock = ManualClock()
    budget = 64 * CHUNK_BYTES
    rule = WriteBudget(budget, clock=clock)
    tier = MemoryTier(1 << 24, name="below")
    world = make_world(2_048, [tier], admission=rule, clock=clock)
    worlds.append(world)
    for number in range(60):
        clock.advance(600.0)
        run(world, f"once{number}-")
        run(world, "again")
    again = [tier.contains(key) for key in keys_of("again", 4)]
    num_once = sum(
        tier.contains(key) for number in range(60) for key in keys_of(f"once{number}-", 4)
    )
    assert all(again)
    assert num_once <= budget // CHUNK_BYTES, "10 hours, one day's budget"
    assert world.counters.declined_chunks["below", "not_admitted"] >= 4 * 60 - num_once


def test_a_budget_that_does_not_fit_the_tier_is_refused() -> None:
    """A tier that keeps a budget itself has to be given it itself."""
    tier = Paying(1 << 20, name="below")
    tier.day = None
    with pytest.raises(ConfigError, match="write it as the tier's write_budget"):
        make_world(16, [tier], admission=WriteBudget("1GiB", clock=ManualClock()))
