"""Which stored layout a replica's chunks have, and where each rank's part is in a slot.

The engine has several flags for what is one question. `decide` is the one place that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from undercroft.errors import LayoutMismatch
from undercroft.layout.page_map import PageMap
from undercroft.layout.topology import Topology

__all__ = ["Decision", "LayerPage", "SlotShares", "StoredLayout", "Wishes", "decide", "slot_shares"]


class StoredLayout(Enum):
    """How the bytes of all ranks make up a chunk."""

    DIRECT = "direct"
    """Each rank's bytes side by side, in rank order: of use to the same topology only."""
    CANONICAL = "canonical"
    """Each page as if there were one rank, the layers of all stages in model order."""
    REPLICATED = "replicated"
    """The bytes that every rank has alike, once: one of them writes, all read."""

    @property
    def is_portable(self) -> bool:
        """Whether other topologies find the same bytes."""
        return self is not StoredLayout.DIRECT


class LayerPage(NamedTuple):
    """The page of one layer on this rank, with the name by which people know the layer."""

    layer_name: str
    page: PageMap


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the engine's configuration says of the layout.

    Args:
        is_parallelism_agnostic: The engine holds that the bytes do not depend on the topology.
        replicated_layout: Every rank has the same bytes.
        canonical_layout: Pages are to be stored as if there were one rank.
        kv_cache_layout: The memory order of its pages; None: it does not say.
    """

    is_parallelism_agnostic: bool
    replicated_layout: bool
    canonical_layout: bool
    kv_cache_layout: str | None


class Decision(NamedTuple):
    """The stored layout, and why it is not another one.

    Args:
        stored: The layout.
        why: What stood in the way of canonical pages; empty if nothing did, or nobody asked.
        is_less: Canonical pages were asked for, and are not stored.
    """

    stored: StoredLayout
    why: str
    is_less: bool


def decide(
    groups: Sequence[tuple[int, Sequence[LayerPage]]], wishes: Wishes, topology: Topology
) -> Decision:
    """The stored layout of a replica, as one of its ranks sees it. All ranks must see the same.

    Canonical pages need the engine's word (`canonical_layout` or `is_parallelism_agnostic`) and
    every page certified; one copy needs `replicated_layout` and every page on every rank. Otherwise
    each rank's bytes are stored by themselves, which is always right.

    Args:
        groups: Of each group its id and this rank's pages.
        wishes: What the configuration says.
        topology: The replica.
    """
    obstacle = _obstacle(groups, wishes)
    is_asked = wishes.canonical_layout or wishes.is_parallelism_agnostic
    if is_asked and not obstacle:
        return Decision(StoredLayout.CANONICAL, "", is_less=False)
    why = obstacle if is_asked else ""
    if wishes.replicated_layout and not obstacle:
        pages = [layer.page for _group_id, layers in groups for layer in layers]
        if all(page.is_whole and page.num_writers == topology.world_size for page in pages):
            return Decision(StoredLayout.REPLICATED, why, wishes.canonical_layout)
    return Decision(StoredLayout.DIRECT, why, wishes.canonical_layout)


def _obstacle(groups: Sequence[tuple[int, Sequence[LayerPage]]], wishes: Wishes) -> str:
    """The first thing that makes some page depend on the topology; empty if none does."""
    if wishes.kv_cache_layout is None:
        return "the engine does not name the memory order of its KV cache (kv_cache_layout)"
    for group_id, layers in groups:
        for layer in layers:
            if not layer.page.is_portable:
                return f"group {group_id}, layer {layer.layer_name}: {layer.page.why}"
    return ""


class SlotShares(NamedTuple):
    """Where each rank's part of the chunks of one group is.

    Args:
        payload_bytes: Of a chunk, all ranks together.
        offsets: By rank, where its part begins.
    """

    payload_bytes: int
    offsets: tuple[int, ...]


def slot_shares(
    stored: StoredLayout, topology: Topology, rank_bytes: Sequence[Sequence[int]]
) -> tuple[SlotShares, ...]:
    """Of each group, the length of a chunk and the ranks' places in it.

    Args:
        stored: The stored layout.
        topology: The replica.
        rank_bytes: By rank, of each group, the bytes of its pages in the stored layout.

    Raises:
        LayoutMismatch: Ranks that store the same pages do not agree on their length.
    """
    if len(rank_bytes) != topology.world_size or len({len(groups) for groups in rank_bytes}) != 1:
        raise LayoutMismatch(
            f"{topology.world_size} ranks with the same groups, but they say {rank_bytes}"
        )
    found = []
    for group_index, sizes in enumerate(zip(*rank_bytes, strict=True)):
        if stored is StoredLayout.DIRECT:
            parts = [[rank] for rank in range(topology.world_size)]
        elif stored is StoredLayout.CANONICAL:
            parts = [list(topology.ranks_of_stage(stage)) for stage in range(topology.pp_size)]
        else:
            parts = [list(range(topology.world_size))]
        found.append(_shares(group_index, parts, sizes))
    return tuple(found)


def _shares(group_index: int, parts: list[list[int]], sizes: Sequence[int]) -> SlotShares:
    """Parts lie one after the other; the ranks of a part begin at its start."""
    for part in parts:
        if len({sizes[rank] for rank in part}) != 1:
            said = ", ".join(f"rank {rank} {sizes[rank]}" for rank in part)
            raise LayoutMismatch(
                f"ranks store the same pages of the group at index {group_index} in different "
                f"lengths: {said} bytes"
            )
    ends = list(accumulate(sizes[part[0]] for part in parts))
    starts = {rank: start for start, part in zip((0, *ends), parts, strict=False) for rank in part}
    return SlotShares(ends[-1], tuple(starts[rank] for rank in range(len(sizes))))
