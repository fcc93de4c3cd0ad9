"""More is stored than a tier takes: bounds hold, the oldest goes, reads go first, budgets hold."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hierarchy.invariants import check_all
from tests.hierarchy.transfers_rig import Rig, until
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world
from tests.tiers.disk.support import disk

from undercroft.errors import ConfigError
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import chunk_key, content_of
from undercroft.tiers.base import Tier
from undercroft.tiers.memory import MemoryTier

NUM_SLOTS = 64
COST_BYTES = 4096 + 4096 + 3 * 4096
"""What a chunk costs on disk: header, itself, and its index."""


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    yield from made_worlds()


def store(world: World, keys: list[ChunkKey]) -> None:
    """One request: store `keys` and end, in one step."""
    hierarchy, request = world.hierarchy, Request(keys[0].hex()[:12], positions(keys).get)
    plan = hierarchy.prepare_store(keys, request)
    for key, slot in zip(plan.keys, plan.slots, strict=True):
        hierarchy.view(slot)[:] = content_of(key, CHUNK_BYTES)
    hierarchy.complete_store(plan.keys, request)
    hierarchy.finish_request(request)
    hierarchy.end_step()
    hierarchy.step_ended()


def positions(keys: list[ChunkKey]) -> dict[ChunkKey, int]:
    return {key: index + 1 for index, key in enumerate(keys)}


def warnings(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """How often each text was said."""
    said: dict[str, int] = {}
    for record in caplog.records:
        if record.levelno >= logging.WARNING:
            text = str(record.msg).partition(" (and %d")[0]
            said[text] = said.get(text, 0) + 1
    return said


# --- bounds -----------------------------------------------------------------------------------


def num_held(world: World) -> int:
    """Everything that could pile up: offers, moves, deadlines, ends, and what is about keys."""
    hierarchy, (level,) = world.hierarchy, world.hierarchy.levels
    transfers = level.transfers
    return sum(
        map(
            len,
            (
                hierarchy.cascade,
                hierarchy.touches,
                hierarchy.cascade._late,
                level._writing,
                level._late_writes,
                transfers._moves,
                transfers._queue,
                transfers._done,
                transfers._released,
                hierarchy.holds.requests,
                hierarchy._asking,
                hierarchy.fresh._entries,
            ),
        )
    )


@pytest.mark.parametrize("effect", [Effect.SLOW, Effect.HANG])
def test_minutes_of_more_than_a_tier_takes(
    effect: Effect, worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten minutes at a hundred times what the tier takes: nothing grows, all of it is counted,
    and of each kind there is a line a minute at most."""
    clock = ManualClock()
    slow = FaultyTier(
        MemoryTier(1 << 24, name="below"), Injector(effect, on_verb("write_from")), clock=clock
    )
    world = make_world(
        NUM_SLOTS,
        [slow],
        clock=clock,
        max_queued_write_bytes=8 * CHUNK_BYTES,
        limits=Limits(max_cascade_waiting=4 * NUM_SLOTS),
    )
    worlds.append(world)
    (level,) = world.hierarchy.levels
    seen, most_bytes = [], 0
    for second in range(600):
        store(world, keys_of(f"{second}-", 16))
        most_bytes = max(most_bytes, level.transfers.queued_write_bytes)
        seen.append(num_held(world))
        if effect is Effect.SLOW and level.transfers.num_running == 1:
            clock.await_sleepers(1)  # one thread writes, the other is kept for reads
        clock.advance(1.0)
    check_all(world.hierarchy)
    assert most_bytes <= 8 * CHUNK_BYTES
    assert max(seen[300:]) <= max(seen[100:300]) <= 12 * NUM_SLOTS, "it grows"
    counters = world.counters
    assert counters.stored_chunks == 600 * 16, "level 0 takes everything all the time"
    declined = {reason: num for (_, reason), num in counters.declined_chunks.items()}
    if effect is Effect.SLOW:
        assert counters.cascaded_chunks["below"] > 50
    # A request's chunks are offered when they were stored, and once more when it has ended.
    assert 0.9 * 600 * 16 <= sum(declined.values()) <= 2 * 600 * 16
    assert declined.keys() <= {"evicted_before_its_turn", "queue_full", "unavailable"}
    said = warnings(caplog)
    assert said, "nobody said that the tier is too slow"
    assert max(said.values()) <= 10, said
    if effect is Effect.SLOW:
        assert [text for text in said if "is written to more slowly than" in text]
    world.close()
    clock.advance(60.0)  # who sleeps in the tier goes


