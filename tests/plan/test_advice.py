"""The setting that is recommended, and the command that does it."""

from __future__ import annotations

import re

import pytest
from tests.plan.traces import BLOCK, SHAPE, drive, sessions, study_of

from undercroft.cli.flags import asked_for
from undercroft.cli.main import build_parser
from undercroft.cli.plan_text import advice_lines, studied
from undercroft.plan.advice import Advice, advise, knee, net_a_month, serve_words, unfit
from undercroft.plan.study import Levels
from undercroft.plan.terms import Drive, Prices
from undercroft.traces import TraceBuilder

GIB, TIB = 1 << 30, 1 << 40
TRACE = sessions(40, 10)
HOSTS = [8 * BLOCK, 32 * BLOCK, 128 * BLOCK, 512 * BLOCK]
DISKS = [0, 128 * BLOCK, 512 * BLOCK, 2048 * BLOCK]


@pytest.mark.parametrize(
    ("points", "index"),
    [
        ([(1, 0.1)], 0),
        ([(1, 0.1), (2, 0.2), (4, 0.21), (8, 0.215)], 1),
        ([(1, 0.1), (2, 0.1), (4, 0.1), (8, 0.3)], 3),
        ([(1, 0.1), (1.1, 0.11), (8, 0.12)], 1),
        ([(1, 0.1), (16, 0.17)], 0),
        ([(1, 0.1), (16, 0.19)], 1),
    ],
)
def test_the_knee(points: list[tuple[float, float]], index: int) -> None:
    """Beyond it no doubling adds two points; what is flat at first may still rise."""
    assert knee(points) == index


def test_what_brings_more_than_it_costs_is_taken() -> None:
    """With all prices the best net; checked against every setting."""
    study = study_of(TRACE, HOSTS, DISKS)
    prices = Prices(host=1e-3, disk=1e-5, engine=1e-4, years=5.0)
    advice = advise(study, drive(), prices)
    nets = [
        net_a_month(study.levels(host, disk), prices)
        for host in HOSTS
        if host >= study.longest_bytes
        for disk in DISKS
    ]
    assert advice.net_a_month == max(nets)
    assert "what it costs by most" in advice.why
    dear = Prices(host=1e6, disk=1e6, engine=1e-9, years=5.0)
    assert advise(study, drive(), dear).levels.disk_bytes == 0
    assert advise(study, drive(), dear).levels.host_bytes == 32 * BLOCK  # holds the longest prompt


def test_without_prices_it_is_the_knee() -> None:
    """No setting that costs up to twice as much brings two points more."""
    study = study_of(TRACE, HOSTS, DISKS)
    best = advise(study, drive(), Prices()).levels

    def cost(levels: Levels) -> float:
        return 40 * levels.host_bytes + levels.disk_bytes

    def value(levels: Levels) -> float:
        return levels.host_ratio + study.disk_worth * levels.disk_ratio

    for host in HOSTS[1:]:
        for disk in DISKS:
            other = study.levels(host, disk)
            if cost(best) < cost(other) <= 2 * cost(best):
                assert value(other) - value(best) < 0.02
            if cost(other) <= cost(best):
                assert value(other) <= value(best)


def test_a_disk_that_would_not_last_is_not_advised() -> None:
    """The advice keeps to the rating, and says what a drive of more endurance would find."""
    study = study_of(TRACE, HOSTS, DISKS)
    free = advise(study, drive(), Prices())
    assert free.levels.disk_bytes > 0
    assert (free.wear, free.budget_bytes, free.better, free.complaint) == (None, None, None, "")
    held = advise(study, drive("0.01DWPD"), Prices())
    assert held.levels.disk_bytes == 0
    assert held.better is not None
    assert held.better.ratio > held.levels.ratio + 0.02
    assert re.fullmatch(r"be written [\d.]+ times what 0.01DWPD allows", held.complaint)
    lasting = advise(study, drive("100000DWPD"), Prices())
    assert lasting.levels == free.levels
    assert lasting.wear is not None
    assert 0 < lasting.wear < 0.9
    assert lasting.budget_bytes == int(0.9 * 100000 * lasting.levels.disk_bytes)
    # Only disks were asked about, and none lasts: the best of them, and by how much it does not.
    only = advise(study_of(TRACE, HOSTS, DISKS[1:]), drive("0.01DWPD"), Prices())
    assert only.levels.disk_bytes > 0
    assert only.wear is not None
    assert only.wear > 1


def test_a_disk_that_is_too_slow_to_take_it_is_not_advised() -> None:
    """What it cannot write is not there: half of what it takes at most, as traffic is not even."""
    study = study_of(TRACE, HOSTS, DISKS)
    free = advise(study, drive(), Prices())
    per_s = free.levels.written_bytes / 86400
    enough = advise(study, drive(write_bytes_per_s=2.01 * per_s), Prices())
    assert enough.levels == free.levels
    slow = advise(study, drive(write_bytes_per_s=0.5 * per_s), Prices())
    assert slow.levels.disk_bytes == 0
    assert "a second on average" in slow.complaint


