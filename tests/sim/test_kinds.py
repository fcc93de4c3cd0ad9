"""Both simulators tell a policy that learns the same, how requests ended among it."""

import pytest
from paths import turns

from undercroft import plugins
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.sim import LevelPlan, Service, hit_curve, simulate
from undercroft.traces import TraceBuilder


@pytest.mark.parametrize("seed", [1, 2])
def test_one_level_alone_and_the_hierarchy_agree_with_kinds_and_without(seed):
    """What kinds are worth, too: here about half of all hits."""
    trace, capacity = turns(2000, seed), 600
    found = {}
    for kinds, told in (("all", trace), ("none", trace.without_kinds())):
        (alone,) = hit_curve(told, "hazard", [capacity])
        report = simulate(told, [LevelPlan("host", capacity, "hazard")])
        assert abs(alone.block_hit_ratio - report.block_hit_ratio) < 0.015
        found[kinds] = report.block_hit_ratio
    assert found["all"] > found["none"] + 0.1


class Noting(Hazard):
    """Hazard that writes down what it is told."""

    told: list[tuple[list[bytes], int]]

    def __init__(self, capacity_chunks, known=None):
        super().__init__(capacity_chunks, known)
        self.told = []
        MADE.append(self)

    def on_request(self, keys, now_s, kind=0, num_told=0):
        self.told.append((list(keys), kind))
        super().on_request(keys, now_s, kind, num_told)


MADE: list[Noting] = []


@pytest.fixture
def noting(monkeypatch):
    """A policy as plug-ins give it."""
    find = plugins.find
    monkeypatch.setattr(
        plugins, "find", lambda group, name: Noting if name == "noting" else find(group, name)
    )
    MADE.clear()
    return MADE


def test_both_tell_of_the_same_requests(noting):
    """All full blocks of each, of one that is larger than host memory too, and its kind."""
    builder = TraceBuilder("t", 16)
    for number, path in enumerate(["abc", "abx", "defghijk", "", "abc"]):
        builder.add(path, time_ms=number * 1000, kind=number % 4, input_tokens=16 * len(path))
    builder.add("abz", time_ms=9000, input_tokens=40)  # the third is partly filled
    trace = builder.build()
    hit_curve(trace, "noting", [5])
    simulate(trace, [LevelPlan("host", 5, "noting"), LevelPlan("disk", 9, "noting")])
    alone, host, disk = noting
    assert [len(keys) for keys, _ in host.told] == [3, 3, 8, 3, 2]
    assert [kind for _, kind in host.told] == [0, 1, 2, 0, 0]
    assert host.told == disk.told == [each for each in alone.told if each[0]]


def test_levels_share_what_they_know(noting):
    """One table, as large as an engine's, and not one for each level."""
    plans = [
        LevelPlan("host", 100, "noting"),
        LevelPlan("disk", 5000, "noting", service=Service(read_bytes_per_s=1e9)),
    ]
    simulate(turns(50, 3), plans)
    host, disk = noting
    assert host.known is disk.known
    assert host.known.num_rows == KnownPrefixes.for_chunks(100, 5000).num_rows


def test_without_kinds_nothing_else_is_lost():
    """Requests, blocks, times."""
    trace = turns(50, 4)
    less = trace.without_kinds()
    assert trace.kinds.any()
    assert not less.kinds.any()
    assert list(less.iter_blocks()) == list(trace.iter_blocks())
    assert less.times_ms.tolist() == trace.times_ms.tolist()
