"""Policies that are told of whole requests, in the hierarchy."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from worlds import CHUNK_BYTES, World, keys_of, make_world

from undercroft.hierarchy.level import Level
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.testing.mini_engine import chunk_key, content_of
from undercroft.tiers.memory import MemoryTier


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def make_shared() -> tuple[KnownPrefixes, list[Hazard], World]:
    known, policies = KnownPrefixes(4096), []

    def make_policy(capacity_chunks: int) -> Hazard:
        policies.append(Hazard(capacity_chunks, known))
        return policies[-1]

    tier = MemoryTier(40 * CHUNK_BYTES, name="below")
    return known, policies, make_world(16, [tier], make_policy=make_policy)


def drain(world: World) -> None:
    while world.hierarchy.has_pending_work() or len(world.hierarchy.cascade):
        world.engine.step()


def test_each_request_is_seen_once_whole_and_root_first(worlds: list[World]) -> None:
    """However many levels share what is known; what was loaded counts as what was stored."""
    known, policies, world = make_shared()
    worlds.append(world)
    told: list[Sequence[ChunkKey]] = []
    for policy in policies:
        tell = policy.on_request
        policy.on_request = lambda keys, *args, tell=tell: (  # type: ignore[method-assign]
            told.append(list(keys)),
            tell(keys, *args),
        )[1]
    keys = keys_of("a", 6)
    for count in (4, 6, 6):
        world.engine.run(keys[:count])
        drain(world)
    assert known.serial == 3
    assert told == [keys[:count] for count in (4, 4, 6, 6, 6, 6)]


def test_all_levels_keep_prefix_order_while_full(worlds: list[World]) -> None:
    """Chats that outgrow both levels: neither ever has a chunk without the one before it."""
    known, policies, world = make_shared()
    worlds.append(world)
    known.curves.num_waits = 1000
    chats = [keys_of(f"chat {number} ", 12) for number in range(7)]
    for turn in range(3, 13, 3):
        for chat in chats:
            world.engine.run(chat[:turn])
            drain(world)
            for policy in policies:
                for above, below in (pair for each in chats for pair in pairwise(each)):
                    assert above in policy or below not in policy
    assert known.serial == 4 * len(chats)


def begin(world: World, name: str, keys: Sequence[ChunkKey]) -> Request:
    """A request that has computed `keys`, and goes on to generate."""
    positions = {key: at + 1 for at, key in enumerate(keys)}
    request = Request(name, positions.get)
    grow(world, request, keys)
    return request


def grow(world: World, request: Request, keys: Sequence[ChunkKey]) -> None:
    hierarchy = world.hierarchy
    hierarchy.end_step([request.id])
    plan = hierarchy.prepare_store(list(keys), request)
    for key, slot in zip(plan.keys, plan.slots, strict=True):
        view = hierarchy.view(slot)
        view[:] = content_of(key, len(view))
    hierarchy.complete_store(set(plan.keys), request)
    hierarchy.step_ended()


def resident(world: World, keys: Sequence[ChunkKey], level: Level | None = None) -> list[bool]:
    if level is not None:
        return [level.has(key) for key in keys]
    return [world.hierarchy.pool.find(key) >= 0 for key in keys]


def is_prefix(flags: list[bool]) -> bool:
    return flags == sorted(flags, reverse=True)


def sights(known: KnownPrefixes, keys: Sequence[ChunkKey]) -> list[int]:
    return [int(known._state[known.find(key)]) >> 9 for key in keys]


def test_a_request_that_runs_for_long_is_not_evicted_first(worlds: list[World]) -> None:
    """Both levels are full of what others have left, and it generates for hundreds of steps."""
    known, _policies, world = make_shared()
    worlds.append(world)
    for number in range(8):
        world.engine.run(keys_of(f"old {number} ", 8))
        drain(world)
    keys = keys_of("long ", 8)
    request = begin(world, "long", keys)
    for number in range(10):
        world.engine.run(keys_of(f"new {number} ", 4))
        drain(world)
    assert all(resident(world, keys)), "the host evicted a running request's chunks"
    assert all(resident(world, keys, world.hierarchy.levels[0])), "the level below did"
    world.hierarchy.finish_request(request)
    drain(world)
    assert sights(known, keys) == [1] * 8
    for number in range(20):
        world.engine.run(keys_of(f"last {number} ", 4))
        drain(world)
        for level in (None, world.hierarchy.levels[0]):
            assert is_prefix(resident(world, keys, level))
    assert not any(resident(world, keys))


@pytest.mark.parametrize("num_slots", [8, 64], ids=["host is full", "level below is full"])
def test_where_all_room_is_a_running_requests_it_goes_from_its_end(
    worlds: list[World], num_slots: int
) -> None:
    """It is told of before its end then, and counts as one use however often that happens."""
    known = KnownPrefixes(4096)
    tier = MemoryTier((8 if num_slots > 8 else 64) * CHUNK_BYTES, name="below")
    world = make_world(num_slots, [tier], make_policy=lambda n: Hazard(n, known))
    worlds.append(world)
    keys = keys_of("long ", 12)
    request = begin(world, "long", keys[:8])
    drain(world)
    level = None if num_slots == 8 else world.hierarchy.levels[0]
    assert all(resident(world, keys[:8], level))
    for number in range(3):
        world.engine.run(keys_of(f"short {number} ", 1))
        drain(world)
    left = resident(world, keys[:8], level)
    assert is_prefix(left)
    assert 0 < sum(left) < 8
    assert sights(known, keys[:8]) == [1] * 8
    grow(world, request, keys[8:])
    drain(world)
    world.hierarchy.finish_request(request)
    drain(world)
    assert sights(known, keys) == [1] * 12
    world.assert_quiet()


def test_a_path_has_its_root_also_where_the_engine_had_that_itself(worlds: list[World]) -> None:
    """What the adapter knows counts, not what had to be loaded or stored."""
    known, policies, world = make_shared()
    worlds.append(world)
    keys = keys_of("a", 8)
    world.engine.run(keys[:6])
    drain(world)
    request = Request("again", {key: at for at, key in enumerate(keys, 1)}.get)
    request.use.every_key = lambda _chain: [keys]
    grow(world, request, keys[6:])
    world.hierarchy.finish_request(request)
    drain(world)
    assert sights(known, keys) == [2] * 6 + [1] * 2
    for policy in policies:
        assert list(policy.victims()) == keys[::-1]
    repeated = Request("only repeated")
    repeated.use.every_key = lambda _chain: [keys]
    world.hierarchy.finish_request(repeated)
    assert sights(known, keys) == [3] * 6 + [2] * 2


def test_after_a_reset_it_goes_on(worlds: list[World]) -> None:
    """The residents are gone, what is known of the traffic stays."""
    known, policies, world = make_shared()
    worlds.append(world)
    world.engine.run(keys_of("a", 8))
    drain(world)
    assert world.hierarchy.reset()
    assert [list(policy.victims()) for policy in policies] == [[], []]
    world.engine.run([chunk_key(f"b{i}") for i in range(8)])
    world.engine.run(keys_of("a", 8))
    drain(world)
    assert known.serial == 3
    assert all(len(list(policy.victims())) == 16 for policy in policies)
