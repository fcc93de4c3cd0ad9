from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.engines.vllm.copy import STEP_BYTES, Span, copy_pages, copy_pages_singly
from undercroft.errors import Bug


def _copy(way: Any, page_bytes: Any, target_offsets: Any, source_offsets: Any, size: Any) -> Any:
    """Run a copy and the obvious one beside it; return both targets and the bytes reported."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, size, np.uint8)
    target = rng.integers(0, 256, size, np.uint8)
    expected = target.copy()
    for to, of in zip(target_offsets.ravel(), source_offsets.ravel(), strict=True):
        expected[to : to + page_bytes] = source[of : of + page_bytes]
    steps = list(way(Span.of(target), target_offsets, Span.of(source), source_offsets, page_bytes))
    return target, expected, steps


@st.composite
def _jobs(draw: Any) -> Any:
    page_bytes = draw(st.sampled_from([1, 7, 64, 100, 2048, 30_000]))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    count, places = rows * columns, 2 * rows * columns
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sides = []
    for _ in range(2):
        pattern = draw(st.sampled_from(["even", "backwards", "random", "transposed"]))
        if pattern == "random":
            places_taken = rng.permutation(places)[:count]
        elif pattern == "backwards":
            places_taken = np.arange(count)[::-1]
        elif pattern == "transposed":
            places_taken = np.arange(count).reshape(columns, rows).T.ravel()
        else:
            places_taken = np.arange(count)
        sides.append((places_taken.astype(np.int64) * page_bytes).reshape(rows, columns))
    return page_bytes, sides[0], sides[1], places * page_bytes


@pytest.mark.parametrize("way", [copy_pages, copy_pages_singly])
@settings(max_examples=60, deadline=None)
@given(job=_jobs())
def test_it_copies_those_pages_and_nothing_else(way: Any, job: Any) -> None:
    """Whatever the pattern of addresses, the target differs in exactly the named pages."""
    page_bytes, to, of, size = job
    target, expected, steps = _copy(way, page_bytes, to, of, size)
    assert np.array_equal(target, expected)
    assert sum(steps) == to.size * page_bytes


@pytest.mark.parametrize("way", [copy_pages, copy_pages_singly])
@pytest.mark.parametrize("side", ["target", "source"])
@pytest.mark.parametrize("bad", [-1, 4096 - 63])
def test_an_offset_outside_is_refused_before_anything_is_copied(
    way: Any, side: Any, bad: Any
) -> None:
    """A page that would reach past either end raises `Bug`; the target is as it was."""
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    good, wrong = np.array([[0, 64]]), np.array([[0, bad]])
    to, of = (wrong, good) if side == "target" else (good, wrong)
    with pytest.raises(Bug, match="outside"):
        list(way(Span.of(target), to, Span.of(source), of, 64))
    assert not target.any()


def test_no_pages_is_nothing() -> None:
    """An empty job copies nothing and ends at once."""
    none = np.empty((0, 3), np.int64)
    _, _, steps = _copy(copy_pages, 64, none, none, 128)
    assert steps == []


@pytest.mark.parametrize("spread", [1, 3])
def test_a_big_copy_comes_in_steps(spread: Any) -> None:
    """No step copies more than twice `STEP_BYTES`, so that others get their turn."""
    page_bytes = 64 << 10
    count = 5 * STEP_BYTES // page_bytes // 2
    rng = np.random.default_rng(0)
    places = rng.permutation(count) if spread > 1 else np.arange(count)
    offsets = (places * page_bytes)[:, None].astype(np.int64)
    target, expected, steps = _copy(copy_pages, page_bytes, offsets, offsets, count * page_bytes)
    assert np.array_equal(target, expected)
    assert len(steps) >= 2
    assert max(steps) <= 2 * STEP_BYTES
