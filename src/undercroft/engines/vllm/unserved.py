"""Engines whose attention cannot go on from loaded chunks: refused at start, with the reason.

vLLM asks a connector for chunks whatever its attention does with them. Each entry here is a set-up
of vLLM 0.32 that starts, takes loaded chunks, and then answers wrongly.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import kv_cache_uses_per_token_head_scales

from undercroft.errors import ConfigError

__all__ = ["check_attention", "wrong_attention"]


def wrong_attention(config: VllmConfig | None) -> str | None:
    """Why this engine would answer wrongly from loaded chunks; None if nothing says so.

    Args:
        config: The engine's whole configuration; None where the engine does not tell.
    """
    if config is None or not current_platform.is_cpu():
        return None
    cache_dtype = str(config.cache_config.cache_dtype)
    if kv_cache_uses_per_token_head_scales(cache_dtype):
        return (
            f"--kv-cache-dtype {cache_dtype}: vLLM's attention on CPUs does not know this type and "
            "writes two bytes where one belongs, over the next block; use fp8 or auto"
        )
    if config.model_config.use_mla and not _continues_latents(config):
        return (
            "latent attention (MLA) on a CPU without AMX, or with the backend CPU_MLA: vLLM "
            "computes a prompt as if nothing were before it, and has its own prefix cache off"
        )
    return None


def _continues_latents(config: VllmConfig) -> bool:
    """As vLLM decides which of its two implementations for CPUs it takes."""
    backend = config.attention_config.backend
    has_tiles = bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - what vLLM asks
    return has_tiles and backend != AttentionBackendEnum.CPU_MLA


def check_attention(config: VllmConfig | None) -> None:
    """Refuse an engine that would answer wrongly.

    Raises:
        ConfigError: `wrong_attention(config)` says why.
    """
    reason = wrong_attention(config)
    if reason:
        raise ConfigError(f"not served: {reason}; or run without this connector")
