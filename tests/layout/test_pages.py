"""Pages of every kind of layer under every topology: proofs, and real bytes beside slices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import LayoutMismatch
from undercroft.layout.page_map import CopyRun, PageMap, check_ranks, coalesce, is_writer
from undercroft.layout.pages import HeadsPage, Order, heads_page, latent_page, opaque_page
from undercroft.layout.topology import Topology


@st.composite
def _topologies(draw: Any) -> Topology:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    dcp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    return Topology(
        tp, draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), dcp, draw(st.integers(1, 3))
    )


_PAGES = st.builds(
    HeadsPage,
    num_heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
    num_tokens=st.sampled_from([4, 6, 12]),
    element_bytes=st.integers(1, 5),
    order=st.sampled_from(Order),
    is_split=st.booleans(),
)


def _ordered(page: HeadsPage, elements: Any) -> bytes:
    """`(halves, heads, tokens, bytes)` in the page's order."""
    if page.order is Order.TOKENS:
        elements = elements.swapaxes(1, 2)
    return bytes(np.ascontiguousarray(elements).tobytes())


def _part(page: HeadsPage, topology: Topology, rank: int, whole: Any) -> Any:
    """A rank's elements, by slicing."""
    tp_rank = rank % topology.tp_size
    pcp_rank = rank // topology.tp_size % topology.pcp_size
    cp_rank = pcp_rank * topology.dcp_size + tp_rank % topology.dcp_size
    count = max(1, page.num_heads // topology.tp_size)
    first = tp_rank * page.num_heads // topology.tp_size
    by_turn = np.arange(page.num_tokens * topology.cp_size)
    if topology.cp_size > 1:
        turns = by_turn.reshape(-1, topology.cp_size, topology.interleave_tokens)
        by_turn = turns[:, cp_rank].ravel()
    return whole[:, first : first + count][:, :, by_turn]


def _scatter(part: PageMap, page: bytes, out: bytearray) -> None:
    for run in part.runs:
        for local, stored in run.fragments():
            out[stored : stored + run.fragment_bytes] = page[local : local + run.fragment_bytes]


def _gather(part: PageMap, stored_page: bytes) -> bytes:
    out = bytearray(part.local_bytes)
    for run in part.runs:
        for local, stored in run.fragments():
            out[local : local + run.fragment_bytes] = stored_page[
                stored : stored + run.fragment_bytes
            ]
    return bytes(out)


@settings(max_examples=200, deadline=None)
@given(_PAGES, _topologies())
def test_ranks_scatter_to_the_unsharded_page_and_gather_their_slice(
    page: HeadsPage, topology: Topology
) -> None:
    """Under every choice of writers; where it cannot be certified, the page stays as it is."""
    maps = [heads_page(page, topology, rank) for rank in range(topology.world_size)]
    if any(part.why and topology.cp_size == 1 for part in maps) or maps[0].is_whole:
        divides = page.num_heads % topology.tp_size == 0 or topology.tp_size % page.num_heads == 0
        copies = max(1, topology.tp_size // page.num_heads)
        is_shared = topology.cp_size > 1 and page.num_tokens % topology.interleave_tokens
        is_bound = not divides or copies % topology.dcp_size or is_shared
        whole = max(1, page.num_heads // topology.tp_size) == page.num_heads
        assert is_bound or (whole and topology.cp_size == 1)
        assert all(part.is_whole for part in maps)
        assert all(part.is_portable != bool(part.why) for part in maps)
        if is_bound:
            return
    stage = [maps[rank] for rank in topology.ranks_of_stage(topology.pp_size - 1)]
    check_ranks(stage)
    rng = np.random.default_rng(0)
    shape = (1 + page.is_split, page.num_heads, page.num_tokens * topology.cp_size)
    elements = rng.integers(0, 256, (*shape, page.element_bytes), np.uint8)
    whole_page = _ordered(dataclasses.replace(page), elements)
    local = {
        rank: _ordered(page, _part(page, topology, rank, elements))
        for rank in range(topology.world_size)
    }
    for turn in range(stage[0].num_writers):
        out = bytearray(b"\xaa" * stage[0].stored_bytes)
        for rank in topology.ranks_of_stage(topology.pp_size - 1):
            if is_writer(turn, maps[rank].num_writers, maps[rank].writer_index):
                _scatter(maps[rank], local[rank], out)
        assert bytes(out) == whole_page
    for rank, part in enumerate(maps):
        assert _gather(part, whole_page) == local[rank]
        assert part.is_portable == (topology.cp_size == 1)


def test_copies_are_as_few_as_the_bytes_allow() -> None:
    """Heads of tensor parallel ranks are one copy a page; rows by token one run of copies."""
    four = Topology(tp_size=4)
    by_head = heads_page(HeadsPage(8, 16, 64), four, 3)
    assert by_head.runs == (CopyRun(0, 6 * 1024, 2048, 1, 2048, 2048),)
    by_token = heads_page(HeadsPage(8, 16, 64, Order.TOKENS), four, 1)
    assert by_token.runs == (CopyRun(0, 128, 128, 16, 128, 512),)
    split = heads_page(HeadsPage(8, 16, 64, is_split=True), four, 0)
    assert split.runs == (CopyRun(0, 0, 2048, 2, 2048, 8192),)
    latent = latent_page(16, 576, four, 2)
    assert latent.runs == (CopyRun(0, 0, 9216, 1, 9216, 9216),)
    assert (latent.num_writers, latent.writer_index) == (4, 2)
    assert latent.is_whole
    assert latent.is_portable


def test_context_parallel_ranks_of_a_latent_share_out_its_tokens() -> None:
    """Two copies of four ranks: each half has every other token, and takes its turn."""
    topology = Topology(tp_size=4, dcp_size=2)
    maps = [latent_page(4, 10, topology, rank) for rank in range(4)]
    check_ranks(maps)
    assert [part.writer_index for part in maps] == [0, 0, 1, 1]
    assert maps[1].runs == (CopyRun(0, 10, 10, 4, 10, 20),)
    assert not maps[1].is_portable


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"local_bytes": 5}, "cover"),
        ({"local_bytes": 3}, "cover"),
        ({"stored_bytes": 5}, "outside"),
        ({"runs": (CopyRun(0, 0, 2, 1, 2, 2), CopyRun(2, 1, 2, 1, 2, 2))}, "overlap"),
        ({"runs": (CopyRun(0, 0, 2, 2, 1, 4),)}, "cover"),
        ({"runs": (CopyRun(0, -2, 4, 1, 4, 4),)}, "outside"),
        ({"runs": ()}, "cover"),
        ({"writer_index": 1}, "writer"),
    ],
)
def test_runs_that_lose_or_double_a_byte_are_refused(changed: Any, said: str) -> None:
    """Every page is proven when it is made."""
    good = PageMap(4, 8, (CopyRun(0, 0, 2, 2, 2, 4),))
    with pytest.raises(LayoutMismatch, match=said):
        dataclasses.replace(good, **changed)


