"""Models of several groups: cut together, read together, or not at all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hierarchy.invariants import check_quiet
from tests.hierarchy.worlds import World, made_worlds, make_world

from undercroft.clock import SystemClock
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey
from undercroft.testing.machines import Group, GroupEngine, GroupRequest
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)

LARGE, SMALL = 8192, 4096
TWO_FULL = (Group(0, 2), Group(5, 2))
MIXED = (Group(0, 2), Group(3, 2, window=2), Group(7, 4, window=1))


def class_of(key: ChunkKey) -> int:
    return 0 if key[-1] == 0 else 1


def make(
    worlds: list[World], num_slots: int, tier: MemoryTier | None, groups: tuple[Group, ...], **more
) -> tuple[World, GroupEngine]:
    world = make_world(
        num_slots,
        [tier] if tier else [],
        slot_bytes=(LARGE, SMALL),
        class_of=class_of,
        limits=Limits(promote_deadline_s=20.0),
        **more,
    )
    worlds.append(world)
    return world, GroupEngine(world.hierarchy, groups, SystemClock().now_s)


def run(world: World, engine: GroupEngine, *prompts: str) -> list[GroupRequest]:
    entries = [engine.submit(prompt) for prompt in prompts]
    clock = SystemClock()
    for _ in range(200):
        if engine.idle and not world.hierarchy.has_pending_work():
            return entries
        engine.step()
        for level in world.hierarchy.levels:
            level.transfers.drain(clock.now_s() + 5)
    raise AssertionError("not settled")


def tier_with(
    prompt: str, groups: tuple[Group, ...], without: tuple[ChunkKey, ...] = ()
) -> MemoryTier:
    tier = MemoryTier(1 << 24, name="below")
    for group in groups:
        for key in group.keys(prompt):
            if key not in without:
                size = LARGE if class_of(key) == 0 else SMALL
                tier.write_from(key, memoryview(content_of(key, size)))
    return tier


@pytest.mark.parametrize("groups", [TWO_FULL, MIXED])
def test_all_of_a_prompt_comes_back(worlds: list[World], groups: tuple[Group, ...]) -> None:
    """With room for everything the whole prefix is a hit, and only what is loaded is read."""
    prompt = "a" * 33
    tier = tier_with(prompt, groups)
    world, engine = make(worlds, 64, tier, groups)
    (entry,) = run(world, engine, prompt)
    assert entry.num_hit_tokens == 32
    assert world.counters.promoted_chunks["below"] == world.counters.loaded_chunks
    check_quiet(world.hierarchy)


@pytest.mark.parametrize("num_slots", [2, 3, 5, 8, 11])
@pytest.mark.parametrize("groups", [TWO_FULL, MIXED])
def test_what_does_not_fit_is_cut_at_one_token(
    worlds: list[World], groups: tuple[Group, ...], num_slots: int
) -> None:
    """All groups are cut at the same token; nothing is read beyond the final hit; the room is
    used: at most a chunk's worth of it is left by the rounding of sizes."""
    prompt = "a" * 49
    tier = tier_with(prompt, groups)
    world, engine = make(worlds, num_slots, tier, groups)
    (entry,) = run(world, engine, prompt)
    assert entry.num_hit_tokens is not None
    assert world.counters.promoted_chunks["below"] == world.counters.loaded_chunks
    # In half a pool of equal shares a full-attention group always finds that many slots.
    least = num_slots // 2 if groups is TWO_FULL else (num_slots - 3) // 2
    assert entry.num_hit_tokens // 2 >= least
    check_quiet(world.hierarchy)


def test_a_group_with_nothing_makes_all_read_nothing(worlds: list[World]) -> None:
    """One group without its first chunk zeroes the request: not one byte is read for the others."""
    prompt = "a" * 32
    missing = TWO_FULL[1].keys(prompt)[0]
    tier = tier_with(prompt, TWO_FULL, (missing,))
    world, engine = make(worlds, 64, tier, TWO_FULL)
    (entry,) = run(world, engine, prompt)
    assert entry.num_hit_tokens == 0
    assert world.counters.promoted_chunks["below"] == 0


def test_a_window_without_its_chunks_is_looked_for_further_up(worlds: list[World]) -> None:
    """A gap in a sliding window rules out what lies right of it; the hit ends before the gap."""
    prompt = "a" * 33
    gap = MIXED[1].keys(prompt)[14]
    tier = tier_with(prompt, MIXED, (gap,))
    world, engine = make(worlds, 64, tier, MIXED)
    (entry,) = run(world, engine, prompt)
    assert entry.num_hit_tokens == 28
    check_quiet(world.hierarchy)