def test_the_oldest_offers_go_first(worlds: list[World]) -> None:
    """When more chunks wait than may, those that came first are given up: the first that host
    memory will not have any more. Of a burst that is larger still, the beginning is kept."""
    hung = FaultyTier(
        MemoryTier(1 << 24, name="below"), Injector(Effect.HANG, on_verb("write_from"))
    )
    world = make_world(
        256, [hung], max_queued_write_bytes=CHUNK_BYTES, limits=Limits(max_cascade_waiting=20)
    )
    worlds.append(world)
    store(world, keys_of("a", 16))
    store(world, keys_of("b", 16))
    waiting = [key for key, *_ in world.hierarchy.cascade._waiting["below"]]
    assert 18 <= len(waiting) <= 20, "a mover may have taken one since, and another be queued"
    assert set(keys_of("b", 16)) <= set(waiting)
    assert world.counters.declined_chunks["below", "queue_full"] > 0
    store(world, keys_of("c", 64))
    waiting = [key for key, *_ in world.hierarchy.cascade._waiting["below"]]
    assert 18 <= len(waiting) <= 20
    assert set(waiting) <= set(keys_of("c", 64))
    assert keys_of("c", 1)[0] in waiting, "without its root, a prefix is of no use"


# --- reads first ------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_threads", "most_writes"), [(1, 1), (2, 0), (4, 0)])
def test_a_read_waits_at_most_for_what_runs(num_threads: int, most_writes: int) -> None:
    """A hundred writes are queued, each takes a second: a read starts at once, as one thread is
    kept for reads; where there is only one thread, after the write that runs."""
    rig = Rig(
        Injector(Effect.SLOW, on_verb("write_from"), seconds=1.0),
        num_threads=num_threads,
        max_queued_write_bytes=1 << 24,
    )
    try:
        wanted = chunk_key("wanted")
        rig.store(wanted)
        for key in keys_of("w", 100):
            assert rig.write(key) is not None
        rig.clock.await_sleepers(max(1, num_threads - 1))
        for turn in range(10):
            ticket, waited = rig.read(wanted), 0
            found: dict[int, bool] = {}
            while ticket not in found:
                if waited < most_writes:
                    rig.clock.advance(1.0)
                    waited += 1
                until(lambda: rig.transfers.has_news)
                found |= {done.ticket: done.outcome.found for done in rig.transfers.poll()}
            assert found[ticket], f"turn {turn}"
            rig.clock.await_sleepers(max(1, num_threads - 1))
        writes = [verb for verb, _ in rig.recorder.calls].count("write")
        assert writes <= max(1, num_threads - 1) + 10 * most_writes, "a write passed the read"
    finally:
        rig.transfers.cancel_queued()
        rig.clock.advance(10.0)
        rig.close()


# --- a full level 0 ---------------------------------------------------------------------------


def calls_of(run: Callable[[], object]) -> int:
    """Python and C calls that `run` makes."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return num_calls


def full_world(worlds: list[World], num_slots: int) -> tuple[World, Request]:
    """Every slot is being loaded from, by one request."""
    world = make_world(num_slots, [MemoryTier(1 << 24, name="below")])
    worlds.append(world)
    keys = keys_of("a", num_slots)
    world.engine.run(keys)
    reader = Request("reader", positions(keys).get)
    for key in keys:
        world.hierarchy.lookup(key, reader)
    world.hierarchy.prepare_load(keys, reader)
    world.hierarchy.end_step()
    return world, reader


def test_a_step_costs_the_same_however_much_was_declined(worlds: list[World]) -> None:
    """With level 0 full of what may not go, ten times the slots, and a request that has been
    declined a hundred times as often, cost a step the same. Operations are counted, not time."""

    def cost(num_slots: int, num_steps: int) -> int:
        world, reader = full_world(worlds, num_slots)
        writer = Request("writer")

        def step(number: int) -> None:
            world.hierarchy.prepare_store(keys_of(f"b{number}-", 1), writer)
            world.hierarchy.end_step(["writer"])
            world.hierarchy.step_ended()

        for number in range(num_steps):
            step(number)
        found = min(calls_of(lambda n=n: step(1_000_000 + n)) for n in range(5))
        assert world.counters.declined_chunks["host", "full"] == num_steps + 5
        world.hierarchy.complete_load(keys_of("a", num_slots), reader)
        for request in (reader, writer):
            world.hierarchy.finish_request(request)
        return found

    small = cost(64, 10)
    assert cost(640, 10) <= 1.1 * small + 5
    assert cost(64, 1000) <= 1.1 * small + 5


# --- budgets ----------------------------------------------------------------------------------


def paced_world(clock: ManualClock, rate_bytes: int, tier: Tier | None = None) -> World:
    tier = tier or MemoryTier(1 << 24, name="below")
    return make_world(256, [tier], clock=clock, write_rate_bytes=rate_bytes)


def on_disk(world: World) -> int:
    world.wait_for_tiers()
    world.hierarchy.poll()
    return world.counters.cascaded_chunks["below"]


def test_a_rate_is_kept_and_nothing_is_lost_for_it(worlds: list[World]) -> None:
    """Of a burst, a second's worth goes at once and the rest as time goes by, in prefix order."""
    clock = ManualClock()
    world = paced_world(clock, 10 * CHUNK_BYTES)
    worlds.append(world)
    keys = keys_of("a", 100)
    store(world, keys)
    assert on_disk(world) == 10
    tier = world.hierarchy.levels[0].tier
    assert [tier.contains(key) for key in keys] == [True] * 10 + [False] * 90
    for second in range(1, 10):
        clock.advance(0.5)
        world.hierarchy.end_step()
        clock.advance(0.5)
        world.hierarchy.end_step()
        world.hierarchy.end_step()
        assert on_disk(world) == 10 + 10 * second
    world.hierarchy.end_step()  # what was offered twice
    assert not world.counters.declined_chunks
    assert not world.hierarchy.cascade.num_waiting("below")


