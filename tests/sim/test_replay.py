"""A replay gives a policy what an engine would give it."""

from typing import ClassVar

import pytest
from trace_files import trace_of

from undercroft import plugins
from undercroft.errors import ConfigError, UnknownPlugin
from undercroft.policies.base import Learning
from undercroft.policies.lru import Lru
from undercroft.sim import BOUNDS, check_policy, hit_curve
from undercroft.sim.moment import Moment
from undercroft.sim.replay import make_policy
from undercroft.traces import TraceBuilder


class Noting(Lru):
    """LRU that writes down what it is told."""

    made: ClassVar[list["Noting"]] = []

    def __init__(self, capacity_chunks, clock):
        super().__init__(capacity_chunks)
        self.clock, self.told = clock, []
        self.made.append(self)

    def on_request(self, keys, now_s, kind=0):
        self.told.append(("request", [key[-1] for key in keys], now_s, kind, self.clock.now_s()))

    def on_insert(self, key):
        self.told.append(("insert", key[-1]))
        super().on_insert(key)

    def on_hit(self, key):
        self.told.append(("hit", key[-1]))
        super().on_hit(key)

    def on_evict(self, key):
        self.told.append(("evict", key[-1]))
        super().on_evict(key)


@pytest.fixture
def noting(monkeypatch):
    """A policy as plug-ins give it."""
    find = plugins.find
    monkeypatch.setattr(
        plugins, "find", lambda kind, name: Noting if name == "noting" else find(kind, name)
    )
    Noting.made.clear()
    return Noting.made


def test_a_learning_policy_is_told_of_each_request_before_its_blocks(noting):
    """At its time, with its kind, root first; then deepest first, and full blocks only."""
    builder = TraceBuilder("t", 16)
    builder.add("abc", time_ms=1500, kind=2)
    builder.add("abx", time_ms=2500, input_tokens=40)
    builder.add("y", time_ms=2500)
    (hits,) = hit_curve(builder.build(), "noting", [3])
    assert isinstance(noting[0], Learning)
    assert noting[0].told == [
        ("request", [0, 1, 2], 1.5, 2, 1.5),
        ("insert", 2),
        ("insert", 1),
        ("insert", 0),
        ("request", [0, 1], 2.5, 0, 2.5),  # the third is partly filled
        ("hit", 1),
        ("hit", 0),
        ("request", [4], 2.5, 0, 2.5),
        ("evict", 2),
        ("insert", 4),
    ]
    assert (hits.num_references, hits.hit_blocks) == (7, 2)
    assert (hits.num_tokens, hits.hit_tokens) == (48 + 40 + 16, 32)
    assert (hits.num_stored, hits.num_evicted) == (4, 1)


def test_a_hit_is_the_longest_prefix_that_is_there(noting):
    """A resident block behind a hole is no hit, and is touched all the same."""

    class Rootless(Noting):
        """Evicts roots first."""

        def victims(self):
            return iter(sorted(super().victims()))

    noting.clear()
    policy_of = {"rootless": Rootless}
    trace = trace_of(["abc", "x", "abc"])
    with pytest.MonkeyPatch.context() as patch:
        find = plugins.find
        patch.setattr(plugins, "find", lambda kind, name: policy_of.get(name) or find(kind, name))
        (hits,) = hit_curve(trace, "rootless", [3])
    assert hits.hit_blocks == 0
    assert noting[0].told[-4:] == [("hit", 2), ("hit", 1), ("evict", 1), ("insert", 0)]


@pytest.mark.parametrize("policy", ["lru", "arc", *BOUNDS])
def test_counts_of_a_warm_start_leave_the_beginning_out(policy):
    """What was stored before is found, and not counted."""
    trace = trace_of(["abc", "abd", "abc", "xyz"])
    (all_of_it,) = hit_curve(trace, policy, [20])
    (rest,) = hit_curve(trace, policy, [20], num_warm=2)
    assert (all_of_it.num_requests, rest.num_requests) == (4, 2)
    assert (all_of_it.num_references, rest.num_references) == (12, 6)
    assert (all_of_it.hit_blocks, rest.hit_blocks) == (5, 3)
    assert (all_of_it.hit_tokens, rest.hit_tokens) == (80, 48)
    assert rest.num_stored == (0 if policy == "belady" else 3)
    (none,) = hit_curve(trace, policy, [20], num_warm=4)
    assert (none.num_references, none.num_stored, none.block_hit_ratio) == (0, 0, 0.0)


def test_a_policy_gets_what_it_takes():
    """Capacity always; the clock if it asks for one."""
    moment = Moment()
    for name in plugins.names("policies"):
        assert make_policy(name, 7, moment).name == name


def test_wrong_questions_are_refused_before_any_work():
    """A policy that is not there, no capacity, a warm start longer than the trace."""
    trace = trace_of(["ab"])
    with pytest.raises(UnknownPlugin, match="did you mean 'lru'"):
        hit_curve(trace, "lrv", [1])
    with pytest.raises(UnknownPlugin):
        check_policy("nothing")
    for name in (*BOUNDS, "arc", "lru"):
        check_policy(name)
        with pytest.raises(ConfigError, match="a capacity is 0 blocks"):
            hit_curve(trace, name, [1, 0])
        with pytest.raises(ConfigError, match="2 requests are to be warm"):
            hit_curve(trace, name, [1], num_warm=2)


def test_each_capacity_that_is_done_is_told():
    """For a line that shows progress."""
    for name in ("lru", "arc", *BOUNDS):
        done = iter(range(4))
        hit_curve(trace_of(["ab"]), name, [1, 2, 3], on_capacity=done.__next__)
        assert next(done) == 3
