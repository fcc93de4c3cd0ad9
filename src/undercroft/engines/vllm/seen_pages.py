"""What a rank's pages are of whole ones, found out from the tensors themselves.

vLLM derives no copy runs for the ranks of pipeline stages. Shapes, strides and vLLM's own
descriptions of its layers tell as much, for what is plain: attention over heads that are spread
evenly, and latent vectors that every rank has. Only `UndercroftConnector` sees them.

Fail closed: a layer that is not recognised in all of this is not in the result. Heads that several
ranks hold alike are left out, too: nothing that a rank sees says which those ranks are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from undercroft.layout.page_map import PageMap, check_ranks
from undercroft.layout.pages import HeadsPage, Order, heads_page, latent_page
from undercroft.layout.topology import Topology

__all__ = ["seen_pages"]

_LOG = logging.getLogger(__name__)

_ORDERS = {"LBHNC": Order.HEADS, "LBNHC": Order.TOKENS}
"""Memory orders by vLLM's names; in others a layer's page is not in one piece, or not by itself."""
_PLAIN = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Ways to keep elements in which each is by itself, with nothing beside it in the page."""


def seen_pages(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, Any]
) -> Mapping[str, PageMap]:
    """By name the layers of this rank of which it is certain what its pages are of whole ones.

    Args:
        config: The engine's.
        cache: What vLLM says of the groups and their layers.
        tensors: By layer name, as vLLM registers them.
    """
    parallel = config.parallel_config
    topology = Topology(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    order = _ORDERS.get(config.cache_config.kv_cache_layout or "")
    if topology.cp_size > 1 or topology.world_size != parallel.world_size or order is None:
        return {}
    found = {}
    try:
        total_heads = config.model_config.get_total_num_kv_heads()
        for name, spec in _specs(cache):
            maps = _stage(spec, tensors.get(name), cache.num_blocks, total_heads, order, topology)
            if maps:
                found[name] = maps[parallel.rank % topology.stage_size]
    except Exception:  # noqa: BLE001 - engine internals are read here, and they move
        _LOG.exception("fault while looking at pages, please report this; none is certified by it")
        return {}
    return found


def _specs(cache: KVCacheConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            yield name, each.get(name, spec)


def _stage(
    spec: KVCacheSpec,
    tensor: Any,  # noqa: ANN401 - whatever vLLM registers
    num_blocks: int,
    total_heads: int,
    order: Order,
    topology: Topology,
) -> list[PageMap]:
    """A layer's page on each rank of its stage, proven; empty if it is not recognised."""
    ranks = topology.ranks_of_stage(0)
    if type(spec) is MLAAttentionSpec:
        if spec.max_tp_shards != 1 or spec.tokens_per_state != 1:
            return []
        row_bytes, rest = divmod(spec.unpadded_page_size_bytes, spec.block_size)
        if rest:
            return []
        maps = [latent_page(spec.block_size, row_bytes, topology, rank) for rank in ranks]
    elif type(spec) in (FullAttentionSpec, SlidingWindowSpec):
        page = _heads(spec, tensor, num_blocks, total_heads, order, topology.tp_size)
        if page is None:
            return []
        maps = [heads_page(page, topology, rank) for rank in ranks]
    else:
        return []
    check_ranks(maps)
    is_right = all(m.is_portable and m.local_bytes == spec.unpadded_page_size_bytes for m in maps)
    return maps if is_right else []


def _heads(
    spec: FullAttentionSpec | SlidingWindowSpec,
    tensor: Any,  # noqa: ANN401 - whatever vLLM registers
    num_blocks: int,
    total_heads: int,
    order: Order,
    tp_size: int,
) -> HeadsPage | None:
    """What one rank alone would have, if this rank's tensor is a plain part of it."""
    heads, tokens, size = spec.num_kv_heads, spec.block_size, spec.head_size
    is_plain = (
        heads * tp_size == total_heads
        and spec.head_size_v == size
        and spec.num_heads == heads
        and spec.tokens_per_state == 1
        and spec.kv_quant_mode in _PLAIN
    )
    shape = tuple(getattr(tensor, "shape", ()))
    if not is_plain or shape not in (
        (num_blocks, heads, tokens, 2 * size),
        (num_blocks, 2, tokens, heads, size),
    ):
        return None
    is_split = len(shape) == 5  # noqa: PLR2004 - the second of the shapes
    width = size if is_split else 2 * size
    strides = tuple(tensor.stride())
    by_token, by_head = strides[2:4] if is_split else (strides[2], strides[1])
    expected = (width, tokens * width) if order is Order.HEADS else (heads * width, width)
    half = tokens * heads * size
    if (
        strides[-1] != 1
        or (tokens > 1 and by_token != expected[0])
        or (heads > 1 and by_head != expected[1])
        or (is_split and strides[1] != half)
    ):
        return None
    return HeadsPage(total_heads, tokens, width * tensor.element_size(), order, is_split)
