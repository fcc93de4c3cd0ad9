"""What the engine would tell the connector: groups of layers, its cache, its configuration."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

TOKENS_PER_BLOCK = 16
OURS = {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}


@dataclass(frozen=True)
class Group:
    """One group of layers; not `kept` stands for one the engine never offloads."""

    num_layers: int = 2
    head_size: int = 32
    window: int | None = None
    kept: bool = True

    def spec(self) -> Any:
        """The engine's description of it: 4 KiB of a block and layer, with the default size."""
        if not self.kept:
            return HiSparseHotSpec(block_size=TOKENS_PER_BLOCK, page_size=256, blocks_per_request=1)
        shape = {"num_kv_heads": 1, "head_size": self.head_size, "dtype": torch.float32}
        if self.window is None:
            return FullAttentionSpec(block_size=TOKENS_PER_BLOCK, **shape)
        return SlidingWindowSpec(block_size=TOKENS_PER_BLOCK, sliding_window=self.window, **shape)


ONE_GROUP = (Group(),)


def kv_cache_config(groups: Any, num_blocks: int, layout: str | None = "LBHNC") -> KVCacheConfig:
    """The engine's cache configuration for these groups."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"g{g}.layer{i}" for i in range(group.num_layers)], group.spec())
            for g, group in enumerate(groups)
        ],
        kv_cache_layout=layout,
    )


SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
"""A `config.json`; there are no weights to it."""


def engine_config(extra: Any, engine_id: str = "rig", **changes: Any) -> Any:
    """What of `VllmConfig` the connector reads; dotted names in `changes` replace values."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            engine_id=engine_id,
            is_kv_producer=True,
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
            cp_kv_cache_interleave_size=1,
        ),
        cache_config=SimpleNamespace(
            block_size=TOKENS_PER_BLOCK,
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            enable_prefix_caching=True,
            prefix_match_unit=None,
            prefix_cache_retention_interval=None,
            mamba_cache_mode="none",
        ),
        model_config=SimpleNamespace(
            model="a-model-of-no-hub",
            dtype=torch.float32,
            use_mla=False,
            get_total_num_kv_heads=lambda: 1,
            hf_text_config=SimpleNamespace(to_dict=dict),
        ),
        speculative_config=None,
        use_v2_model_runner=False,
    )
    for name, value in changes.items():
        room, _, leaf = name.partition("__")
        setattr(getattr(config, room) if leaf else config, leaf or room, value)
    return config


def prompt(label: int, num_tokens: int) -> list[int]:
    """Tokens of a prompt; prompts of different labels share no prefix."""
    return [label * 100_003 + i for i in range(num_tokens)]
