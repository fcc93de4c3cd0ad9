from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.engines.vllm import copy as copy_module
from undercroft.engines.vllm.copy import STEP_BYTES, Span, copy_pages, copy_pages_singly
from undercroft.errors import Bug
from undercroft.layout.plan import GroupGeometry, PageRef, TensorGeometry, fragments, place


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


def _chunks(page_bytes: Any, num_refs: Any, per_chunk: Any, *, gap: Any = 0, **how: Any) -> Any:
    """Offsets in engine and region of blocks and slots in random order, and the bytes of both.

    Args:
        gap: Bytes between two engine tensors.
        how: `first`, the position of the first block in its chunk; `hole`, a block to leave out;
            `seed`.
    """
    rng = np.random.default_rng(how.get("seed", 0))
    num_chunks = 5
    num_blocks = 2 * num_chunks * per_chunk
    group = GroupGeometry(tuple(PageRef(ref, page_bytes) for ref in range(num_refs)), per_chunk)
    tensor_bytes = num_blocks * page_bytes + gap
    tensors = [
        TensorGeometry(ref * tensor_bytes, page_bytes, num_blocks, page_bytes)
        for ref in range(num_refs)
    ]
    slots = rng.permutation(2 * num_chunks)[:num_chunks] * (group.payload_bytes + 64)
    first = how.get("first", 0)
    blocks = rng.permutation(num_blocks)[: num_chunks * per_chunk - first]
    places = place(blocks, slots, first, per_chunk)
    if "hole" in how:
        kept = np.arange(len(blocks)) != how["hole"]
        places = type(places)(*(values[kept] for values in places))
    region_bytes = 2 * num_chunks * (group.payload_bytes + 64)
    (pages,) = fragments(group, tensors, places, region_bytes)
    return pages, max(region_bytes, tensor_bytes * num_refs)


_SHAPES = {
    "a block a chunk": {"page_bytes": 2048, "num_refs": 24, "per_chunk": 1},
    "tensors apart": {"page_bytes": 2048, "num_refs": 24, "per_chunk": 1, "gap": 64},
    "blocks a chunk": {"page_bytes": 2048, "num_refs": 6, "per_chunk": 8},
    "one tensor": {"page_bytes": 4096, "num_refs": 1, "per_chunk": 8},
    "begins inside": {"page_bytes": 4096, "num_refs": 5, "per_chunk": 8, "first": 5},
    "with a hole": {"page_bytes": 4096, "num_refs": 5, "per_chunk": 8, "hole": 11},
    "odd pages": {"page_bytes": 3001, "num_refs": 7, "per_chunk": 4, "gap": 5},
    "big pages": {"page_bytes": 48 << 10, "num_refs": 5, "per_chunk": 3},
    "small chunks": {"page_bytes": 64, "num_refs": 3, "per_chunk": 2},
}


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_chunks_of_an_aged_engine_are_copied_whole(shape: Any, seed: Any, is_store: Any) -> None:
    """Blocks and slots in random order, both ways: what page by page copies, and nothing else."""
    pages, size = _chunks(**shape, seed=seed)
    to, of = (pages.region, pages.engine) if is_store else (pages.engine, pages.region)
    target, expected, steps = _copy(copy_pages, pages.page_bytes, to, of, size)
    assert np.array_equal(target, expected)
    assert sum(steps) == to.size * pages.page_bytes


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ("a block a chunk", "_copy_runs"),
        ("big pages", "_copy_runs"),
        ("one tensor", "_copy_tiles"),
        ("small chunks", "_copy_tiles"),
    ],
)
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_the_way_of_copying_follows_the_pages(
    monkeypatch: pytest.MonkeyPatch, shape: Any, way: Any, is_store: Any
) -> None:
    """Runs where they are long, tiles for small pages without any."""
    taken = []
    for name in ("_copy_runs", "_copy_tiles"):
        real = getattr(copy_module, name)

        def spy(*args: Any, name: Any = name, real: Any = real) -> Any:
            taken.append(name)
            return real(*args)

        monkeypatch.setattr(copy_module, name, spy)
    pages, size = _chunks(**_SHAPES[shape])
    to, of = (pages.region, pages.engine) if is_store else (pages.engine, pages.region)
    _copy(copy_pages, pages.page_bytes, to, of, size)
    assert taken == [way]


@pytest.mark.parametrize("page_bytes", [2048, 30_000])
def test_one_page_may_be_copied_to_many_places(page_bytes: Any) -> None:
    """Two blocks read from one place: a source that does not advance at all."""
    to = np.arange(24, dtype=np.int64)[:, None] * page_bytes
    of = np.full((24, 1), 3 * page_bytes, np.int64)
    target, expected, _ = _copy(copy_pages, page_bytes, to, of, 24 * page_bytes)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("side", ["target", "source"])
def test_tensors_that_lie_far_apart_in_the_address_space(side: Any) -> None:
    """Heap and mappings are 2^45 bytes apart: too far for one array of big rows, not for a copy."""
    page_bytes = 512 << 10
    to, of = np.array([[0, 2], [1, 3]]) * page_bytes, np.array([[3, 1], [0, 2]]) * page_bytes
    source = np.random.default_rng(1).integers(0, 256, 4 * page_bytes, np.uint8)
    target = np.zeros(4 * page_bytes, np.uint8)
    spans = {"source": Span.of(source), "target": Span.of(target)}
    array = {"source": source, "target": target}[side]
    spans[side] = Span(array.ctypes.data, 1 << 45, (array,))
    steps = list(copy_pages(spans["target"], to, spans["source"], of, page_bytes))
    pages = source.reshape(4, page_bytes)
    assert np.array_equal(target.reshape(4, page_bytes), pages[[3, 0, 1, 2]])
    assert sum(steps) == 4 * page_bytes
