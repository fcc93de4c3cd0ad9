"""The five frozen dataclasses an engine fills in, checked once at construction.

Names, order, types and defaults of the fields are the engine's own (vLLM 0.32's
`vllm.v1.kv_offload.config`); what a later engine adds is kept beside them, see
`undercroft.config.convert.EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undercroft.errors import ConfigError

__all__ = [
    "OffloadingCacheConfig",
    "OffloadingConfig",
    "OffloadingGroupConfig",
    "OffloadingModelConfig",
    "OffloadingParallelConfig",
]


@dataclass(frozen=True)
class OffloadingGroupConfig:
    """Layers that share one block table.

    Args:
        tokens_per_block: Tokens that one block of this group spans, over all ranks together
            (context parallelism spreads a block's tokens over ranks).
        layer_names: The group's layers, in the engine's order. An engine has none of a group that
            its pipeline stage has no layer of; `OffloadingConfig` refuses that, and says so.
        group_id: The engine's number for the group; ids need not start at 0 nor be consecutive.

    Raises:
        ConfigError: A field cannot be right.
    """

    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int

    def __post_init__(self) -> None:
        where = f"groups[group_id={self.group_id!r}]"
        _int(f"{where}.group_id", self.group_id, at_least=0)
        _int(f"{where}.tokens_per_block", self.tokens_per_block, at_least=1)
        names = f"{where}.layer_names"
        if not isinstance(self.layer_names, tuple):
            raise _wrong(names, self.layer_names, "a tuple of layer names")
        for name in self.layer_names:
            _text(names, name)
        if len(set(self.layer_names)) != len(self.layer_names):
            raise _wrong(names, self.layer_names, "each layer once")


@dataclass(frozen=True)
class OffloadingModelConfig:
    """What the engine says of the model.

    Args:
        name: The model as given to the engine: a hub name or a folder.
        dtype: Type of the KV cache's elements, such as `bfloat16` or `fp8`.

    Raises:
        ConfigError: A field cannot be right.
    """

    name: str
    dtype: str

    def __post_init__(self) -> None:
        _text("model.name", self.name)
        _text("model.dtype", self.dtype)


@dataclass(frozen=True)
class OffloadingCacheConfig:
    """How tokens become keys, and blocks become chunks.

    Args:
        tokens_per_hash: Tokens that one block hash covers; divides every `tokens_per_block`.
        blocks_per_chunk: Blocks of one group stored and loaded together, under one key.

    Raises:
        ConfigError: A field cannot be right.
    """

    tokens_per_hash: int
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        _int("cache.tokens_per_hash", self.tokens_per_hash, at_least=1)
        _int("cache.blocks_per_chunk", self.blocks_per_chunk, at_least=1)


@dataclass(frozen=True)
class OffloadingParallelConfig:
    """How one copy of the model is spread over ranks, and how many copies there are.

    Args:
        rank: This worker, in [0, world_size); 0 on the scheduler's side.
        world_size: Workers of one replica: `tp_size * pp_size * pcp_size`.
        tp_size: Tensor parallel size.
        pp_size: Pipeline parallel size.
        pcp_size: Prefill context parallel size.
        dcp_size: Decode context parallel size; divides `tp_size`, whose ranks it reuses.
        data_parallel_index: Which replica this engine is. Below `data_parallel_size`, except that
            an engine whose replicas are independent says `data_parallel_size` 1 in each of them
            and still counts them here.
        data_parallel_size: Replicas that step together.
        data_parallel_rank_local: Replica's number on its host, if the engine is run that way.
        is_parallelism_agnostic: The stored bytes do not depend on the sizes above.

    Raises:
        ConfigError: A field cannot be right, or fields contradict one another.
    """

    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int | None
    is_parallelism_agnostic: bool

    def __post_init__(self) -> None:
        for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"):
            _int(f"parallel.{name}", getattr(self, name), at_least=1)
        _int("parallel.rank", self.rank, at_least=0)
        _int("parallel.data_parallel_index", self.data_parallel_index, at_least=0)
        _int("parallel.data_parallel_size", self.data_parallel_size, at_least=1)
        if self.data_parallel_rank_local is not None:
            _int("parallel.data_parallel_rank_local", self.data_parallel_rank_local, at_least=0)
        _flag("parallel.is_parallelism_agnostic", self.is_parallelism_agnostic)
        self._check_sizes()

    def _check_sizes(self) -> None:
        product = self.tp_size * self.pp_size * self.pcp_size
        if self.world_size != product:
            raise _wrong(
                "parallel.world_size",
                self.world_size,
                f"tp_size * pp_size * pcp_size = {self.tp_size} * {self.pp_size} * "
                f"{self.pcp_size} = {product}",
            )
        if self.rank >= self.world_size:
            raise _wrong("parallel.rank", self.rank, f"below world_size {self.world_size}")
        if self.tp_size % self.dcp_size:
            raise _wrong("parallel.dcp_size", self.dcp_size, f"a divisor of tp_size {self.tp_size}")
        if self.data_parallel_index >= self.data_parallel_size > 1:
            raise _wrong(
                "parallel.data_parallel_index",
                self.data_parallel_index,
                f"below data_parallel_size {self.data_parallel_size}",
            )


@dataclass(frozen=True)
class OffloadingConfig:
    """Everything an engine tells this library when it starts.

    Args:
        groups: Groups whose blocks are kept, at least one.
        worker_kv_bytes_per_block: KV bytes of one block in one worker, all groups' layers together.
        enable_kv_cache_events: Whether the engine publishes KV cache events; then every level
            reports what it stores and removes.
        extra_config: What the user wrote in `kv_connector_extra_config`; never changed.
        engine_id: Unique name of this replica; names what its processes share.
        model: The model.
        cache: Keys and chunks.
        parallel: Ranks and replicas.
        replicated_layout: All ranks hold the same bytes for a block (MLA), so one copy is enough.
        canonical_layout: Pages are to be stored as if there were one rank.
        kv_cache_layout: Name of the memory order of the worker's KV cache.

    Raises:
        ConfigError: A field cannot be right, or fields contradict one another.
    """

    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: Mapping[str, Any]
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        _int("worker_kv_bytes_per_block", self.worker_kv_bytes_per_block, at_least=1)
        _text("engine_id", self.engine_id)
        for name in ("enable_kv_cache_events", "replicated_layout", "canonical_layout"):
            _flag(name, getattr(self, name))
        if not isinstance(self.extra_config, Mapping):
            raise _wrong("extra_config", self.extra_config, "a mapping of names to values")
        for key in self.extra_config:
            _text("extra_config key", key)
        if self.kv_cache_layout is not None:
            _text("kv_cache_layout", self.kv_cache_layout)
        elif self.canonical_layout:
            raise _wrong("kv_cache_layout", None, "named when canonical_layout is set")
        self._check_groups()

    def _check_parts(self) -> None:
        if not isinstance(self.groups, tuple) or not self.groups:
            raise _wrong("groups", self.groups, "a tuple of at least one OffloadingGroupConfig")
        parts = [(f"groups[{i}]", g, OffloadingGroupConfig) for i, g in enumerate(self.groups)]
        whole = [
            ("model", self.model, OffloadingModelConfig),
            ("cache", self.cache, OffloadingCacheConfig),
            ("parallel", self.parallel, OffloadingParallelConfig),
        ]
        for name, value, kind in (*parts, *whole):
            if not isinstance(value, kind):
                raise _wrong(name, value, f"an {kind.__name__}; use from_engine for engine objects")

    def _check_groups(self) -> None:
        seen: set[int] = set()
        for group in self.groups:
            if group.group_id in seen:
                raise _wrong("groups[].group_id", group.group_id, "unique; two groups share it")
            seen.add(group.group_id)
            if not group.layer_names:
                raise ConfigError(_without_layers(group, self.parallel))
            if group.tokens_per_block % self.cache.tokens_per_hash:
                raise ConfigError(_misaligned(group, self.cache.tokens_per_hash))


def _without_layers(group: OffloadingGroupConfig, parallel: OffloadingParallelConfig) -> str:
    """One line that names the stage and the group, and something that helps."""
    if parallel.pp_size == 1:
        return f"groups[group_id={group.group_id}].layer_names is (), but must name a layer"
    stage = parallel.rank // (parallel.world_size // parallel.pp_size)
    return (
        f"not served: pipeline stage {stage} of {parallel.pp_size} (counted from 0) has no layers "
        f"of KV cache group {group.group_id} ({group.tokens_per_block} tokens a block), and a "
        "chunk holds a part of each stage; give every stage layers of each group (vLLM: "
        "VLLM_PP_LAYER_PARTITION; a drafter's are all on the last stage), or set "
        "tensor_parallel_size instead of pipeline_parallel_size"
    )


def _misaligned(group: OffloadingGroupConfig, tokens_per_hash: int) -> str:
    """One line that names the group, both numbers, and something that helps."""
    return (
        f"group {group.group_id} ({group.layer_names[0]}, {len(group.layer_names)} layers): "
        f"tokens_per_block {group.tokens_per_block} is not a multiple of cache.tokens_per_hash "
        f"{tokens_per_hash}, so its blocks do not end where keys end; make the engine hash every "
        f"{group.tokens_per_block} tokens or a divisor of it (vLLM: --prefix-match-unit "
        f"{group.tokens_per_block}; with recurrent layers also --mamba-cache-mode align)"
    )


def _wrong(field: str, value: object, must: str) -> ConfigError:
    return ConfigError(f"{field} is {value!r}, but must be {must}")


def _int(field: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise _wrong(field, value, f"a whole number >= {at_least}")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong(field, value, "True or False")


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(field, value, "a non-empty string")
