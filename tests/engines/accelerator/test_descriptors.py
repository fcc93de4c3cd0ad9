"""Pages become few copies that move the same bytes, none over a border of registered memory."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.engines.accelerator.descriptors import copies
from undercroft.layout.plan import Fragments


def _pages(page_bytes: int, engine: Any, region: Any) -> Fragments:
    return Fragments(page_bytes, np.array(engine, np.int64), np.array(region, np.int64))


def _moved(pages: Fragments, **limits: int) -> tuple[dict[int, int], list[int]]:
    """Which engine byte goes with which region byte, and the lengths of the batches."""
    pairs: dict[int, int] = {}
    lengths = []
    for batch in copies(pages, **limits):
        lengths.append(len(batch.sizes))
        for engine, region, size in zip(*(values.tolist() for values in batch), strict=True):
            assert size > 0
            assert region // limits["piece_bytes"] == (region + size - 1) // limits["piece_bytes"]
            for byte in range(size):
                assert region + byte not in pairs
                pairs[region + byte] = engine + byte
    return pairs, lengths


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_copies_move_the_bytes_of_the_pages(data: Any) -> None:
    """Whatever is merged or cut, each byte of each page moves once, to its place."""
    page = data.draw(st.integers(1, 9))
    num_blocks, num_refs = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    order = rng.permutation if data.draw(st.booleans()) else np.arange
    shape = (num_refs, num_blocks)
    engine = (order(num_refs * num_blocks).reshape(shape) * page + 1000).T
    region = (order(num_refs * num_blocks).reshape(shape) * page + rng.integers(0, 9)).T
    pages = _pages(page, engine, region)
    limits = {
        "piece_bytes": data.draw(st.integers(1, 40)),
        "max_copies": data.draw(st.integers(1, 5)),
    }
    pairs, lengths = _moved(pages, **limits)
    wanted = {
        int(region[i, j]) + byte: int(engine[i, j]) + byte
        for i in range(num_blocks)
        for j in range(num_refs)
        for byte in range(page)
    }
    assert pairs == wanted
    assert all(length <= limits["max_copies"] for length in lengths)


def test_blocks_in_a_row_become_one_copy_a_layer() -> None:
    """Four consecutive blocks of a chunk in two layers: two copies."""
    blocks = np.arange(4)[:, None] * 64
    pages = _pages(64, blocks + np.array([0, 10_000]), blocks + np.array([0, 256]))
    (batch,) = copies(pages, piece_bytes=1 << 20, max_copies=100)
    assert batch.sizes.tolist() == [256, 256]
    assert batch.engine.tolist() == [0, 10_000]
    assert batch.region.tolist() == [0, 256]


def test_a_merged_copy_is_cut_at_a_border() -> None:
    """A page over a border becomes two copies, one at each side."""
    (batch,) = copies(_pages(64, [[7]], [[100]]), piece_bytes=128, max_copies=100)
    assert batch.sizes.tolist() == [28, 36]
    assert batch.region.tolist() == [100, 128]
    assert batch.engine.tolist() == [7, 35]
