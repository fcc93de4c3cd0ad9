"""Which stored layout it is, by every flag; and where the ranks are in a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from undercroft.errors import LayoutMismatch
from undercroft.layout.page_map import PageMap
from undercroft.layout.pages import HeadsPage, heads_page, latent_page, opaque_page
from undercroft.layout.stored import (
    Decision,
    LayerPage,
    StoredLayout,
    Wishes,
    decide,
    slot_shares,
)
from undercroft.layout.topology import Topology

TWO = Topology(tp_size=2)
HEADS = heads_page(HeadsPage(4, 8, 16), TWO, 0)
LATENT = latent_page(8, 32, TWO, 1)
STATE = opaque_page(64, "it is recurrent state")
NOTHING = Wishes(
    is_parallelism_agnostic=False,
    replicated_layout=False,
    canonical_layout=False,
    kv_cache_layout="LBHNC",
)


def _decide(*pages: PageMap, topology: Topology = TWO, **flags: Any) -> Decision:
    groups = [(n + 3, [LayerPage(f"layers.{n}", page)]) for n, page in enumerate(pages)]
    return decide(groups, dataclasses.replace(NOTHING, **flags), topology)


def test_without_a_word_of_the_engine_each_rank_stores_its_own() -> None:
    """Certified pages alone are not enough."""
    assert _decide(HEADS) == Decision(StoredLayout.DIRECT, "", is_less=False)
    assert _decide(LATENT).stored is StoredLayout.DIRECT


@pytest.mark.parametrize("flag", ["canonical_layout", "is_parallelism_agnostic"])
def test_either_flag_makes_certified_pages_canonical(flag: str) -> None:
    """And one page that is not certified makes all direct."""
    assert _decide(HEADS, LATENT, **{flag: True}).stored is StoredLayout.CANONICAL
    less = _decide(HEADS, STATE, **{flag: True})
    assert less.stored is StoredLayout.DIRECT
    assert less.why == "group 4, layer layers.1: it is recurrent state"
    assert less.is_less is (flag == "canonical_layout")


def test_one_copy_needs_the_flag_and_every_page_on_every_rank() -> None:
    """Pages that ranks share out are not replicated, whatever the engine says."""
    assert _decide(LATENT, replicated_layout=True).stored is StoredLayout.REPLICATED
    assert _decide(LATENT, HEADS, replicated_layout=True).stored is StoredLayout.DIRECT
    assert _decide(LATENT, STATE, replicated_layout=True).stored is StoredLayout.DIRECT
    four = Topology(tp_size=2, pp_size=2)
    staged = _decide(latent_page(8, 32, four, 0), topology=four, replicated_layout=True)
    assert staged.stored is StoredLayout.DIRECT
    both = _decide(LATENT, replicated_layout=True, canonical_layout=True)
    assert both.stored is StoredLayout.CANONICAL


def test_canonical_pages_need_the_name_of_their_memory_order() -> None:
    """Two families of pages must not meet under no name."""
    flags: dict[str, Any] = {"canonical_layout": True, "kv_cache_layout": None}
    less = _decide(HEADS, **flags)
    assert less.stored is StoredLayout.DIRECT
    assert "kv_cache_layout" in less.why
    assert _decide(LATENT, replicated_layout=True, kv_cache_layout=None).stored is (
        StoredLayout.DIRECT
    )


def test_where_ranks_are_in_a_slot() -> None:
    """Side by side; by stage; all at the start."""
    four = Topology(tp_size=2, pp_size=2)
    direct = slot_shares(StoredLayout.DIRECT, four, [(10, 1), (20, 2), (30, 3), (40, 4)])
    assert direct[0] == (100, (0, 10, 30, 60))
    assert direct[1] == (10, (0, 1, 3, 6))
    canonical = slot_shares(StoredLayout.CANONICAL, four, [(10,), (10,), (30,), (30,)])
    assert canonical == ((40, (0, 0, 10, 10)),)
    assert slot_shares(StoredLayout.REPLICATED, TWO, [(10,), (10,)]) == ((10, (0, 0)),)


@pytest.mark.parametrize(
    ("stored", "topology", "said"),
    [
        (StoredLayout.CANONICAL, TWO, [(10,), (20,)]),
        (StoredLayout.REPLICATED, TWO, [(10,), (20,)]),
        (StoredLayout.DIRECT, TWO, [(10,)]),
        (StoredLayout.DIRECT, TWO, [(10,), (10, 10)]),
    ],
)
def test_ranks_that_disagree_are_refused(stored: Any, topology: Any, said: Any) -> None:
    """The lengths are named."""
    with pytest.raises(LayoutMismatch, match="10"):
        slot_shares(stored, topology, said)
