"""What decides KV bytes that vLLM's offloading configuration does not say.

The scheduler side cannot see the full model configuration, the workers can. They leave what matters
of it at the beginning of the host region, where the scheduler reads it before it hands out slots.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform

from undercroft.errors import ConfigError
from undercroft.hierarchy.region_control import MAX_RANKS, NONCE_BYTES

__all__ = ["leave_facts", "model_facts", "take_facts"]

_OFFSET = NONCE_BYTES * (MAX_RANKS + 1)
"""Behind the nonces by which the region proves itself."""
_MAGIC = b"UCFACTS1"
_HEADER_BYTES = len(_MAGIC) + 4
_NOT_ABOUT_BYTES = {"transformers_version", "_name_or_path", "architectures", "torch_dtype"}
_MAX_SHOWN = 48


def _short(value: object) -> object:
    """`value` if it is short enough to read, else its digest; the same for equal values."""
    text = json.dumps(value, sort_keys=True, default=str)
    if isinstance(value, str | int | float | bool | None) and len(text) <= _MAX_SHOWN:
        return value
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _fields(value: object, *names: str) -> dict[str, object]:
    found = {name: getattr(value, name, None) for name in names}
    return {name: _short(v if isinstance(v, int | float) else str(v)) for name, v in found.items()}


def model_facts(config: VllmConfig | None) -> dict[str, Any]:
    """JSON values that are equal for engines that compute equal KV bytes, by dotted name.

    Args:
        config: The engine's whole configuration; None where the engine does not tell, and then
            nothing is known.
    """
    if config is None:
        return {}
    model = config.model_config
    hf_config = model.hf_text_config.to_dict()
    facts: dict[str, Any] = {
        f"hf_config.{name}": _short(value)
        for name, value in hf_config.items()
        if name not in _NOT_ABOUT_BYTES
    }
    facts["model"] = _fields(model, "dtype", "quantization", "revision", "model_impl")
    facts["cache"] = _fields(
        config.cache_config, "cache_dtype", "calculate_kv_scales", "prefix_caching_hash_algo"
    )
    facts["attention"] = _fields(getattr(config, "attention_config", None), "backend")
    facts["device"] = str(current_platform.device_type)
    speculative = config.speculative_config
    if speculative is not None:
        facts["speculative"] = _fields(speculative, "method", "model", "num_speculative_tokens")
    if _depends_on_context(hf_config):
        facts["max_model_len"] = getattr(model, "max_model_len", None)
    load = getattr(config, "load_config", None)
    if getattr(load, "load_format", None) == "dummy":
        facts["dummy_weights"] = _fields(model, "seed")
    return facts


def _depends_on_context(hf_config: Mapping[str, Any]) -> bool:
    """Whether vLLM computes other bytes under another `--max-model-len`.

    LongRoPE takes its long factors for all positions if that exceeds the original length; Llama 4
    turns on a temperature of its attention.
    """
    is_long_rope = "longrope" in json.dumps(hf_config, default=str).lower()
    return is_long_rope or str(hf_config.get("model_type")).startswith("llama4")


def leave_facts(buffer: memoryview) -> None:
    """A rank's side: write this engine's facts into the region, before the scheduler joins.

    Raises:
        ConfigError: The region is too small for them.
    """
    text = json.dumps(model_facts(get_current_vllm_config_or_none()), sort_keys=True)
    packed = zlib.compress(text.encode())
    end = _OFFSET + _HEADER_BYTES + len(packed)
    if end > len(buffer):
        raise ConfigError(
            f"host is {len(buffer)} bytes, but {end} bytes are needed at least; raise host"
        )
    header = _MAGIC + len(packed).to_bytes(4, "little")
    buffer[_OFFSET:end] = header + packed


def take_facts(buffer: memoryview) -> Mapping[str, Any]:
    """The scheduler's side: read the facts and wipe them.

    Raises:
        ConfigError: No rank left any: the ranks run another version of this library.
    """
    header = bytes(buffer[_OFFSET : _OFFSET + _HEADER_BYTES])
    if not header.startswith(_MAGIC):
        raise ConfigError(
            "the ranks left no facts: they run another version of undercroft; install the same"
        )
    start = _OFFSET + _HEADER_BYTES
    end = start + int.from_bytes(header[len(_MAGIC) :], "little")
    facts: dict[str, Any] = json.loads(zlib.decompress(bytes(buffer[start:end])))
    buffer[_OFFSET:end] = bytes(end - _OFFSET)
    return facts
