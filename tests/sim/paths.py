"""Requests as hypothesis makes them: paths in small trees that share prefixes and come again."""

from hypothesis import strategies as st
from trace_files import trace_of

from undercroft.keys import ChunkKey
from undercroft.testing.policy_replay import generate_trace
from undercroft.traces import Trace, TraceBuilder

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=40)
CAPACITIES = [1, 2, 3, 5, 9, 16]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Some requests have a partly filled last block, or fewer tokens than blocks."""
    builder = TraceBuilder("drawn", 16)
    for number, path in enumerate(draw(PATHS)):
        lacking = draw(st.sampled_from([0, 0, 0, 1, 15, 16, 40]))
        tokens = max(0, 16 * len(path) - lacking)
        builder.add(path, time_ms=number * 500, input_tokens=tokens, kind=number % 4)
    return builder.build()


def chats(num_requests: int, seed: int) -> Trace:
    """The requests of `testing.policy_replay`, as a trace."""
    return trace_of(generate_trace(num_requests, seed))


def keys_of(trace: Trace) -> list[list[ChunkKey]]:
    """Each request's blocks as keys, root first."""
    return [[ChunkKey(b.to_bytes(8, "big")) for b in path] for path in trace.iter_blocks()]
