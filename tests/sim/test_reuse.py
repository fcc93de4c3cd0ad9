"""Stretches say for every block of every request who used it last."""

from itertools import pairwise

from hypothesis import given, settings
from paths import chats, traces

from undercroft.sim.reuse import find_stretches


def last_uses(trace):
    """By request, of each block: the earlier request that used it last; None: new."""
    last: dict[int, int] = {}
    found = []
    for request, path in enumerate(trace.iter_blocks()):
        found.append([last.get(block) for block in path])
        last |= dict.fromkeys(path, request)
    return found


def spelled_out(trace):
    """The same, from the stretches."""
    found = [[None] * length for length in trace.lengths.tolist()]
    stretches = find_stretches(trace)
    for request, last, depth, size in zip(
        stretches.request.tolist(),
        stretches.last.tolist(),
        stretches.depth.tolist(),
        stretches.size.tolist(),
        strict=True,
    ):
        assert size > 0
        assert found[request][depth : depth + size] == [None] * size
        found[request][depth : depth + size] = [last] * size
    return found


@settings(max_examples=60)
@given(traces())
def test_stretches_are_the_last_uses(trace):
    """Compared with a dict that is asked block by block."""
    assert spelled_out(trace) == last_uses(trace)


@settings(max_examples=60)
@given(traces())
def test_stretches_are_as_long_as_can_be_and_in_order(trace):
    """By request, then deeper and deeper, each of an older user than the one before."""
    stretches = find_stretches(trace)
    rows = list(
        zip(
            stretches.request.tolist(),
            stretches.depth.tolist(),
            stretches.last.tolist(),
            strict=True,
        )
    )
    assert rows == sorted(rows, key=lambda row: row[:2])
    for (a, _, last), (b, _, following) in pairwise(rows):
        assert a != b or last > following


def test_a_chat_trace_has_few_stretches():
    """That is what makes one pass fast."""
    trace = chats(2000, 1)
    assert spelled_out(trace) == last_uses(trace)
    assert len(find_stretches(trace)) < 4 * trace.num_requests
