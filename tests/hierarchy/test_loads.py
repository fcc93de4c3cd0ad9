"""Chunks that were a hit and did not reach the engine leave level 0, and nothing else breaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.hierarchy.invariants import check_all
from tests.hierarchy.worlds import CHUNK_BYTES, World, make_world

from undercroft.hierarchy.events import LevelEvent
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.testing.mini_engine import chunk_key, content_of

KEYS = [chunk_key(f"a{i}") for i in range(8)]


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world(16)
    yield made
    made.close()


def store(world: World, keys: list[ChunkKey], request: Request) -> None:
    plan = world.hierarchy.prepare_store(keys, request)
    for key, slot in zip(plan.keys, plan.slots, strict=True):
        world.hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
    world.hierarchy.complete_store(set(plan.keys), request)


def load(world: World, keys: list[ChunkKey], request: Request) -> list[int]:
    """Prepared, not completed; the offsets of the slots."""
    assert all(world.hierarchy.lookup(key, request) is Lookup.HIT for key in keys)
    return [
        world.hierarchy.pool.slots.offset(s) for s in world.hierarchy.prepare_load(keys, request)
    ]


def test_what_failed_is_dropped_while_its_storer_and_another_loader_go_on(world: World) -> None:
    """The storer's books forget it, the other's pin keeps its slot; counts and events are true."""
    hierarchy = world.hierarchy
    storer, one, two = Request("storer"), Request("one"), Request("two")
    store(world, KEYS, storer)  # and runs on: its chunks are unlisted yet
    hierarchy.end_step()
    hierarchy.events.take()
    offsets, _ = load(world, KEYS, one), load(world, KEYS, two)
    noted: list[tuple[object, ...]] = []
    world.counters.note = lambda *told: noted.append(told)
    hierarchy.loads.fail("one", frozenset(offsets[2:4]))
    check_all(hierarchy)
    assert world.counters.dropped_chunks["host", "load_failed"] == 2
    assert noted == [("host", "dropped", "load_failed", key) for key in KEYS[2:4]]
    assert hierarchy.events.take() == [LevelEvent("host", KEYS[2:4], removed=True)]

    hierarchy.complete_load(set(KEYS), one)
    assert world.counters.loaded_chunks == 6, "what failed was not loaded"
    hierarchy.complete_load(set(KEYS), two)
    assert world.counters.loaded_chunks == 14
    check_all(hierarchy)
    found = [hierarchy.lookup(key, Request("three")) for key in KEYS]
    assert found == [Lookup.HIT] * 2 + [Lookup.MISS] * 2 + [Lookup.HIT] * 4

    # The readers end, and the slots are handed out again before the storer's chunks are listed.
    hierarchy.finish_request(one)
    hierarchy.finish_request(two)
    other = Request("other")
    store(world, [chunk_key(f"b{i}") for i in range(10)], other)
    for request in (storer, other):
        hierarchy.finish_request(request)
        check_all(hierarchy)
    for _ in range(12):
        hierarchy.end_step()
        check_all(hierarchy)
    assert world.engine.run([chunk_key(f"c{i}") for i in range(16)]).num_stored == 16
    assert hierarchy.pool.slots.num_pinned == 0


def test_a_load_that_fails_twice_or_after_a_reset_changes_nothing_more(world: World) -> None:
    """Two ranks name the same chunk; a reset has voided it; a request is unknown."""
    hierarchy = world.hierarchy
    world.engine.run(KEYS)
    one, two = Request("one"), Request("two")
    offsets = frozenset(load(world, KEYS, one))
    hierarchy.loads.fail("one", offsets)
    hierarchy.loads.fail("one", offsets)
    hierarchy.loads.fail("nobody", offsets)
    check_all(hierarchy)
    assert world.counters.dropped_chunks["host", "load_failed"] == len(KEYS)
    hierarchy.complete_load(set(KEYS), one)
    hierarchy.finish_request(one)

    world.engine.run(KEYS)
    offsets = frozenset(load(world, KEYS, two))
    assert hierarchy.reset()
    hierarchy.loads.fail("two", offsets)
    assert world.counters.dropped_chunks["host", "load_failed"] == len(KEYS)
    hierarchy.finish_request(two)
    world.engine.settle()
    check_all(hierarchy)
    assert world.engine.run(KEYS).num_hits == 0
