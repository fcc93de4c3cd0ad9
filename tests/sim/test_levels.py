"""Several levels: the production hierarchy on a clock that jumps, without bytes."""

import itertools
import logging
import threading

import pytest
from paths import chats
from trace_files import trace_of

from undercroft.errors import ConfigError, UnknownPlugin
from undercroft.sim import LevelPlan, Service, hit_curve, simulate
from undercroft.sim.levels import LEVEL_0
from undercroft.traces import TraceBuilder

TOKEN_BYTES = 1000
BLOCK_BYTES = 16 * TOKEN_BYTES


def spaced(requests, gap_ms=10_000):
    """Requests so far apart that everything between them has ended."""
    builder = TraceBuilder("spaced", 16)
    for number, keys in enumerate(requests):
        builder.add(keys, time_ms=number * gap_ms)
    return builder.build()


@pytest.mark.parametrize("policy", ["lru"])
@pytest.mark.parametrize("capacity", [40, 150, 600])
def test_one_level_gets_what_the_curve_says(policy, capacity):
    """Where no request is as large as the level, the hierarchy comes to the same hits."""
    trace = chats(400, 3)
    report = simulate(trace, [LevelPlan("host", capacity, policy)])
    (hits,) = hit_curve(trace, policy, [capacity])
    (host,) = report.levels
    assert abs(host.hit_blocks - hits.hit_blocks) <= 0.01 * hits.num_references
    assert report.num_references == trace.num_references
    assert host.num_read == host.hit_blocks
    assert host.num_written - host.num_evicted <= capacity


def test_two_levels_hit_what_one_as_large_as_the_lower_would():
    """Everything is copied down, so host memory only decides where a hit is found."""
    trace = spaced([list(keys) for keys in ("abcd", "efgh", "ijkl", "abcd", "mnop", "efgh")])
    plans = [LevelPlan("host", 4), LevelPlan("disk", 100)]
    report = simulate(trace, plans, bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=100)
    host, disk = report.levels
    assert (host.hit_blocks, disk.hit_blocks) == (0, 8)
    assert report.block_hit_ratio == 8 / 24
    assert (disk.num_read, disk.num_written, disk.num_evicted) == (8, 16, 0)
    assert (host.num_written, host.num_distinct_written) == (24, 16)
    assert host.write_amplification == 1.5
    assert disk.hit_tokens == 128
    assert disk.hit_bytes == 8 * BLOCK_BYTES
    assert disk.saved_prefill_s == report.saved_prefill_s == 1.28
    assert report.token_hit_ratio == 128 / 384


@pytest.mark.parametrize(("read_s", "waited_s"), [(0.1, 0.4), (0.05, 0.2)])
def test_requests_wait_for_reads(read_s, waited_s):
    """One after the other, as fast as the device is; the latency once."""
    trace = spaced(["abcd", "efgh", "abcd"])
    service = Service(latency_s=0.01, read_bytes_per_s=BLOCK_BYTES / read_s)
    plans = [LevelPlan("host", 4), LevelPlan("disk", 100, service=service)]
    report = simulate(trace, plans, bytes_per_token=TOKEN_BYTES)
    assert report.levels[1].hit_blocks == 4
    assert waited_s + 0.01 <= report.waited_s <= waited_s + 0.01 + 0.06  # and steps of 20 ms


def test_what_is_too_slow_is_computed():
    """A read that cannot begin in time is a miss; the request does not wait for ever."""
    trace = spaced(["abcd", "efgh", "abcd"], gap_ms=1_000_000)
    service = Service(read_bytes_per_s=BLOCK_BYTES / 60.0)
    plans = [LevelPlan("host", 4), LevelPlan("disk", 100, service=service)]
    report = simulate(trace, plans, bytes_per_token=TOKEN_BYTES)
    assert report.hit_blocks == 0
    assert 0 < report.waited_s < 10


def test_a_slow_disk_does_not_get_everything():
    """Chunks that leave host memory before their turn are counted as declined."""
    trace = trace_of([[f"{n}.{m}" for m in range(8)] for n in range(50)])
    service = Service(write_bytes_per_s=BLOCK_BYTES)  # a block a second, of eight
    plans = [LevelPlan("host", 16), LevelPlan("disk", 1000, service=service)]
    report = simulate(trace, plans, bytes_per_token=TOKEN_BYTES)
    disk = report.levels[1]
    assert 50 <= disk.num_written <= 100
    assert disk.num_declined >= 400 - disk.num_written
    assert disk.num_distinct_written == disk.num_written