def test_a_disk_that_is_too_slow_to_be_read_is_not_advised() -> None:
    """What comes from disk has to come through it: more host memory, or none of it."""
    study = study_of(TRACE, HOSTS, DISKS)
    prices = Prices(host=1e-6, disk=1e-9, engine=1e-1, years=5.0)
    free = advise(study, drive(), prices).levels
    assert free.read_bytes_per_s > 0
    enough = Drive(2.01 * free.read_bytes_per_s, 1e12)
    assert advise(study, enough, prices).levels == free
    slow = Drive(1.99 * free.read_bytes_per_s, 1e12)
    assert "gives at most (--disk-read)" in unfit(free, slow)
    other = advise(study, slow, prices).levels
    assert other != free
    assert unfit(other, slow) == ""
    assert other.read_bytes_per_s < free.read_bytes_per_s


def test_what_was_not_asked_about_is_not_said_to_be_worth_little() -> None:
    """At the end of the range: how much more there is at most, as unlimited room finds it."""
    small = study_of(TRACE, HOSTS[:2], [0])
    advice = advise(small, drive(), Prices())
    assert advice.levels.host_bytes == HOSTS[1]
    most = small.limit.token_hit_ratio - advice.levels.host_ratio
    assert advice.not_asked == {"host": pytest.approx(most)}
    assert most > 0.02
    assert "only setting" in advice.why  # the other is smaller than the longest prompt
    both = study_of(TRACE, HOSTS[:2], DISKS[:2])
    assert advise(both, drive(), Prices()).not_asked.keys() <= {"host", "disk"}
    assert "disk" in advise(both, drive(), Prices()).not_asked
    large = study_of(TRACE, [*HOSTS, 8192 * BLOCK], [0])
    assert advise(large, drive(), Prices()).not_asked == {}


def test_where_nothing_comes_again_the_least_is_advised() -> None:
    """And it is said that no size finds anything, with prices that no cache is worth them."""
    builder = TraceBuilder("new", 16)
    for number in range(60):
        builder.add([f"{number}-{n}" for n in range(4)], time_ms=number * 1000)
    study = study_of(builder.build(), HOSTS, DISKS)
    advice = advise(study, drive(), Prices())
    assert (advice.levels.host_bytes, advice.levels.disk_bytes) == (HOSTS[0], 0)
    assert advice.not_asked == {}
    assert "hardly anything comes again" in studied(study, SHAPE, "m")[-1]
    prices = Prices(host=1e-3, disk=1e-5, engine=1e-4, years=5.0)
    lines = advice_lines(advise(study, drive(), prices), drive(), prices)
    assert lines[-1].endswith("more than it saves: by these prices no cache is worth it")


def test_of_equals_the_smallest() -> None:
    """Room beyond all that there is brings nothing."""
    study = study_of(TRACE, HOSTS, DISKS)
    size = 1 << (study.trace.num_blocks * BLOCK).bit_length()
    equal = study_of(TRACE, [size, 2 * size, 4 * size], [0, 8 * size])
    for prices in (Prices(), Prices(host=1e-9, disk=1e-9, engine=1.0)):
        levels = advise(equal, drive(), prices).levels
        assert (levels.host_bytes, levels.disk_bytes) == (size, 0)


def advised(host: int, disk: int, budget: int | None = None) -> Advice:
    return Advice(Levels(host, disk, 0.5, 0.1, 0.7, 1.0, 0.0, 0.0), "", budget_bytes=budget)


@pytest.mark.parametrize(
    ("advice", "host", "disk", "budget"),
    [
        (advised(64 * GIB, 0), 64 * GIB, None, None),
        (advised(64 * GIB, 2 * TIB), 64 * GIB, 2 * TIB, None),
        (advised(100_000_000_001, 2 * TIB, 3 * TIB), 100_000_000_001, 2 * TIB, 3 * TIB),
        (advised(3 * GIB // 2, 7), 3 * GIB // 2, 7, None),
    ],
)
def test_the_command_does_what_is_advised(
    advice: Advice, host: int, disk: int | None, budget: int | None
) -> None:
    """As `undercroft serve` reads it: to the byte, policies and budget included."""
    words = serve_words(advice, "some/model", "arc", "/nvme/a folder")
    assert words[:3] == ["undercroft", "serve", "some/model"]
    args, rest = build_parser(("serve",)).parse_known_args(words[1:])
    args.words, args.rest = words[2:], rest
    assert rest == []
    asked = asked_for(args)
    assert asked.model == "some/model"
    settings = asked.settings()
    assert settings.host_bytes == host
    assert settings.policy == "arc"
    if disk is None:
        assert settings.tiers == ()
        return
    (tier,) = settings.tiers
    assert (tier.type, tier.capacity_bytes, tier.policy) == ("disk", disk, "arc")
    assert tier.options["path"] == "/nvme/a folder"
    assert tier.options.get("write_budget") == budget


def test_sizes_are_written_as_people_do() -> None:
    """Where that loses nothing."""
    words = serve_words(advised(64 * GIB, 2 * TIB), "m", "lru", "/kv")
    assert "64GiB" in words
    assert '"capacity": "2TiB"' in words[-1]
