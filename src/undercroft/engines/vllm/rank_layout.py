"""What one rank stores, from what the engine tells it of its pages.

vLLM derives for each layer how this rank's page lies in the page of one rank alone, and gives the
copy runs along. They are taken at their word only after they have been proven here, and if they say
what the tensors say, see `seen_pages`. For pipeline stages there are none, and those of the tensors
are taken. Where there are none at all, or they prove wrong, the page is stored as it is. What a
rank has decided it tells the scheduler in the region, which refuses to start when ranks disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalPageMapping,
)

from undercroft.config import OffloadingConfig
from undercroft.engines.told import pack, parse_note
from undercroft.engines.vllm.recurrent import last_blocks_only, recurrent_groups
from undercroft.errors import ConfigError, LayoutMismatch
from undercroft.layout.page_map import CopyRun, PageMap, coalesce
from undercroft.layout.plan import GroupGeometry, PageRef
from undercroft.layout.stored import (
    Decision,
    LayerPage,
    SlotShares,
    StoredLayout,
    Wishes,
    decide,
    slot_shares,
)
from undercroft.layout.topology import Topology

__all__ = ["RankLayout", "Ranks", "direct_groups", "rank_layout", "topology_of"]

_HEADS_OUTSIDE = "LHBNC"
"""The memory order in which a block's page is not in one piece: the blocks of each head are."""


def topology_of(config: OffloadingConfig) -> Topology:
    """The replica's parallel sizes."""
    sizes = config.parallel
    return Topology(sizes.tp_size, sizes.pp_size, sizes.pcp_size, sizes.dcp_size)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What this rank stores.

    Args:
        decision: The stored layout.
        groups: Of each group, the stored layout of its chunks on this rank.
        layer_names: Of each group, the names of this rank's layers.
    """

    decision: Decision
    groups: tuple[GroupGeometry, ...]
    layer_names: tuple[tuple[str, ...], ...]

    @property
    def chunk_bytes(self) -> tuple[int, ...]:
        """Of each group, bytes of a chunk that this rank has part of."""
        return tuple(group.payload_bytes for group in self.groups)

    def note(self) -> bytes:
        """What the other participants must know."""
        said = {
            "stored": self.decision.stored.value,
            "why": self.decision.why[:1000],
            "is_less": self.decision.is_less,
            "layers": self.layer_names,
        }
        return pack(said)


def rank_layout(
    kv_caches: CanonicalKVCaches,
    config: OffloadingConfig,
    seen: Mapping[str, PageMap] = MappingProxyType({}),
) -> RankLayout:
    """What this rank stores of these tensors.

    Args:
        kv_caches: The tensors, and which of them each group has.
        config: The engine's configuration.
        seen: By layer, what its pages are of whole ones, from `seen_pages`.

    Raises:
        LayoutMismatch: A page that its tensor does not have, or that the engine's blocks have no
            room for; other groups than the configuration has.
        ConfigError: A memory order whose pages the engine does not hand out whole.
    """
    topology = topology_of(config)
    if config.kv_cache_layout == _HEADS_OUTSIDE:
        raise ConfigError(
            f"not served: the memory order {_HEADS_OUTSIDE} of the KV cache, of whose blocks vLLM "
            "hands out one head of one layer only; unset VLLM_KV_CACHE_LAYOUT, or set it to LBHNC"
        )
    if len(kv_caches.group_data_refs) != len(config.groups):
        raise LayoutMismatch(
            f"{len(kv_caches.group_data_refs)} groups of pages, but {len(config.groups)} configured"
        )
    pages: list[tuple[int, list[LayerPage]]] = []
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        _check_refs(kv_caches, refs, config.worker_kv_bytes_per_block)
        has_all = len(refs) == len(group.layer_names)
        names = group.layer_names if has_all else [f"page {n}" for n in range(len(refs))]
        layers = [
            LayerPage(
                name,
                _page_map(
                    ref, config, topology, seen.get(name) if has_all else None, is_one_layer=has_all
                ),
            )
            for name, ref in zip(names, refs, strict=True)
        ]
        pages.append((group.group_id, layers))
    wishes = Wishes(
        config.parallel.is_parallelism_agnostic,
        config.replicated_layout,
        config.canonical_layout,
        config.kv_cache_layout,
    )
    decision = decide(pages, wishes, topology)
    per_chunk = config.cache.blocks_per_chunk
    if decision.stored is StoredLayout.DIRECT:
        groups = direct_groups(kv_caches, per_chunk)
    else:
        groups = tuple(
            GroupGeometry(
                tuple(
                    PageRef(ref.tensor_idx, ref.page_size_bytes, layer.page)
                    for ref, layer in zip(refs, layers, strict=True)
                ),
                per_chunk,
            )
            for refs, (_, layers) in zip(kv_caches.group_data_refs, pages, strict=True)
        )
    layer_names = tuple(group.layer_names for group in config.groups)
    recurrent = recurrent_groups(get_current_vllm_config_or_none(), layer_names)
    return RankLayout(decision, last_blocks_only(groups, recurrent), layer_names)


def direct_groups(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> tuple[GroupGeometry, ...]:
    """The stored layout of each group when this rank's pages are stored as they are.

    Raises:
        LayoutMismatch: A ref to a page that its tensor does not have.
    """
    groups = []
    for refs in kv_caches.group_data_refs:
        _check_refs(kv_caches, refs, None)
        pages = tuple(PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        groups.append(GroupGeometry(pages, blocks_per_chunk))
    return tuple(groups)


def _check_refs(
    kv_caches: CanonicalKVCaches,
    refs: Sequence[CanonicalKVCacheRef],
    worker_kv_bytes_per_block: int | None,
) -> None:
    for ref in refs:
        row_bytes = kv_caches.tensors[ref.tensor_idx].page_size_bytes
        if ref.page_size_bytes > row_bytes:
            raise LayoutMismatch(
                f"a page of {ref.page_size_bytes} bytes in rows of {row_bytes} bytes"
            )
    page_bytes = sum(ref.page_size_bytes for ref in refs)
    if worker_kv_bytes_per_block is not None and page_bytes > worker_kv_bytes_per_block:
        raise LayoutMismatch(
            f"the pages of a block take {page_bytes} bytes, but the engine says that one of its "
            f"blocks takes {worker_kv_bytes_per_block} bytes (worker_kv_bytes_per_block)"
        )


def _page_map(
    ref: CanonicalKVCacheRef,
    config: OffloadingConfig,
    topology: Topology,
    seen: PageMap | None = None,
    *,
    is_one_layer: bool,
) -> PageMap:
    """The engine's mapping, proven; without one what was seen, or else the page as it is."""
    if seen is not None and seen.local_bytes != ref.page_size_bytes:
        seen = None
    if ref.mapping is None:
        if seen is not None:
            return seen
        # With stages the engine derives no mapping at all. A stage of one rank has whole pages.
        is_portable = (
            topology.stage_size == 1
            and topology.pp_size > 1
            and is_one_layer
            and config.parallel.is_parallelism_agnostic
        )
        why = "" if is_portable else "the engine certifies none of its pages"
        return PageMap.whole(ref.page_size_bytes, is_portable=is_portable, why=why)
    page = _engines_map(ref, ref.mapping, topology)
    if seen is not None and page.is_portable and page != seen:
        return PageMap.whole(
            ref.page_size_bytes, why="the engine's copy runs are not what its tensors say"
        )
    return page


