"""A trace's columns are the requests, whatever they were made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import trace_of

from undercroft.errors import ConfigError
from undercroft.traces import TraceBuilder

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30)


@given(PATHS)
def test_blocks_are_the_prefixes_in_order_of_first_appearance(paths):
    """Two requests share a block if and only if they share everything up to it."""
    ids: dict[tuple[int, ...], int] = {}
    expected = [
        [ids.setdefault(tuple(path[: n + 1]), len(ids)) for n in range(len(path))] for path in paths
    ]
    trace = trace_of(paths)
    assert list(trace.iter_blocks()) == expected
    assert [trace.blocks(i) for i in range(trace.num_requests)] == expected
    assert trace.num_blocks == len(ids)
    assert trace.num_references == sum(map(len, paths))
    assert trace.lengths.tolist() == list(map(len, paths))
    assert trace.last.tolist() == [path[-1] if path else -1 for path in expected]
    depth = {block: n for path in expected for n, block in enumerate(path)}
    assert trace.depth.tolist() == [depth[block] for block in range(len(ids))]


def test_columns_are_what_was_added():
    """Types and values; `first_new` is the next id even where nothing is new."""
    builder = TraceBuilder("t", 16)
    builder.add("ab", time_ms=5, input_tokens=20, output_tokens=7, session=3, kind=2)
    builder.add("a", time_ms=5)
    builder.add("", time_ms=6, input_tokens=3)
    trace = builder.build()
    builder.add("abc", time_ms=7)
    found = {
        name: (getattr(trace, name).tolist(), str(getattr(trace, name).dtype))
        for name in trace.__dataclass_fields__
        if name not in ("name", "block_tokens")
    }
    assert found == {
        "parent": ([-1, 0], "int32"),
        "times_ms": ([5, 5, 6], "int64"),
        "sessions": ([3, -1, -1], "int32"),
        "kinds": ([2, 0, 0], "int16"),
        "input_tokens": ([20, 16, 3], "int64"),
        "output_tokens": ([7, 0, 0], "int64"),
        "deepest": ([-1, 0, -1], "int32"),
        "first_new": ([0, 2, 2], "int32"),
        "num_new": ([2, 0, 0], "int32"),
    }


def test_tokens_of_a_prefix_count_the_tail_as_far_as_it_is_filled():
    """Full blocks count whole; the last of a request only what the request has of it."""
    builder = TraceBuilder("t", 16)
    builder.add("abc", time_ms=0, input_tokens=40)  # the third has 8 tokens
    builder.add("ab", time_ms=0, input_tokens=33)  # a token beyond its blocks
    trace = builder.build()
    assert trace.tokens_in(np.array([2, 1])).tolist() == [32, 16]
    assert trace.tokens_in(np.array([3, 2])).tolist() == [40, 32]
    assert trace.tokens_in(np.array([0, 0])).tolist() == [0, 0]


def test_full_blocks_leaves_out_what_is_partly_filled():
    """Blocks are numbered anew; all else stays."""
    builder = TraceBuilder("t", 16)
    builder.add("abc", time_ms=1, input_tokens=40, session=4)
    builder.add("abd", time_ms=2, input_tokens=48, output_tokens=5, kind=3)
    builder.add("x", time_ms=2, input_tokens=15)
    trace = builder.build().full_blocks()
    assert list(trace.iter_blocks()) == [[0, 1], [0, 1, 2], []]
    assert trace.input_tokens.tolist() == [40, 48, 15]
    assert (trace.times_ms.tolist(), trace.sessions.tolist()) == ([1, 2, 2], [4, -1, -1])
    assert (trace.output_tokens.tolist(), trace.kinds.tolist()) == ([0, 5, 0], [0, 3, 0])


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ((2, 0, 9), "block 2 is none of the 2"),
        ((-2, 0, 9), "block -2"),
        ((0, -1, 9), "-1 new blocks"),
        ((0, 1 << 24 | 1, 9), "new blocks"),
        ((0, 1, 4), "4 ms, is before 5 ms"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(path, what):
    """A message names the number; the builder is as before."""
    builder = TraceBuilder("t", 16)
    builder.add("ab", time_ms=5)
    with pytest.raises(ValueError, match=what):
        builder.add_path(path[0], path[1], time_ms=path[2], input_tokens=1)
    with pytest.raises(ValueError, match="too large"):
        builder.add_path(0, 1, time_ms=6, input_tokens=1, kind=1 << 15)
    builder.add("abc", time_ms=5)
    trace = builder.build()
    assert list(trace.iter_blocks()) == [[0, 1], [0, 1, 2]]
    assert trace.times_ms.tolist() == [5, 5]


def test_a_block_has_tokens():
    """Else nothing could be counted in tokens."""
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        TraceBuilder("t", 0)


def test_an_empty_trace_is_one():
    """No column is missing."""
    trace = TraceBuilder("t", 16).build()
    assert (trace.num_requests, trace.num_blocks, trace.num_references) == (0, 0, 0)
    assert list(trace.iter_blocks()) == []
