"""Hits by level, tokens, and what they saved: counted where the engine's calls pass."""

import pytest
from rig import running
from shapes import Group, prompt

from undercroft.engines.vllm.tally import Pace, Tally
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.stores import StorePlan
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock

TEN_CHUNKS = {"host": "80KiB", "max_queued_write_bytes": "1MiB"}
BLOCK_TOKENS = 16


# --- the pace ---


def step(pace, clock, seconds, tokens):
    pace.step_began()
    if tokens:
        pace.computed(tokens)
    clock.advance(seconds)
    pace.step_ended()


def test_the_pace_is_time_over_tokens_of_the_steps_that_computed_some():
    """Decodes between two prefills are no part of it."""
    clock = ManualClock()
    pace = Pace(clock)
    step(pace, clock, 5.0, 0)
    assert pace.seconds_per_token is None
    step(pace, clock, 1.0, 1000)
    for _ in range(50):
        step(pace, clock, 0.5, 0)
    step(pace, clock, 1.0, 1000)
    assert pace.seconds_per_token == pytest.approx(0.001)


def test_the_pace_follows_the_engine():
    """After thirty steps of another speed the old one is as good as forgotten."""
    clock = ManualClock()
    pace = Pace(clock)
    for _ in range(10):
        step(pace, clock, 1.0, 1000)
    for _ in range(30):
        step(pace, clock, 4.0, 1000)
    assert pace.seconds_per_token == pytest.approx(0.004, rel=0.05)


def test_steps_that_overlap_are_not_timed_twice():
    """With async scheduling the next step is scheduled while one runs: 1 s each, not 2."""
    clock = ManualClock()
    pace = Pace(clock)
    pace.step_began()
    pace.computed(1000)
    for _ in range(20):
        pace.step_began()
        pace.computed(1000)
        clock.advance(1.0)
        pace.step_ended()
    assert pace.seconds_per_token == pytest.approx(0.001)


def test_an_engine_that_never_ends_its_steps_costs_nothing():
    """What is kept is bounded, and ends that come unasked are ignored."""
    pace = Pace(ManualClock())
    for _ in range(1000):
        pace.step_began()
    assert len(pace._steps) <= 8
    for _ in range(1000):
        pace.step_ended()


# --- hits and tokens, in the engine's calls ---


def settled(rig, tokens):
    job = rig.run(tokens)
    rig.settle()
    return job


def observed(rig, name, *labels):
    """What was sent to the API process for that histogram."""
    name = f"vllm:undercroft_{name}"
    found = [stats.data["data"].get(name, {}).get(labels, []) for stats in rig.stats]
    return [seconds for each in found for seconds in each]


def test_hits_are_of_the_level_they_came_from(tmp_path):
    """Ten chunks fit host memory: what was pushed out comes from disk, and is counted there."""
    tiers = [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "name": "nvme"}]
    with running({**TEN_CHUNKS, "tiers": tiers}) as rig:
        counters = rig.hierarchy.counters
        settled(rig, prompt(1, 96))
        settled(rig, prompt(1, 96))
        host = 96 // BLOCK_TOKENS
        assert counters.hit_chunks == {"host": host}
        assert counters.hit_tokens == {"host": host * BLOCK_TOKENS}
        for label in (2, 3, 4):
            settled(rig, prompt(label, 160))
        settled(rig, prompt(1, 96))
        assert counters.hit_chunks == {"host": host, "nvme": 6}
        assert counters.hit_tokens == {"host": 96, "nvme": 96}
        assert sum(counters.hit_chunks.values()) == counters.loaded_chunks
        rig.step()
        assert len(observed(rig, "restore_wait_seconds")) == 1
        assert len(observed(rig, "load_seconds")) == 2
        assert len(observed(rig, "store_seconds")) >= 4
        assert len(observed(rig, "promote_seconds", "nvme")) == 6
        assert observed(rig, "cascade_seconds", "nvme")


def test_tokens_of_several_groups_are_counted_once():
    """A window's chunks span tokens that the full group's span already."""
    groups = (Group(), Group(window=32))
    with running({"host": "640KiB"}, groups=groups) as rig:
        settled(rig, prompt(1, 160))
        settled(rig, prompt(1, 160))
        counters = rig.hierarchy.counters
        assert counters.hit_chunks["host"] > 160 // BLOCK_TOKENS
        assert counters.hit_tokens == {"host": 160}


def tally(clock, tokens_per_chunk=(16,)):
    counters = Counters()
    return counters, Tally(counters, clock, tokens_per_chunk)


def keys(count, start=0):
    return [ChunkKey(bytes([start + i]) * 36) for i in range(count)]


def prefill(made, clock, num_chunks, seconds, *, is_whole=True):
    made.pace.step_began()
    plan = StorePlan(keys(num_chunks), list(range(num_chunks)), 1, is_whole)
    made.store_began("r", plan, (num_chunks,))
    clock.advance(seconds)
    made.pace.step_ended()
    made.store_ended("r", set(plan.keys))


def test_saved_seconds_are_tokens_at_the_pace_of_then():
    """320 tokens a second: ten chunks of 16 tokens save half a second."""
    clock = ManualClock()
    counters, made = tally(clock)
    prefill(made, clock, 20, 1.0)
    made.load_began(Request("a"), keys(10), (10,), has_waited=False)
    assert counters.saved_prefill_seconds == {"host": pytest.approx(0.5)}


def test_hits_before_the_first_prefill_are_priced_later():
    """The first request after a restart hits; what it saved is known with the next prefill."""
    clock = ManualClock()
    counters, made = tally(clock)
    request = Request("a")
    request.promoted = dict.fromkeys(keys(10), "disk")
    made.load_began(request, keys(10), (10,), has_waited=False)
    assert counters.saved_prefill_seconds == {}
    prefill(made, clock, 20, 1.0)
    made.load_began(Request("b"), keys(1), (1,), has_waited=False)
    assert counters.saved_prefill_seconds["disk"] == pytest.approx(0.5)


def test_a_decode_that_fills_a_chunk_is_no_prefill():
    """Nor is a step whose chunks were not all taken: its tokens are not known."""
    clock = ManualClock()
    _, made = tally(clock)
    prefill(made, clock, 1, 1.0)
    prefill(made, clock, 10, 1.0, is_whole=False)
    assert made.pace.seconds_per_token is None


def test_stores_end_in_any_order_and_a_reset_forgets_them():
    """Each is timed by itself; after a reset no end is told, and none is awaited."""
    clock = ManualClock()
    counters, made = tally(clock)
    first, second = keys(2), keys(2, start=10)
    for number, planned in enumerate((first, second)):
        made.store_began("r", StorePlan(planned, [0, 1], number, is_whole=True), (2,))
        clock.advance(1.0)
    made.store_ended("r", set(second))
    made.store_ended("r", set(first))
    assert counters.store_seconds.take() == {"": [1.0, 2.0]}
    made.store_began("r", StorePlan(first, [0, 1], 3, is_whole=True), (2,))
    made.load_began(Request("r"), first, (2,), has_waited=False)
    made.reset()
    made.store_ended("r", set(first))
    made.load_ended("r")
    assert not counters.store_seconds.take()
    assert not counters.load_seconds.take()