def test_ranks_that_leave_a_hole_or_meet_are_refused() -> None:
    """For each turn the writers' bytes are the whole page, once."""

    def at(offset: int, **more: Any) -> PageMap:
        return PageMap(4, 8, (CopyRun(0, offset, 4, 1, 4, 4),), **more)

    check_ranks([at(0), at(4)])
    check_ranks(
        [
            at(0, num_writers=2),
            at(4, num_writers=2),
            at(0, num_writers=2, writer_index=1),
            at(4, num_writers=2, writer_index=1),
        ]
    )
    for wrong in (
        [at(0)],
        [at(0), at(0)],
        [at(0), at(4), at(4)],
        [at(0, num_writers=2), at(4, num_writers=2, writer_index=1)],
        [at(0), at(4, num_writers=2)],
    ):
        with pytest.raises(LayoutMismatch):
            check_ranks(wrong)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.randoms())
def test_coalescing_keeps_every_byte_where_it_is(sizes: list[int], random: Any) -> None:
    """Whatever the order and the cut of the runs, and the result is the same for all of them."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    places, at = {}, 0
    for n in random.sample(range(len(sizes)), len(sizes)):
        places[n] = at
        at += sizes[n] + random.randint(0, 1)
    runs = [CopyRun(starts[n], places[n], sizes[n], 1, sizes[n], sizes[n]) for n in places]
    singles = [
        CopyRun(r.local_offset + i, r.stored_offset + i, 1, 1, 1, 1)
        for r in runs
        for i in range(r.fragment_bytes)
    ]
    together = coalesce(runs)
    assert together == coalesce(singles) == coalesce(together)
    pairs = {
        (local + i, stored + i)
        for run in together
        for local, stored in run.fragments()
        for i in range(run.fragment_bytes)
    }
    assert pairs == {(run.local_offset, run.stored_offset) for run in singles}


def test_what_is_not_known_is_stored_as_it_is() -> None:
    """Another kind of state, or heads that do not share out, say why."""
    assert opaque_page(96, "it is recurrent").why == "it is recurrent"
    assert not opaque_page(96, "it is recurrent").is_portable
    odd = heads_page(HeadsPage(3, 4, 8), Topology(tp_size=2), 1)
    assert "3 KV heads do not share out over 2 ranks" in odd.why


@pytest.mark.parametrize("sizes", [{"tp_size": 0}, {"tp_size": 3, "dcp_size": 2}])
def test_topologies_that_cannot_be_are_refused(sizes: Any) -> None:
    """Sizes below one, and context parallel ranks that do not share out."""
    with pytest.raises(LayoutMismatch, match="no such topology"):
        Topology(**sizes)
    with pytest.raises(LayoutMismatch, match="rank 2 of 2"):
        Topology(tp_size=2).place(2)
