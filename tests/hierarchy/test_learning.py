"""Policies that are told of whole requests, in the hierarchy."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from worlds import CHUNK_BYTES, World, keys_of, make_world

from undercroft.keys import ChunkKey
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.testing.mini_engine import chunk_key
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
        policy.on_request = lambda keys, now_s, kind=0, tell=tell: (  # type: ignore[method-assign]
            told.append(list(keys)),
            tell(keys, now_s, kind),
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