def test_who_waits_for_the_rate_keeps_no_idle_engine_awake(worlds: list[World]) -> None:
    """What may not be written yet is no work; and closing does not spin until it may."""
    world = paced_world(ManualClock(), CHUNK_BYTES // 64)
    worlds.append(world)
    store(world, keys_of("a", 50))
    on_disk(world)
    world.engine.settle()
    assert world.hierarchy.cascade.num_waiting("below") >= 49
    assert not world.hierarchy.has_pending_work()
    world.close()
    world.close()


def spend(world: World, label: str, num_chunks: int) -> None:
    """Store so many chunks, 16 a request."""
    for n in range(num_chunks // 16):
        world.hierarchy.levels[0].tier.refresh()  # type: ignore[attr-defined] # it has a thread
        store(world, keys_of(f"{label}{n}-", 16))
        world.wait_for_tiers()
        world.hierarchy.end_step()
    world.engine.settle()


def test_a_days_budget_is_kept_over_a_restart(
    tmp_path: Path, worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """What is beyond it is refused, counted and said once a minute; loads go on; it is remembered
    by the directory, and the next day has its own."""
    clock, budget = ManualClock(1e6), 100 * COST_BYTES
    more = {"name": "below", "clock": clock, "capacity_bytes": 64 << 20}
    world = make_world(512, [disk(tmp_path, write_budget_bytes=budget, **more)], clock=clock)
    worlds.append(world)
    spend(world, "a", 160)
    tier = world.hierarchy.levels[0].tier
    assert tier.written_bytes() <= budget  # type: ignore[attr-defined]
    written = world.counters.cascaded_chunks["below"]
    assert 90 <= written <= 160
    assert world.counters.declined_chunks["below", "write_budget"] >= 160 - written
    assert [num for text, num in warnings(caplog).items() if "write_budget is spent" in text] == [1]
    check_all(world.hierarchy)
    world.close()
    again = make_world(512, [disk(tmp_path, write_budget_bytes=budget, **more)], clock=clock)
    worlds.append(again)
    assert again.engine.run(keys_of("a0-", 16)).num_hits == 16, "reads cost nothing"
    spend(again, "b", 160)
    assert again.counters.cascaded_chunks["below"] <= 2
    for _ in range(26):
        clock.advance(3600.0)
    again.hierarchy.levels[0].tier.refresh()  # type: ignore[attr-defined]
    spend(again, "c", 160)
    assert again.counters.cascaded_chunks["below"] >= 90


def test_a_budget_below_one_chunk_is_refused(tmp_path: Path) -> None:
    """It could never be spent; the message has both numbers."""
    tier = disk(tmp_path, write_budget_bytes=5 * CHUNK_BYTES * 4)
    with pytest.raises(ConfigError, match="write budget of tier disk is 81920 bytes a day"):
        make_world(64, [tier], slot_bytes=[1 << 20])
    tier.close()
