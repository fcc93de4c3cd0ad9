"""What a level says and refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from worlds import CHUNK_BYTES, make_world

from undercroft.clock import SystemClock
from undercroft.errors import ConfigError, TierClosed
from undercroft.hierarchy.hierarchy import Limits
from undercroft.keys import Namespace
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_index, on_verb
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.memory import MemoryTier


def test_a_failing_tier_is_said_once_and_counted_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names the tier and the reason; metrics have the number."""
    fault = Injector(Effect.ERROR, on_verb("write_from"))
    tier = FaultyTier(MemoryTier(64 * CHUNK_BYTES, name="below"), fault)
    world = make_world(16, [tier])
    try:
        for label in "abc":
            world.engine.run([chunk_key(label)])
        for _ in range(1000):
            if world.counters.dropped_chunks.total() >= 3:
                break
            time.sleep(0.002)
            world.engine.step()
    finally:
        world.close()
    assert world.counters.dropped_chunks["below", "unavailable"] == 3
    lines = [r.getMessage() for r in caplog.records if "failed to write" in r.getMessage()]
    assert lines == ["tier below failed to write a chunk: tier 'below': injected error"]


def test_a_tier_without_an_index_is_refused() -> None:
    """By an error that adapters know, with the tier's name and what to do."""

    class Blind:
        name = "blind"
        contains = read_into = write_from = delete = close = print

    with pytest.raises(ConfigError, match=r"tier 'blind' keeps no index .* leave it out"):
        make_world(4, [Blind()])  # type: ignore[list-item]


def test_what_is_not_written_because_of_a_write_from_before_is_counted() -> None:
    """A store of the old epoch hangs, the chunk is computed anew: no loss goes unnoticed."""
    fault = Injector(Effect.HANG, on_index(0))
    memory = MemoryTier(64 * CHUNK_BYTES, name="below")
    tier = FaultyTier(memory, fault)
    world = make_world(16, [tier])
    try:
        for _ in range(2):
            world.engine.submit([chunk_key("a")])
            for _ in range(4):
                world.engine.step()
            tier.await_hung(1)
            memory.raise_epoch()  # another engine
            world.engine.step()
    finally:
        world.close()
    counters = world.counters
    assert counters.stored_chunks == 2
    assert counters.declined_chunks["below", "before_reset"] >= 1


@pytest.mark.parametrize("is_full", [False, True], ids=["hung", "hung, then full"])
def test_a_close_that_leaves_writes_behind_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    """Writes that fail or never began are booked after the tier is closed, without asking it."""
    disk = DiskTier(
        str(tmp_path),
        name="below",
        namespace=Namespace({"test": "level"}),
        capacity_bytes=64 << 20,
        clock=SystemClock(),
    )
    full = Injector(Effect.FULL, on_index(0) if is_full else lambda _call: False)
    tier = FaultyTier(FaultyTier(disk, full), Injector(Effect.HANG, on_verb("write_from")))
    limits = Limits(shutdown_deadline_s=60.0)
    world = make_world(16, [tier], limits=limits, num_threads=1)
    for label in "abcd":
        world.engine.submit([chunk_key(label)])
        for _ in range(4):
            world.engine.step()
    tier.await_hung(1)
    flush, transfers = world.hierarchy._flush, world.hierarchy.levels[0].transfers
    end_queued = transfers._end_queued

    def end_queued_then_release(*args: Any) -> None:
        end_queued(*args)
        tier.release()

    soon_s = world.clock.now_s() + 0.1
    monkeypatch.setattr(world.hierarchy, "_flush", lambda _deadline_s: flush(soon_s))
    monkeypatch.setattr(transfers, "_end_queued", end_queued_then_release)
    world.hierarchy.close()
    with pytest.raises(TierClosed):
        disk.has(chunk_key("a"))
    assert full.num_fired == int(is_full)
    assert world.counters.dropped_chunks["below", "closed"] == 3
    assert world.counters.evicted_chunks.total() == 0
    assert not world.hierarchy.levels[0].has(chunk_key("a"))
    world.assert_quiet()
    world.hierarchy.close()
