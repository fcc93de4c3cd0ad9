"""Requests as hypothesis makes them: paths in small trees that share prefixes and come again."""

import random

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


def turns(num_requests: int, seed: int) -> Trace:
    """Sessions whose kind says whether they come back, a minute or so later: half of all turns."""
    rng = random.Random(seed)
    builder = TraceBuilder("turns", 16)
    coming: list[tuple[int, str, int]] = []
    time_ms = 0
    for number in range(num_requests):
        time_ms += rng.randrange(500, 1500)
        if coming and rng.random() < 0.5 and coming[0][0] <= time_ms:
            _, session, length = coming.pop(0)
        else:
            session, length = f"s{number}", 0
        length += rng.randrange(4, 9)
        ends = rng.random() < 0.5
        keys = [f"{session}.{n}" for n in range(length)]
        builder.add(keys, time_ms=time_ms, kind=int(ends))
        if not ends:
            coming.append((time_ms + rng.randrange(60_000, 90_000), session, length))
            coming.sort()
    return builder.build()
