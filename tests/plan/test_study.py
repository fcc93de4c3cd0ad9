"""What two levels find follows from what one finds at each size, by the real simulator."""

from __future__ import annotations

import pytest
from tests.plan.traces import BLOCK, BLOCK_TOKENS, SHAPE, TOKEN_BYTES, drive, sessions, study_of

from undercroft.errors import ConfigError
from undercroft.plan.kinds import Kind
from undercroft.plan.shape import Layers, Shape
from undercroft.plan.study import block_bytes, check, replay
from undercroft.sim import hit_curve
from undercroft.traces import TraceBuilder

TRACE = sessions()
HOSTS = [8 * BLOCK, 32 * BLOCK, 64 * BLOCK]
DISKS = [0, 16 * BLOCK, 128 * BLOCK, 1024 * BLOCK]


def test_levels_are_what_the_simulator_finds() -> None:
    """Host memory what it finds alone; both what the larger finds; the optimum above them."""
    study = study_of(TRACE, HOSTS, DISKS)

    def ratio(policy: str, num_bytes: int) -> float:
        (hits,) = hit_curve(TRACE, policy, [num_bytes // BLOCK])
        return hits.token_hit_ratio

    for host in HOSTS:
        for disk in DISKS:
            levels = study.levels(host, disk)
            assert levels.host_ratio == ratio("lru", host)
            assert levels.ratio == pytest.approx(ratio("lru", max(host, disk)))
            assert levels.ratio <= levels.optimum_ratio + 1e-12
            if not disk:
                assert (levels.disk_ratio, levels.written_bytes) == (0, 0)
    assert study.levels(HOSTS[0], DISKS[-1]).ratio == study.limit.token_hit_ratio


def test_bytes_and_seconds() -> None:
    """Written are all blocks that were not there; read those that were on disk only."""
    study = study_of(TRACE, HOSTS, DISKS)
    levels = study.levels(HOSTS[0], DISKS[-1])
    assert study.all_bytes == TRACE.num_blocks * BLOCK
    # Everything fits: each block is written once.
    assert levels.written_bytes == pytest.approx(study.all_bytes / study.seconds * 86400)
    (small,) = hit_curve(TRACE, "lru", [8])
    (large,) = hit_curve(TRACE, "lru", [1024])
    read = (large.hit_blocks - small.hit_blocks) * BLOCK
    assert levels.read_bytes_per_s == pytest.approx(read / study.seconds)
    assert levels.saved_s == pytest.approx(large.hit_tokens / 1000.0 / study.seconds)
    assert study.longest_bytes == 18 * BLOCK
    assert study.disk_worth == pytest.approx(1 - 1000 * TOKEN_BYTES / 1e6)
    assert study_of(TRACE, HOSTS, DISKS, disk_bytes_per_s=100.0).disk_worth == 0


def test_a_trace_lasts_as_long_as_most_of_it() -> None:
    """Evenly spread it is its length; one straggler a week later changes next to nothing."""
    builder = TraceBuilder("late", BLOCK_TOKENS)
    for number in range(1000):
        builder.add([number], time_ms=number * 1000)
    study = study_of(builder.build(), [BLOCK], [0])
    assert study.seconds == pytest.approx(999, rel=0.01)
    builder.add(["late"], time_ms=7 * 86_400_000)
    assert study_of(builder.build(), [BLOCK], [0]).seconds == pytest.approx(1000, rel=0.01)


def test_ends_of_prompts_are_shared_out() -> None:
    """A window and a state for each request that brings something new; each prompt's part of it."""
    builder = TraceBuilder("two", BLOCK_TOKENS)
    builder.add([1, 2, 3, 4], time_ms=0)
    builder.add([1, 2, 3, 4], time_ms=1)
    builder.add([1, 2, 5, 6], time_ms=2)
    shape = Shape(
        (
            Layers(Kind.ATTENTION, 1, 10),
            Layers(Kind.WINDOW, 1, 7, window_tokens=32),
            Layers(Kind.STATE, 1, state_bytes=1000),
        ),
        "bfloat16",
    )
    assert block_bytes(builder.build(), shape) == 16 * 10 + 2 * (32 * 7 + 1000) / 6
    short = Shape((Layers(Kind.WINDOW, 1, 7, window_tokens=4096),), "bfloat16")
    assert block_bytes(builder.build(), short) == 2 * 64 * 7 / 6


def test_where_everything_fits_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any policy then finds what unlimited room does: the dear ones are spared that."""
    asked = []

    def noting(trace: object, policy: str, capacities: list[int], **more: object) -> object:
        asked.append((policy, list(capacities)))
        return hit_curve(trace, policy, capacities, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("undercroft.plan.study.hit_curve", noting)
    each = block_bytes(TRACE, SHAPE)
    done: list[None] = []
    sizes = [8 * BLOCK, TRACE.num_blocks * BLOCK, 10**9]
    curve = replay(TRACE, "arc", sizes, each, lambda: done.append(None))
    assert asked == [("arc", [8]), ("unbounded", [TRACE.num_blocks, 10**9 // BLOCK])]
    assert len(done) == len(curve.rows) == 3
    (all_fits,) = hit_curve(TRACE, "arc", [TRACE.num_blocks])
    assert curve.at(sizes[1]).hit_blocks == all_fits.hit_blocks
    assert curve.at(sizes[1]).num_stored == all_fits.num_stored


def test_a_size_below_a_block_is_refused() -> None:
    """It would be no cache at all."""
    with pytest.raises(ConfigError, match="less than one block"):
        replay(TRACE, "lru", [BLOCK - 1, 8 * BLOCK], block_bytes(TRACE, SHAPE), lambda: None)


@pytest.mark.parametrize(("policy", "points"), [("lru", 0.01), ("hazard", 0.04)])
def test_the_whole_hierarchy_finds_what_is_foreseen(policy: str, points: float) -> None:
    """Pool, cascade, promotion and two policies: as much found and written, within so much.

    That the larger level alone decides what both find is what the planner rests on. A policy that
    learns sees other requests on each level than it would alone.
    """
    trace = sessions(60, 12)
    hosts, disks = [40 * BLOCK, 160 * BLOCK], [0, 320 * BLOCK, 4096 * BLOCK]
    study = study_of(trace, hosts, disks, policies=(policy,))
    for host in hosts:
        for disk in disks:
            levels = study.levels(host, disk)
            report = check(study, levels, drive())
            found = [each.hit_tokens / report.num_tokens for each in report.levels]
            assert found[0] == pytest.approx(levels.host_ratio, abs=points)
            assert sum(found) == pytest.approx(levels.ratio, abs=points)
            if disk:
                written = report.levels[1].num_written * BLOCK / study.seconds * 86400
                assert written == pytest.approx(levels.written_bytes, rel=0.03)


def test_the_whole_hierarchy_knows_a_slow_disk() -> None:
    """The control: what a disk cannot take is not found, and the check says so."""
    trace = sessions(60, 12)
    study = study_of(trace, [40 * BLOCK], [0, 4096 * BLOCK])
    levels = study.levels(40 * BLOCK, 4096 * BLOCK)
    slow = check(study, levels, drive(write_bytes_per_s=0.02 * levels.written_bytes / 86400))
    assert slow.hit_tokens / slow.num_tokens < levels.ratio - 0.1
    assert slow.levels[1].num_declined > 0
