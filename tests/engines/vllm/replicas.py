"""Whole replicas of any topology in one process: real specs, regions and workers, sliced tensors.

Every rank's tensors are cut out of one unsharded reference by plain numpy, which does not know the
code under test; nor does vLLM's own derivation of copy runs.
"""

import copy
from dataclasses import dataclass
from typing import Any

import kv_fixtures  # noqa: F401 - first, because it imports the engine quietly
import numpy as np
import torch
from shapes import OURS, engine_config
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from undercroft.engines.vllm import UndercroftSpec
from undercroft.engines.vllm.seen_pages import seen_pages
from undercroft.engines.vllm.transfer_spec import SlotSpec

NUM_BLOCKS = 24
TOKENS = 8
"""Of one block, all ranks together."""


@dataclass(frozen=True)
class Layers:
    """One group: attention with heads, or one latent vector per token (`num_heads` 0)."""

    num_layers: int
    num_heads: int
    head_size: int
    window: int | None = None


@dataclass(frozen=True)
class Sizes:
    """A topology, by numpy's and the engine's words only."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.pcp

    def heads(self, rank: int, num_heads: int) -> slice:
        """A rank's heads; neighbours share one when there are too few."""
        tp_rank = rank % self.tp
        count = max(1, num_heads // self.tp)
        first = tp_rank * num_heads // self.tp if num_heads < self.tp else tp_rank * count
        return slice(first, first + count)

    def tokens(self, rank: int) -> Any:
        """A rank's tokens of a block."""
        pcp_rank = rank // self.tp % self.pcp
        part = pcp_rank * self.dcp + rank % self.tp % self.dcp
        turns = np.arange(TOKENS).reshape(-1, self.pcp * self.dcp, self.interleave)
        return turns[:, part].ravel()


class RecordingSpec(UndercroftSpec):
    """Keeps the namespace and the geometry that it made."""

    def _namespace(self, geometry: Any, *more: Any) -> Any:
        self.geometry = geometry
        self.made = super()._namespace(geometry, *more)
        return self.made


def reference(groups: Any, seed: int = 0) -> Any:
    """The unsharded bytes, per group and layer `(num_blocks, heads, tokens, element_bytes)`."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(
                0,
                256,
                (
                    NUM_BLOCKS,
                    max(1, group.num_heads),
                    TOKENS,
                    group.head_size * 4 * (2 if group.num_heads else 1),
                ),
                np.uint8,
            )
            for _ in range(group.num_layers)
        ]
        for group in groups
    ]


def _told(config: Any) -> Any:
    """What a rank may see: here nobody computes attention, which not every CPU can over latents."""
    told = copy.copy(config)
    told.model_config = copy.copy(config.model_config)
    told.model_config.use_mla = False
    return told


class Replica:
    """All ranks and the scheduler of one replica."""

    def __init__(
        self,
        groups: Any,
        sizes: Sizes,
        *,
        bpc: int = 1,
        engine_id: str = "r",
        sees_tensors: bool = True,
        **extra: Any,
    ) -> None:
        self.groups, self.sizes, self.bpc = groups, sizes, bpc
        self.ranks: list[Any] = []
        self.tensors: list[Any] = []
        self.manager: Any = None
        self._jobs = 0
        extra = {"host": "4MiB", "blocks_per_chunk": bpc, **OURS, **extra}
        try:
            for rank in range(sizes.world):
                config, cache = self._config(rank, extra, engine_id), self._cache(rank)
                spec = UndercroftSpec(build_offloading_config(config, cache))
                tensors = self._tensors(rank)
                worker = OffloadingConnectorWorker(spec, config, cache)
                with set_current_vllm_config(_told(config)):  # as vLLM's worker does
                    if sees_tensors:  # as UndercroftConnector does
                        spec.seen = seen_pages(config, cache, tensors)
                    worker.register_kv_caches(tensors)
                self.ranks.append(worker.worker)
                self.tensors.append(tensors)
            config, cache = self._config(0, extra, engine_id), self._cache(0)
            self.spec = RecordingSpec(build_offloading_config(config, cache))
            self.manager = self.spec.get_manager()
        except BaseException:
            self.close()
            raise
        self.namespace = self.spec.made
        self.payload = tuple(self.spec.geometry.chunk_bytes)
        self.slot_bytes = -(-max(self.payload) // 4096) * 4096
        self.region = self.ranks[0]._worker._slots

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        if self.manager is not None:
            self.manager.shutdown()

    @property
    def stored(self) -> str:
        """The stored layout by name."""
        name: str = self.namespace.manifest["layout"]["stored"]
        return name

    def _config(self, rank: int, extra: Any, engine_id: str) -> Any:
        sizes = self.sizes
        return engine_config(
            dict(extra),
            engine_id,
            parallel_config__rank=rank,
            parallel_config__world_size=sizes.world,
            parallel_config__tensor_parallel_size=sizes.tp,
            parallel_config__pipeline_parallel_size=sizes.pp,
            parallel_config__prefill_context_parallel_size=sizes.pcp,
            parallel_config__decode_context_parallel_size=sizes.dcp,
            parallel_config__cp_kv_cache_interleave_size=sizes.interleave,
            parallel_config__kv_cache_dtype="auto",
            model_config__use_mla=not self.groups[0].num_heads,
            model_config__get_total_num_kv_heads=lambda: max(1, self.groups[0].num_heads),
            cache_config__block_size=TOKENS // (sizes.dcp * sizes.pcp),
        )

    def stage_layers(self, rank: int, group: Any) -> range:
        """The layers of a rank's stage."""
        stage = rank // (self.sizes.tp * self.sizes.pcp)
        each = group.num_layers // self.sizes.pp
        end = group.num_layers if stage == self.sizes.pp - 1 else (stage + 1) * each
        return range(stage * each, end)

    def _cache(self, rank: int) -> KVCacheConfig:
        tokens = TOKENS // (self.sizes.dcp * self.sizes.pcp)
        groups = []
        for index, group in enumerate(self.groups):
            shape = {"block_size": tokens, "head_size": group.head_size, "dtype": torch.float32}
            shape["num_kv_heads"] = max(1, group.num_heads // self.sizes.tp)
            if not group.num_heads:
                spec: Any = MLAAttentionSpec(max_tp_shards=1, **shape)
            elif group.window:
                spec = SlidingWindowSpec(sliding_window=group.window, **shape)
            else:
                spec = FullAttentionSpec(**shape)
            names = [f"g{index}.layer{n}" for n in self.stage_layers(rank, group)]
            groups.append(KVCacheGroupSpec(names, spec))
        replicas = 1 if self.groups[0].num_heads else self.sizes.tp
        return KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            kv_cache_layout="LBHNC",
            kv_tp_replicas=replicas,
        )

    def _slice(self, rank: int, group: Any, layer: Any) -> Any:
        heads = self.sizes.heads(rank, max(1, group.num_heads))
        return np.ascontiguousarray(layer[:, heads][:, :, self.sizes.tokens(rank)])

    def _tensors(self, rank: int) -> Any:
        zeros = reference(self.groups, 0)
        found = {}
        for index, group in enumerate(self.groups):
            for number in self.stage_layers(rank, group):
                part = self._slice(rank, group, zeros[index][number])
                tensor = torch.from_numpy(part).view(torch.float32)
                found[f"g{index}.layer{number}"] = tensor if group.num_heads else tensor[:, 0]
        return found

    def _bytes(self, rank: int, index: int, number: int) -> Any:
        tensor = self.tensors[rank][f"g{index}.layer{number}"]
        whole = tensor.contiguous().view(torch.uint8).numpy()
        return whole if self.groups[index].num_heads else whole[:, None]

    def fill(self, seed: int) -> Any:
        """Give every rank its part of a reference; the reference."""
        whole = reference(self.groups, seed)
        for rank in range(self.sizes.world):
            for index, group in enumerate(self.groups):
                for number in self.stage_layers(rank, group):
                    self._bytes(rank, index, number)[...] = self._slice(
                        rank, group, whole[index][number]
                    )
        return whole

    def expected(self, rank: int, whole: Any, index: int, block: int) -> list[bytes]:
        """A rank's pages of one block, cut out of a reference."""
        group = self.groups[index]
        return [
            self._slice(rank, group, whole[index][number][block : block + 1]).tobytes()
            for number in self.stage_layers(rank, group)
        ]

    def got(self, rank: int, index: int, block: int) -> list[bytes]:
        """A rank's pages of one block, as the engine has them."""
        group = self.groups[index]
        return [
            self._bytes(rank, index, number)[block].tobytes()
            for number in self.stage_layers(rank, group)
        ]

    def chunk(self, index: int, slot: int) -> Any:
        """What a slot holds of a group's chunk."""
        return self.region[slot * self.slot_bytes :][: self.payload[index]]

    def _specs(self, index: int, blocks: Any, first: int, slots: Any) -> tuple[Any, Any]:
        counts = [0] * len(self.groups)
        counts[index] = len(blocks)
        firsts = [0] * len(self.groups)
        firsts[index] = first
        chunks = [0] * len(self.groups)
        chunks[index] = len(slots)
        self._jobs += 1
        offsets = [slot * self.slot_bytes for slot in slots]
        return GPULoadStoreSpec(blocks, counts, firsts), SlotSpec(offsets, chunks, self._jobs)

    def store(self, index: int, blocks: Any, first: int, slots: Any) -> list[int]:
        """All ranks store; the bytes that each of them copied."""
        engine, host = self._specs(index, blocks, first, slots)
        for rank in self.ranks:
            assert rank.submit_store(self._jobs, engine, host)
        return self._finish()

    def load(self, index: int, blocks: Any, first: int, slots: Any) -> list[int]:
        """All ranks load; the bytes that each of them copied."""
        engine, host = self._specs(index, blocks, first, slots)
        for rank in self.ranks:
            assert rank.submit_load(self._jobs, host, engine)
        return self._finish()

    def _finish(self) -> list[int]:
        copied = []
        for rank in self.ranks:
            rank.wait({self._jobs})
            (result,) = rank.get_finished()
            copied.append(result.transfer_size)
        return copied


def block_ids(count: int, seed: int) -> list[int]:
    return (np.random.default_rng(seed).permutation(23)[:count] + 1).tolist()


def whole_chunk(whole: Any, index: int, blocks: list[int | None]) -> bytes:
    """The chunk as one rank would have it: layer by layer, block by block; zeros for none."""
    return b"".join(
        bytes(layer[0].nbytes) if block is None else layer[block].tobytes()
        for layer in whole[index]
        for block in blocks
    )


def ranks_chunk(replica: Replica, whole: Any, index: int, blocks: list[int | None]) -> bytes:
    """The chunk as all ranks' bytes side by side."""
    parts = []
    for rank in range(replica.sizes.world):
        pages = [b and replica.expected(rank, whole, index, b) for b in blocks]
        sizes = [len(page) for page in replica.expected(rank, whole, index, 1)]
        parts += [
            page[n] if page else bytes(size) for n, size in enumerate(sizes) for page in pages
        ]
    return b"".join(parts)


def round_trip(replica: Replica, seed: int) -> dict[tuple[int, int], bytes]:
    """Store and load under one topology; the stored chunks."""
    bpc, stored = replica.bpc, {}
    for index in range(len(replica.groups)):
        whole = replica.fill(seed)
        replica.region[...] = 0xAA
        position = min(1, bpc - 1)
        blocks = block_ids(3 * bpc - position, seed + index)
        slots = [5, 2, 9]
        copied = replica.store(index, blocks, bpc + position, slots)
        filled = [None] * position + blocks
        for number, slot in enumerate(slots):
            mine = filled[number * bpc : (number + 1) * bpc]
            expected = (
                ranks_chunk(replica, whole, index, mine)
                if replica.stored == "direct"
                else whole_chunk(whole, index, mine)
            )
            assert replica.chunk(index, slot).tobytes() == expected
            stored[index, number] = expected
            after = replica.region[slot * replica.slot_bytes :][: replica.slot_bytes]
            assert set(after[replica.payload[index] :].tolist()) <= {0xAA}
        # Each byte was written once, by whoever's turn it was.
        assert sum(copied) == len(blocks) * replica.payload[index] // bpc
        load_and_check(replica, whole, index, filled, bpc, slots)
    return stored


def load_and_check(
    replica: Replica, whole: Any, index: int, filled: list[Any], bpc: int, slots: list[int]
) -> None:
    """Load into other blocks, the first and the last chunk in part; nothing else changes."""
    before = replica.fill(999)
    first = max(1, bpc // 2) if bpc > 1 else 0
    count = len(filled) - first - max(0, bpc - 2)
    targets = [b + 1 if b + 1 < 24 else 1 for b in block_ids(count, 77)]
    replica.load(index, targets, bpc + first, slots)
    for rank in range(replica.sizes.world):
        for block in range(24):
            now = replica.got(rank, index, block)
            if block in targets:
                source = filled[first + targets.index(block)]
                assert now == replica.expected(rank, whole, index, source)
            else:
                assert now == replica.expected(rank, before, index, block)
