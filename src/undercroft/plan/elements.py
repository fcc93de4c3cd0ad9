"""Bytes of what a token leaves in one head, by the type that the KV cache is kept in.

As vLLM 0.32 packs them: scales of a token and head lie beside its elements, those of a whole tensor
are not kept in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.plan.fields import unknown

__all__ = [
    "DTYPE_BYTES",
    "KEPT_TYPES",
    "checkpoint_type",
    "element_bytes",
    "latent_bytes",
    "vector_bytes",
]

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
"""Of one element, by the names that vLLM takes for `--dtype` and `--kv-cache-dtype`."""

_HALVES: Mapping[str, int] = {
    "int8_per_token_head": 2,
    "fp8_per_token_head": 2,
    "int4_per_token_head": 1,
}
"""With a scale for each token and head: half bytes of an element."""
_FP4 = ("nvfp4", "nvfp4_4over6")
_FP4_BLOCK = 16
_PACKED_LATENTS: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a latent of `_PACKED_SIZE` elements, its scales, and the part with positions."""
_PACKED_SIZE = 576
_SCALE_BYTES = 4

KEPT_TYPES = (*DTYPE_BYTES, *_HALVES, *_FP4, *_PACKED_LATENTS)
"""What `--kv-cache-dtype` may be."""


def element_bytes(dtype: str, where: str) -> int:
    """Bytes of an element.

    Raises:
        ConfigError: Those of `dtype` are not known; `where` says where it was read.
    """
    if dtype not in DTYPE_BYTES:
        raise unknown(
            f"{where} is {dtype!r}, whose bytes are not known here; known are "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


def vector_bytes(size: int, dtype: str) -> int:
    """Bytes of K or of V of a token and head.

    Raises:
        ConfigError: Those of `dtype` are not known.
    """
    if dtype in _HALVES:
        return size * _HALVES[dtype] // 2 + _SCALE_BYTES
    if dtype in _FP4:
        return size // 2 + size // _FP4_BLOCK
    return size * _kept(dtype)


def latent_bytes(size: int, dtype: str) -> int:
    """Bytes of a token's latent (MLA), which has K and V in it.

    Raises:
        ConfigError: Those of `dtype` are not known, or not for latents of this size.
    """
    if dtype in _PACKED_LATENTS:
        if size != _PACKED_SIZE:
            raise unknown(
                f"--kv-cache-dtype is {dtype!r}, which is for latents of {_PACKED_SIZE} elements; "
                f"by kv_lora_rank and qk_rope_head_dim this model's have {size}"
            )
        return _PACKED_LATENTS[dtype]
    if dtype in _HALVES:
        return size * _HALVES[dtype] // 2 + 2 * _SCALE_BYTES
    return size * _kept(dtype)


def _kept(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise unknown(
            f"--kv-cache-dtype is {dtype!r}, whose bytes are not known here for this kind of "
            f"attention; known are {', '.join(KEPT_TYPES)}"
        )
    return DTYPE_BYTES[dtype]


def checkpoint_type(config: Mapping[str, Any]) -> str | None:
    """What vLLM takes for `--kv-cache-dtype auto` of weights that were quantized with their cache.

    Args:
        config: The model's; None is returned where it says nothing of a cache.

    Raises:
        ConfigError: It says something that is not known here.
    """
    weights = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(weights, Mapping):
        return None
    inner = weights.get("quantization")
    parts = [inner, weights] if isinstance(inner, Mapping) else [weights]
    is_modelopt = str(weights.get("quant_method", "")).startswith("modelopt") or len(parts) > 1
    for key in ("kv_cache_scheme", "kv_cache_quant_algo") if is_modelopt else ("kv_cache_scheme",):
        for part in parts:
            if part.get(key):
                return _named(part[key], key) if is_modelopt else "fp8"
    return None


def _named(said: object, key: str) -> str:
    if isinstance(said, Mapping) and said.get("type") == "float":
        said = {8: "fp8", 4: "nvfp4"}.get(said.get("num_bits", 0), said)
    name = str(said).lower()
    if name not in ("fp8", "nvfp4"):
        raise unknown(f"{key} in the model's quantization_config is {said!r}, not FP8 or NVFP4")
    return name
