"""What an operator sees of a level in trouble: each sign is there, and goes away again."""

import os
import signal

import pytest
from worlds import CHUNK_BYTES, made_worlds, make_world

from tests.tiers.disk.support import disk
from tests.tiers.disk.test_disk_mover import Level0, read, wait_for_process, write
from undercroft.clock import SystemClock
from undercroft.engines.vllm.metrics import PREFIX, StepStats
from undercroft.engines.vllm.tally import Pace
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)


def take_all(stats):
    """The readings of one step: name without prefix and labels to value."""
    taken = stats.take()
    found = taken.data["data"] if taken else {}
    return {
        (name.removeprefix(PREFIX), *labels): value
        for name, by_labels in found.items()
        for labels, value in by_labels.items()
    }


def test_a_dead_disk_is_seen(worlds):
    """Every sign of it: breaker, retries, drops; and the all-clear when it works again."""
    clock = ManualClock()
    injector = Injector(Effect.ERROR, on_verb("write_from"))
    tier = FaultyTier(MemoryTier(1 << 20, name="disk"), injector)
    world = make_world(64, [tier], clock=clock, transfer_limits=TransferLimits(retry_pause_s=0.0))
    worlds.append(world)
    stats = StepStats(world.hierarchy, Pace(clock))
    seen = take_all(stats)
    assert seen["breaker_state", "disk", "closed"] == 1
    assert seen["breaker_openings", "disk"] == 0
    assert seen["dropped_chunks", "disk", "unavailable"] == 0
    for label in "abcdefgh":
        world.engine.run([chunk_key(label)])
        world.wait_for_tiers()
        world.engine.step()
    seen = take_all(stats)
    assert seen["breaker_state", "disk", "open"] == 1
    assert seen["breaker_state", "disk", "closed"] == 0
    assert seen["breaker_openings", "disk"] == 1
    assert seen["level_usable", "disk"] == 0
    assert seen["transfer_retries", "disk"] >= 5
    assert seen["dropped_chunks", "disk", "unavailable"] >= 5
    assert seen["declined_chunks", "disk", "unavailable"] >= 1


def test_a_disk_that_hangs_is_seen(worlds):
    """Threads in it, what waits behind them and the budget it uses; then who came back late."""
    clock = ManualClock()
    injector = Injector(Effect.HANG, on_verb("write_from"))
    tier = FaultyTier(MemoryTier(1 << 20, name="disk"), injector)
    budget = 8 * CHUNK_BYTES
    world = make_world(
        64, [tier], clock=clock, num_threads=1, max_queued_write_bytes=budget, write_deadline_s=1.0
    )
    worlds.append(world)
    stats = StepStats(world.hierarchy, Pace(clock))
    world.engine.run([chunk_key(f"a{i}") for i in range(20)])
    tier.await_hung(1)
    world.engine.step()
    seen = take_all(stats)
    assert seen["max_queued_write_bytes", "disk"] == budget
    assert 0 < seen["queued_write_bytes", "disk"] <= budget
    assert (
        seen["queued_chunks", "disk", "write"] == seen["queued_write_bytes", "disk"] / CHUNK_BYTES
    )
    assert seen["running_transfers", "disk"] == 1
    assert seen["waiting_chunks", "disk"] >= 20 - 8 - 1
    assert seen["stuck_threads", "disk"] == 0
    clock.advance(1.5)
    world.engine.step()
    assert take_all(stats)["stuck_threads", "disk"] >= 1
    tier.release()
    world.wait_for_tiers()
    world.engine.step()
    seen = take_all(stats)
    assert seen["stuck_threads", "disk"] == 0
    assert seen["late_transfers", "disk"] >= 1


def test_a_mover_process_that_ends_is_seen(worlds, tmp_path):
    """That one moves the bytes, that it does no more, and how many ended, through any wrapper."""
    level_0 = Level0()
    inner = disk(tmp_path, mover_process=True, memory=level_0.memory)
    assert inner.await_mover(60)
    world = make_world(64, [FaultyTier(inner)])
    worlds.append(world)
    stats = StepStats(world.hierarchy, Pace(SystemClock()))
    seen = take_all(stats)
    assert seen["mover_process_up", "disk"] == 1
    assert seen["mover_deaths", "disk"] == 0
    os.kill(wait_for_process(inner), signal.SIGKILL)
    inner._mover._child._process.wait()
    assert read(inner, level_0, range(4)) == [False] * 4
    assert write(inner, level_0, range(4)) == [True] * 4
    seen = take_all(stats)
    assert seen["mover_process_up", "disk"] == 0
    assert seen["mover_deaths", "disk"] == 1
    world.close()
    worlds.remove(world)
    level_0.close()