def _engines_map(
    ref: CanonicalKVCacheRef, mapping: CanonicalPageMapping, topology: Topology
) -> PageMap:
    """The engine's mapping, proven."""
    try:
        page = PageMap(
            mapping.local_page_size_bytes,
            mapping.canonical_page_size_bytes,
            coalesce(
                CopyRun(
                    run.local_offset,
                    run.canonical_offset,
                    run.fragment_size,
                    run.num_fragments,
                    run.local_stride,
                    run.canonical_stride,
                )
                for run in mapping.runs
            ),
            mapping.num_writers,
            mapping.writer_index,
            mapping.parallelism_agnostic,
            ""
            if mapping.parallelism_agnostic
            else "the engine cannot say what rank has which part",
        )
    except LayoutMismatch as error:
        return PageMap.whole(ref.page_size_bytes, why=f"the engine's copy runs are wrong: {error}")
    written = page.local_bytes * topology.stage_size
    if (
        page.local_bytes != ref.page_size_bytes
        or written != page.stored_bytes * page.num_writers
        or page.num_writers > topology.stage_size
    ):
        why = (
            f"the engine's copy runs are wrong: {topology.stage_size} ranks with "
            f"{page.local_bytes} bytes each do not write {page.stored_bytes} bytes "
            f"{page.num_writers} times"
        )
        return PageMap.whole(ref.page_size_bytes, why=why)
    return page


@dataclass(frozen=True, slots=True)
class Ranks:
    """What all ranks of a replica store together, from what they said in the region.

    Args:
        stored: The stored layout.
        why: Why canonical pages, though asked for, are not stored; empty otherwise.
        shares: Of each group, the length of a chunk and each rank's place in it.
        layer_names: Of each group, the layers of all stages, in model order.
        stages: Of each pipeline stage, the layers of each group.
    """

    stored: StoredLayout
    why: str
    shares: tuple[SlotShares, ...]
    layer_names: tuple[tuple[str, ...], ...]
    stages: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def of(
        cls, config: OffloadingConfig, notes: Sequence[bytes], rank_bytes: Sequence[Sequence[int]]
    ) -> Ranks:
        """Put together what the ranks said.

        Raises:
            ConfigError: Ranks disagree; the message names both.
        """
        topology = topology_of(config)
        said = [parse_note(rank, note) for rank, note in enumerate(notes)]
        first = said[0]
        for rank, other in enumerate(said):
            if other["stored"] != first["stored"]:
                raise ConfigError(
                    f"rank 0 stores {first['stored']} pages ({first['why'] or 'no obstacle'}), but "
                    f"rank {rank} stores {other['stored']} pages ({other['why'] or 'no obstacle'}):"
                    " they would overwrite each other; set canonical_layout to false"
                )
            peer = topology.ranks_of_stage(topology.place(rank).stage)[0]
            if other["layers"] != said[peer]["layers"]:
                raise ConfigError(
                    f"rank {peer} and rank {rank} are one pipeline stage, but have other layers"
                )
        stored = StoredLayout(first["stored"])
        stages = [said[topology.ranks_of_stage(stage)[0]] for stage in range(topology.pp_size)]
        names = zip(*(stage["layers"] for stage in stages), strict=True)
        return cls(
            stored=stored,
            why=first["why"] if first["is_less"] else "",
            shares=slot_shares(stored, topology, rank_bytes),
            layer_names=tuple(
                tuple(dict.fromkeys(name for stage in group for name in stage)) for group in names
            ),
            stages=tuple(tuple(tuple(group) for group in stage["layers"]) for stage in stages),
        )