@pytest.mark.parametrize("num_asked", [1, 2])
def test_groups_lose_their_leaves_together(worlds: list[World], num_asked: int) -> None:
    """Under pressure what survives of a prompt is a prefix in every group, and the same one."""
    groups = (Group(1, 2), Group(2, 2))  # of one size, so they compete
    world, engine = make(worlds, 16, None, groups)
    prompt = "a" * 16
    for _ in range(num_asked):
        run(world, engine, prompt)
    for n in range(9):
        run(world, engine, chr(ord("b") + n) * 8)
        survivors = [
            [world.hierarchy.pool.find(key) >= 0 for key in group.keys(prompt)] for group in groups
        ]
        for here in survivors:
            assert all(a >= b for a, b in pairwise(here)), f"not a prefix: {here}"
        assert abs(sum(survivors[0]) - sum(survivors[1])) <= 1
    assert not any(survivors[0])


def test_one_key_many_times_a_step(worlds: list[World]) -> None:
    """Engines repeat their walk until the groups agree; a chunk is read once and pinned once."""
    prompt = "a" * 16
    tier = tier_with(prompt, MIXED)
    world, engine = make(worlds, 64, tier, MIXED)
    entry = engine.submit(prompt)
    for _ in range(7):
        assert engine.lookup(entry) is None
    world.hierarchy.end_step()
    assert len(world.hierarchy.restores) == len(world.hierarchy.restores._by_key) <= 8 + 2 + 1 + 1
    for level in world.hierarchy.levels:
        level.transfers.drain(SystemClock().now_s() + 5)
    for _ in range(7):
        assert engine.lookup(entry) == 15
    slots = world.hierarchy.pool.slots
    assert set(slots.pins) <= {0, 1}
    run(world, engine)
    check_quiet(world.hierarchy)


def test_two_sizes_are_admitted_by_the_bytes_they_share(worlds: list[World]) -> None:
    """An empty pool's extents can become either size; both groups do not count on the same one."""
    groups = (Group(0, 2), Group(5, 2))
    prompt = "a" * 200
    tier = tier_with(prompt, groups)
    world, engine = make(worlds, 40, tier, groups)
    (entry,) = run(world, engine, prompt)
    assert world.counters.promoted_chunks["below"] == world.counters.loaded_chunks
    assert entry.num_hit_tokens is not None
    assert entry.num_hit_tokens // 2 >= 38


def test_a_size_that_owns_nothing_gets_its_share(worlds: list[World]) -> None:
    """A pool full of one size's chunks, none in use, makes room for a restore of the other."""
    groups = (Group(0, 2),)
    prompt = "z" * 16
    tier = tier_with(prompt, (Group(5, 2),))
    world, engine = make(worlds, 16, tier, groups)
    for n in range(8):
        run(world, engine, chr(ord("a") + n) * 16)
    assert world.hierarchy.pool.slots.num_free(1) == 0
    other = GroupEngine(world.hierarchy, (Group(5, 2),), SystemClock().now_s)
    (entry,) = run(world, other, prompt)
    assert entry.num_hit_tokens == 16


def test_states_of_a_windowed_store(worlds: list[World]) -> None:
    """What a request stores of all groups is unlisted until it ends, then evictable as a whole."""
    world, engine = make(worlds, 64, None, MIXED)
    engine.submit("a" * 24)
    for _ in range(3):
        engine.step()
    slots = world.hierarchy.pool.slots
    assert SlotState.FRESH in {slots.states[slot] for slot in slots.taken()}
    run(world, engine)
    assert {slots.states[slot] for slot in slots.taken()} == {SlotState.READY}
    assert world.hierarchy.lookup(MIXED[0].keys("a" * 24)[0], Request("x")) is Lookup.HIT


@st.composite
def models(draw) -> tuple[Group, ...]:
    full = [Group(0, draw(st.sampled_from([1, 2, 4])))]
    if draw(st.booleans()):
        full.append(Group(1, draw(st.sampled_from([1, 2, 4]))))
    windows = [
        Group(2 + n, draw(st.sampled_from([1, 2, 4])), window=draw(st.integers(1, 3)))
        for n in range(draw(st.integers(0, 2)))
    ]
    return (*full, *windows)


@given(
    groups=models(),
    num_slots=st.integers(2, 14),
    num_tokens=st.integers(1, 40),
    num_stored=st.integers(0, 40),
)
@settings(max_examples=60)
def test_no_read_is_wasted_on_any_model(groups, num_slots, num_tokens, num_stored) -> None:
    """Whatever the groups: what is read for a lone request is what it loads, in a few steps."""
    worlds: list[World] = []
    tier = tier_with("a" * num_stored, groups)
    world, engine = make(worlds, num_slots, tier, groups, events=False)
    try:
        (entry,) = run(world, engine, "a" * num_tokens)
        assert entry.num_hit_tokens is not None
        assert entry.num_hit_tokens <= min(num_tokens, num_stored)
        assert world.counters.promoted_chunks["below"] == world.counters.loaded_chunks
        assert entry.num_asked <= 8
        check_quiet(world.hierarchy)
    finally:
        world.close()
