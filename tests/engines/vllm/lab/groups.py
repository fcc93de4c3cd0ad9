"""What the KV groups of a running engine are, and what holding their chunks costs."""

from collections import Counter
from typing import Any

from tests.engines.vllm.lab.storm import core_of, manager_of
from undercroft.hierarchy.slots import slot_bytes_for


def describe(driver: Any) -> dict[str, Any]:
    """For `Engine.inside`: groups, chunks held of each, and bytes of a slot.

    Returns:
        `groups`: for each its `kind`, `layers`, `tokens_per_chunk`, `chunk_bytes`, `slot_bytes`,
        and `chunks`, how many the host holds now; `stock_slot_bytes`: what vLLM's own offloading
        takes for a chunk of whatever group.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().connector_worker
    config = worker.spec.config
    blocks_per_chunk = config.cache.blocks_per_chunk
    geometries = worker.worker._worker._worker._groups
    kinds = core_of(driver).scheduler.kv_cache_config.kv_cache_groups
    keys = list(manager_of(driver).hierarchy.pool.keys())
    held = Counter(key[-4:] for key, _slot in keys)
    groups = []
    for group, geometry in zip(config.groups, geometries, strict=True):
        chunk_bytes = geometry.payload_bytes
        groups.append(
            {
                "kind": _kind(kinds[group.group_id].kv_cache_spec),
                "layers": len(group.layer_names),
                "tokens_per_chunk": group.tokens_per_block * blocks_per_chunk,
                "chunk_bytes": chunk_bytes,
                "slot_bytes": slot_bytes_for(chunk_bytes),
                "chunks": held[group.group_id.to_bytes(4, "big")],
            }
        )
    return {
        "groups": groups,
        "stock_slot_bytes": config.worker_kv_bytes_per_block * blocks_per_chunk,
    }


def _kind(spec: Any) -> str:
    kinds = {
        "FullAttentionSpec": "attention",
        "SlidingWindowSpec": "sliding window",
        "MLAAttentionSpec": "latent attention",
        "MambaSpec": "state",
    }
    return kinds[type(spec).__name__]
