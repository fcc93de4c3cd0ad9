"""A prefix is read only as far as reading is predicted to be quicker than computing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hierarchy.invariants import check_quiet
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.request import Answer, Request
from undercroft.hierarchy.speed import LEAST_READS, Speeds
from undercroft.hierarchy.worth import PROBE_CHUNKS, Worth
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.mini_engine import chunk_key, content_of
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)

MARGIN = 1.5
COMPUTE_S = 0.01  # a chunk


def below(keys: list[ChunkKey], name: str = "below") -> MemoryTier:
    tier = MemoryTier(1024 * CHUNK_BYTES, name=name)
    for key in keys:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))
    return tier


def slow_down(world: World, chunk_s: float, level: int = 0) -> None:
    """As if so many reads had taken so long."""
    speeds = world.hierarchy.levels[level].transfers.speeds
    for _ in range(8):
        speeds.served(Op.READ, chunk_s, CHUNK_BYTES)


def made(
    worlds: list[World], tiers: list[MemoryTier], num_slots: int = 64, *, probes: bool = False
) -> World:
    """Whose engine computes a chunk, which is one token here, in `COMPUTE_S`."""
    world = make_world(
        num_slots,
        tiers,
        clock=ManualClock(),
        limits=Limits(promote_deadline_s=60.0, load_margin=MARGIN),
    )
    worlds.append(world)
    worth = world.hierarchy.restores.worth
    worth.compute_s = lambda begin, end: COMPUTE_S * (end - begin)
    if not probes:
        worth._probe_at_s = dict.fromkeys((tier.name for tier in tiers), float("inf"))
    return world


def skipped(world: World, level: str = "below") -> int:
    return world.counters.lookup_misses[level, "too_slow"]


def test_what_is_slower_than_computing_is_not_read(worlds: list[World]) -> None:
    """Two threads, three and a bit times slower each: a miss with a reason of its own, at once."""
    keys = keys_of("a", 12)
    world = made(worlds, [below(keys)])
    slow_down(world, 2.1 * MARGIN * COMPUTE_S)
    entry = world.engine.submit(keys)
    for _ in range(2):
        world.engine.step()
    assert entry.num_hits == 0
    assert skipped(world) == 1
    assert world.counters.skipped_restores == {"below": 1}
    world.wait_for_tiers()
    world.engine.settle()
    check_quiet(world.hierarchy)


def test_what_is_quicker_is_read(worlds: list[World]) -> None:
    """The control: within the margin everything is."""
    keys = keys_of("a", 12)
    world = made(worlds, [below(keys)])
    slow_down(world, 1.9 * MARGIN * COMPUTE_S)
    assert world.engine.run(keys).num_hits == 12
    assert not skipped(world)


@pytest.mark.parametrize("unknown", ["compute", "read", "margin"])
def test_as_long_as_a_speed_is_not_known_everything_is_read(
    worlds: list[World], unknown: str
) -> None:
    """And with the setting off."""
    keys = keys_of("a", 12)
    world = made(worlds, [below(keys)])
    worth = world.hierarchy.restores.worth
    if unknown != "read":
        slow_down(world, 1.0)
    if unknown == "compute":
        worth.compute_s = lambda _begin, _end: None
    if unknown == "margin":
        worth._margin = None
    assert world.engine.run(keys).num_hits == 12


def test_host_memory_is_always_used(worlds: list[World]) -> None:
    """Only what lies below is computed: the chunks before are here, and are hits."""
    keys = keys_of("a", 12)
    world = made(worlds, [below(keys)])
    assert world.engine.run(keys[:5]).num_hits == 5
    slow_down(world, 1.0)
    assert world.engine.run(keys).num_hits == 5
    assert world.counters.skipped_restores == {"below": 1}


def test_a_prefix_is_cut_where_its_slow_part_begins(worlds: list[World]) -> None:
    """The first half lies in a quick level, and is read; in the same step."""
    keys = keys_of("a", 12)
    world = made(worlds, [below(keys[:6], "near"), below(keys[6:], "far")])
    slow_down(world, 0.001)
    slow_down(world, 1.0, level=1)
    assert world.engine.run(keys).num_hits == 6
    assert skipped(world, "far") >= 1  # once a walk
    assert not skipped(world, "near")
    assert world.counters.skipped_restores == {"far": 1}


def test_a_queue_counts(worlds: list[World]) -> None:
    """A quick level that has much to read already is a slow one."""
    keys, other = keys_of("a", 4), keys_of("b", 40)
    world = made(worlds, [below([*keys, *other])])
    slow_down(world, MARGIN * COMPUTE_S)
    world.engine.submit(other)
    entry = world.engine.submit(keys)
    while entry.num_hits is None:
        world.engine.step()
    assert entry.num_hits == 0
    world.engine.settle()


def test_a_level_that_has_become_quick_is_found_out(worlds: list[World]) -> None:
    """Some chunks are read for nobody; after that the next request is served."""
    keys = keys_of("a", 40)
    world = made(worlds, [below(keys)], probes=True)
    slow_down(world, 1.0)
    first = world.engine.run(keys[:20])
    assert (first.num_hits or 0) <= PROBE_CHUNKS  # what comes at once is used
    assert world.counters.promoted_chunks == {"below": PROBE_CHUNKS}
    assert world.engine.run(keys[20:]).num_hits == 20


def test_probes_are_few(worlds: list[World]) -> None:
    """Of a level that stays slow, a tenth of the time at most goes into them."""
    keys = keys_of("a", 60)
    world = made(worlds, [below(keys)], num_slots=512, probes=True)
    for n in range(6):
        slow_down(world, 1.0)
        world.engine.run(keys[10 * n : 10 * n + 10])
    assert world.counters.promoted_chunks == {"below": PROBE_CHUNKS}


def test_a_slow_read_past_its_deadline_counts_as_seen(worlds: list[World]) -> None:
    """Else a tier whose every read is too late would never be known to be slow."""
    speeds = Speeds()
    for _ in range(LEAST_READS - 1):
        speeds.overdue(Op.READ, 2.0, 100)
    assert speeds.read_s_per_byte is None
    speeds.overdue(Op.READ, 2.0, 100)
    assert speeds.read_s_per_byte == 0.02
    assert speeds.average(Op.READ) is None


def test_one_hiccup_changes_nothing() -> None:
    """Nor does one lucky read of a slow tier."""
    speeds = Speeds()
    for seconds in (1.0, 1.0, 1.0, 1000.0, 1.0):
        speeds.served(Op.READ, seconds, 1)
    assert speeds.read_s_per_byte == 1.0


@pytest.mark.parametrize("slow", [False, True])
def test_groups_are_cut_together(worlds: list[World], slow: bool) -> None:
    """A full group and a window: what the one does not read the other does not either."""
    full = [chunk_key(f"c{i}") for i in range(8)]
    window = [chunk_key(f"c{i}", 1) for i in range(8)]
    world = made(worlds, [below([*full, *window])])
    slow_down(world, 1.0 if slow else 0.0001)
    hierarchy = world.hierarchy
    positions = {key: i + 1 for keys in (full, window) for i, key in enumerate(keys)}
    request = Request("r", positions.get, lambda key: key[-1])
    for _ in range(6):
        found = [hierarchy.lookup(key, request).value for key in full]
        found += [hierarchy.lookup(key, request).value for key in window[7:5:-1]]
        hierarchy.end_step()
        world.wait_for_tiers()
        hierarchy.step_ended()
    if slow:
        assert "pending" not in found
        assert found[-2:] == ["miss", "miss"]
        assert world.counters.skipped_restores == {"below": 1}
    else:
        assert found == ["hit"] * 10
    hierarchy.finish_request(request)


# --- the decision itself ---


@dataclass
class FakeTransfers:
    speeds: Speeds
    num_threads: int
    queued_read_bytes: int


@dataclass
class FakeLevel:
    name: str
    transfers: FakeTransfers


def level(name: str, chunk_s: float, num_threads: int, num_queued: int) -> FakeLevel:
    speeds = Speeds()
    for _ in range(8):
        speeds.served(Op.READ, chunk_s, CHUNK_BYTES)
    return FakeLevel(name, FakeTransfers(speeds, num_threads, num_queued * CHUNK_BYTES))


@settings(max_examples=300, deadline=None)
@given(
    places=st.lists(st.sampled_from(["host", "near", "far"]), min_size=2, max_size=200),
    chunk_s=st.tuples(st.floats(1e-5, 10), st.floats(1e-5, 10)),
    compute_s=st.floats(1e-5, 1),
    dearer=st.floats(0, 0.01),
    num_threads=st.integers(1, 8),
    num_queued=st.integers(0, 100),
)
def test_never_worse_than_the_better_of_reading_and_computing_by_more_than_the_margin(
    places: list[str],
    chunk_s: tuple[float, float],
    compute_s: float,
    dearer: float,
    num_threads: int,
    num_queued: int,
) -> None:
    """Whatever the speeds: of the whole prefix, or what host memory has, and all cuts between."""
    keys = keys_of("p", len(places))
    levels = {
        "near": level("near", chunk_s[0], num_threads, num_queued),
        "far": level("far", chunk_s[1], num_threads, 0),
    }
    where = dict(zip(keys, places, strict=True))
    worth = Worth(
        MARGIN,
        level_of=lambda key: levels.get(where[key]),  # type: ignore[arg-type, return-value]
        bytes_of=lambda _key: CHUNK_BYTES,
    )

    def compute(begin: int, end: int) -> float:
        return (end - begin) * compute_s + dearer * (end**2 - begin**2) / 2

    worth.compute_s = compute
    positions = {key: i + 1 for i, key in enumerate(keys)}
    request = Request("r", positions.get)
    for key in keys:
        request.note(key, Answer.HIT if where[key] == "host" else Answer.BELOW)
    num_below = sum(place != "host" for place in places)
    end = worth.end_of(request, num_below * CHUNK_BYTES, list(levels.values()))  # type: ignore[arg-type]

    def takes(cut: int) -> float:
        read_s = 0.0
        for each, one in zip(("near", "far"), chunk_s, strict=True):
            num = places[:cut].count(each)
            queued = num_queued if each == "near" else 0
            if num:
                read_s = max(read_s, one * max((num + queued) / num_threads, 1))
        return read_s + compute(cut, len(keys))

    num_here = next((i for i, place in enumerate(places) if place != "host"), len(places))
    chosen = takes(len(keys) if end is None else end)
    assert chosen <= MARGIN * min(takes(len(keys)), takes(num_here), takes(0)) * (1 + 1e-9)
    assert end is None or end >= num_here
