"""No policy beats `belady`, and nothing beats `unbounded`."""

from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CAPACITIES, chats, keys_of, traces

from undercroft import plugins
from undercroft.sim import hit_curve
from undercroft.testing.policy_replay import replay_belady


def stores_and_evictions(trace, capacity, num_warm):
    """Belady with bypass, block by block: blocks that come in and go."""
    paths = list(trace.iter_blocks())
    held: dict[int, tuple[int, int]] = {}
    num_stored = num_evicted = 0
    for now, path in enumerate(paths):
        before = set(held)
        for depth, block in enumerate(path):
            held.pop(block, None)
            later = [n for n in range(now + 1, len(paths)) if block in paths[n]]
            if later:
                held[block] = (later[0], depth)
        held = dict(sorted(held.items(), key=lambda item: item[1])[:capacity])
        if now >= num_warm:
            num_stored += len(held.keys() - before)
            num_evicted += len(before - held.keys())
    return num_stored, num_evicted


@settings(max_examples=40)
@given(traces(), st.integers(0, 40))
def test_belady_is_the_optimum_block_by_block(trace, num_warm):
    """Hits, tokens, stores and evictions, as a slow and obvious program counts them."""
    num_warm = min(num_warm, trace.num_requests)
    keys = keys_of(trace)
    for row in hit_curve(trace, "belady", CAPACITIES, num_warm=num_warm):
        capacity = row.capacity_blocks
        stores = stores_and_evictions(trace, capacity, num_warm)
        assert (row.num_stored, row.num_evicted) == stores
        if num_warm == 0:
            assert row.hit_blocks == trace.num_references - replay_belady(keys, capacity)


@settings(max_examples=10)
@given(traces())
def test_no_policy_beats_belady(trace):
    """In blocks; none of those that are installed."""
    no_better_than_belady(trace, [1, 4, 12])


def test_no_policy_beats_belady_at_chats():
    """The same with requests as they are."""
    no_better_than_belady(chats(150, 5), [10, 40, 160])


def no_better_than_belady(trace, capacities):
    best = [row.hit_blocks for row in hit_curve(trace, "belady", capacities)]
    for name in plugins.names("policies"):
        found = [row.hit_blocks for row in hit_curve(trace, name, capacities)]
        assert all(mine <= most for mine, most in zip(found, best, strict=True)), name


def test_belady_meets_unbounded_where_everything_fits():
    """Each block is stored once, and found ever after."""
    trace = chats(300, 2)
    (best,) = hit_curve(trace, "belady", [trace.num_blocks])
    (all_of_it,) = hit_curve(trace, "unbounded", [1])
    assert best.hit_blocks == all_of_it.hit_blocks == trace.num_references - trace.num_blocks
    assert all_of_it.num_stored == trace.num_blocks
    assert all_of_it.num_evicted == 0
    assert all_of_it.capacity_blocks == trace.num_blocks
