"""One pass gives exactly what replaying LRU at each capacity gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CAPACITIES, chats, keys_of, traces

from undercroft.policies.lru import Lru
from undercroft.sim import hit_curve
from undercroft.sim.moment import Moment
from undercroft.sim.replay import replay
from undercroft.testing.policy_replay import replay as count_misses


@settings(max_examples=40)
@given(traces(), st.integers(0, 40))
def test_one_pass_equals_replays(trace, num_warm):
    """Every count, at every capacity, warm start or not."""
    num_warm = min(num_warm, trace.num_requests)
    curve = hit_curve(trace, "lru", CAPACITIES, num_warm=num_warm)
    replayed = [
        replay(trace, Lru(capacity), capacity, moment=Moment(), num_warm=num_warm)
        for capacity in CAPACITIES
    ]
    assert curve == replayed


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_equals_the_other_replay(seed):
    """Written apart, it shares nothing with the simulator but the policy."""
    trace = chats(600, seed)
    capacities = [1, 7, 30, 100, 300, 1000, 3000]
    for hits in hit_curve(trace, "lru", capacities):
        capacity = hits.capacity_blocks
        misses = count_misses(Lru(capacity), keys_of(trace), capacity)
        assert hits.hit_blocks == trace.num_references - misses


@settings(max_examples=40)
@given(traces())
def test_hits_never_fall_with_capacity(trace):
    """LRU is a stack algorithm."""
    hits = [row.hit_blocks for row in hit_curve(trace, "lru", CAPACITIES)]
    assert hits == sorted(hits)
