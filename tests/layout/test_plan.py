from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import Bug, LayoutMismatch
from undercroft.layout.plan import (
    GroupGeometry,
    PageRef,
    TensorGeometry,
    fragments,
    pair_load,
    pair_store,
    place,
)


def _i64(*values: Any) -> Any:
    return np.array(values, np.int64)


@st.composite
def _store_tables(draw: Any) -> Any:
    """Chunks as a scheduler may hand them over: some blocks gone, never a chunk's last one."""
    bpc = draw(st.integers(1, 4))
    first_chunk = draw(st.integers(0, 5))
    kept = st.lists(st.booleans(), min_size=bpc - 1, max_size=bpc - 1)
    chunks = draw(st.lists(kept, min_size=1, max_size=5))
    return bpc, first_chunk, [[*chunk, True] for chunk in chunks]


@settings(max_examples=300)
@given(_store_tables())
def test_a_store_is_paired_only_when_there_is_one_way(table: Any) -> None:
    """A pairing, when given, is the true one; none is given only if some later block is gone."""
    bpc, first_chunk, chunks = table
    present = [(c, p) for c, chunk in enumerate(chunks) for p in range(bpc) if chunk[p]]
    first_index = first_chunk * bpc + present[0][1]
    position = pair_store(len(present), first_index, len(chunks), bpc)
    holes_after_first = len(chunks) * bpc - present[0][1] - len(present)
    assert (position is None) == (holes_after_first > 0)
    if position is not None:
        places = place(np.arange(len(present)), np.arange(len(chunks)), position, bpc)
        assert list(zip(places.slot_offsets, places.positions, strict=True)) == present


@pytest.mark.parametrize(
    ("num_blocks", "first_index", "num_chunks", "bpc"),
    [(5, 0, 2, 2), (4, 1, 2, 2), (1, 0, 2, 2), (0, 0, 1, 1), (1, 0, 0, 3)],
)
def test_a_store_that_cannot_be_is_a_bug(
    num_blocks: Any, first_index: Any, num_chunks: Any, bpc: Any
) -> None:
    """More blocks than places, or fewer than chunks, cannot come from a scheduler."""
    with pytest.raises(Bug, match="store of"):
        pair_store(num_blocks, first_index, num_chunks, bpc)


@settings(max_examples=200)
@given(st.integers(1, 4), st.integers(0, 20), st.integers(1, 20))
def test_a_load_starts_and_ends_anywhere_in_its_chunks(
    bpc: Any, first_index: Any, num_blocks: Any
) -> None:
    """Each block gets the chunk and position of its logical index."""
    indices = range(first_index, first_index + num_blocks)
    chunks = sorted({index // bpc for index in indices})
    position = pair_load(num_blocks, first_index, len(chunks), bpc)
    places = place(np.arange(num_blocks), np.array(chunks), position, bpc)
    assert places.slot_offsets.tolist() == [index // bpc for index in indices]
    assert places.positions.tolist() == [index % bpc for index in indices]
    for wrong in (len(chunks) - 1, len(chunks) + 1):
        with pytest.raises(Bug, match="load of"):
            pair_load(num_blocks, first_index, wrong, bpc)


def test_nothing_to_load_is_fine() -> None:
    """A group that a load skips has no blocks and no chunks."""
    assert pair_load(0, 7, 0, 4) == 0
    assert pair_store(0, 0, 0, 4) == 0


def test_the_stored_layout_by_hand() -> None:
    """Refs in order, each with the pages of all blocks of the chunk, without padding."""
    group = GroupGeometry((PageRef(1, 100), PageRef(0, 40), PageRef(1, 100)), 3)
    assert group.payload_bytes == 720
    assert group.ref_offsets == (0, 300, 420)
    assert list(group.unwritten_ranges(1000, 2)) == [(1000, 200), (1300, 80), (1420, 200)]
    assert list(group.unwritten_ranges(1000, 0)) == []
    tensors = [TensorGeometry(5000, 64, 10, 50), TensorGeometry(0, 128, 10, 100)]
    places = place(_i64(7, 2), _i64(4096, 8192), 2, 3)
    found = fragments(group, tensors, places, 8192 + 720)
    assert [pages.page_bytes for pages in found] == [100, 40]
    assert found[0].engine.tolist() == [[896, 896], [256, 256]]
    assert found[0].region.tolist() == [[4296, 4716], [8192, 8612]]
    assert found[1].engine.tolist() == [[5448], [5128]]
    assert found[1].region.tolist() == [[4476], [8492]]


@pytest.mark.parametrize(
    ("block_id", "slot_offset", "region_bytes"),
    [(-1, 0, 400), (10, 0, 400), (0, -8, 400), (0, 1, 400), (0, 0, 399)],
)
def test_nothing_outside_is_ever_named(block_id: Any, slot_offset: Any, region_bytes: Any) -> None:
    """A block outside its tensor and a chunk outside the region raise `Bug`."""
    group = GroupGeometry((PageRef(0, 200),), 2)
    places = place(_i64(block_id), _i64(slot_offset), 0, 2)
    with pytest.raises(Bug, match=r"region|block ids"):
        fragments(group, [TensorGeometry(0, 200, 10, 200)], places, region_bytes)


@pytest.mark.parametrize(("refs", "bpc"), [((), 1), ((PageRef(0, 0),), 1), ((PageRef(0, 8),), 0)])
def test_an_impossible_layout_is_refused(refs: Any, bpc: Any) -> None:
    """No pages, empty pages and empty chunks are refused when the geometry is made."""
    with pytest.raises(LayoutMismatch):
        GroupGeometry(refs, bpc)