def test_a_lower_level_evicts_too():
    """By its policy, never above its bound."""
    trace = spaced([[f"{n}.{m}" for m in range(8)] for n in range(20)])
    plans = [LevelPlan("host", 16), LevelPlan("disk", 40, policy="arc")]
    disk = simulate(trace, plans).levels[1]
    assert disk.num_written == 160
    assert 120 <= disk.num_evicted <= 130  # a few more are evicted ahead of need


def test_admission_is_asked():
    """What is offered once is not written to a level that wants to see it twice."""
    trace = spaced(["abcd", "efgh", "abcd", "abcd"])
    plans = [LevelPlan("host", 4), LevelPlan("disk", 100, admission="frequency")]
    disk = simulate(trace, plans).levels[1]
    assert disk.num_written == 4
    assert disk.num_declined == 8


def test_a_warm_start_is_not_counted():
    """Requests, references, hits, writes: all begin where it ends."""
    trace = spaced(["abcd", "efgh", "abcd", "ijkl"])
    plans = [LevelPlan("host", 4), LevelPlan("disk", 100)]
    report = simulate(trace, plans, num_warm=2)
    host, disk = report.levels
    assert (report.num_requests, report.num_references, report.num_tokens) == (2, 8, 128)
    assert (disk.num_read, disk.num_written, host.num_written) == (4, 4, 8)
    none = simulate(trace, plans, num_warm=4)
    assert none.num_references == none.hit_blocks == none.levels[0].num_written == 0
    assert (none.block_hit_ratio, none.token_hit_ratio) == (0.0, 0.0)


def test_partly_filled_blocks_are_not_stored():
    """As in an engine."""
    builder = TraceBuilder("t", 16)
    for time_ms in (0, 1):
        builder.add("ab", time_ms=time_ms, input_tokens=20)
    report = simulate(builder.build(), [LevelPlan("host", 10)])
    assert (report.num_references, report.hit_blocks) == (2, 1)
    assert report.levels[0].num_written == 1


def test_two_runs_are_alike():
    """No thread, no clock of the machine, nothing random."""
    trace = chats(150, 9)
    service = Service(0.001, 100 * BLOCK_BYTES, 20 * BLOCK_BYTES)
    plans = [LevelPlan("host", 60), LevelPlan("disk", 300, "arc", service=service)]
    num_threads = threading.active_count()
    first, second = itertools.starmap(simulate, [(trace, plans)] * 2)
    assert first == second
    assert threading.active_count() == num_threads


def test_operators_are_not_told_of_a_simulation(caplog):
    """What would be a warning of an engine is a number of the report."""
    trace = trace_of([[f"{n}.{m}" for m in range(8)] for n in range(50)])
    service = Service(write_bytes_per_s=BLOCK_BYTES)
    with caplog.at_level(logging.DEBUG):
        simulate(trace, [LevelPlan("host", 16), LevelPlan("disk", 1000, service=service)])
    assert not caplog.records
    logging.getLogger("undercroft.hierarchy.level").warning("heard again")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("plans", "num_warm", "what"),
    [
        ([], 0, "no level to simulate"),
        ([LevelPlan("host", 0)], 0, "level host has room for 0 blocks"),
        ([LevelPlan("a", 1), LevelPlan(LEVEL_0, 1)], 0, "different names, not host, host"),
        ([LevelPlan("host", 1)], 2, "2 requests are to be warm, but the trace has 1"),
    ],
)
def test_wrong_plans_are_refused(plans, num_warm, what):
    """Before any work, with what is wrong."""
    with pytest.raises(ConfigError, match=what):
        simulate(trace_of(["ab"]), plans, num_warm=num_warm)


def test_wrong_plug_ins_are_named():
    """Policies and admissions are those that an engine would find."""
    with pytest.raises(UnknownPlugin, match="'lrv'"):
        simulate(trace_of(["ab"]), [LevelPlan("host", 9, "lrv")])
    with pytest.raises(UnknownPlugin, match="'sometimes'"):
        simulate(trace_of(["ab"]), [LevelPlan("host", 9, admission="sometimes")])
