"""Bytes of a model's KV cache, from its `config.json` alone: no engine, no weights.

Checked against what a real vLLM tells of models of each shape: docs/reference/models.json.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError
from undercroft.identity import local_folder
from undercroft.plan.fields import BY_HAND, number
from undercroft.plan.state import state_bytes

__all__ = ["DTYPE_BYTES", "Kind", "Layers", "Shape", "read_config", "shape_of"]

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Of one element, by the names that vLLM takes for `--dtype` and `--kv-cache-dtype`."""

_MAX_CONFIG_BYTES = 16 << 20
_INDEX_BLOCK = 128
_SCALE_BYTES = 4


class Kind(Enum):
    """What a layer keeps."""

    ATTENTION = "attention"
    """K and V of every token."""
    LATENT = "latent attention"
    """One vector for every token (MLA)."""
    WINDOW = "sliding window"
    """K and V of the last tokens only."""
    STATE = "state"
    """Something of one size, whatever the length."""
    NOTHING = "nothing"


_KINDS = {
    "full_attention": Kind.ATTENTION,
    "attention": Kind.ATTENTION,
    "*": Kind.ATTENTION,
    "sliding_attention": Kind.WINDOW,
    "chunked_attention": Kind.WINDOW,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "conv": Kind.STATE,
    "M": Kind.STATE,
    "mlp": Kind.NOTHING,
    "moe": Kind.NOTHING,
    "-": Kind.NOTHING,
    "E": Kind.NOTHING,
}
_STATEFUL = ("mamba", "rwkv", "falcon_h1", "zamba", "bamba", "minimax", "kimi_linear", "plamo")
"""Parts of the names of model types that keep state in layers which their configs do not tell."""
_OTHER_FIELDS = ("compress_ratios", "linear_attn_config", "attn_type_list")
"""Of configs of models whose cache is made in a way of its own."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that keep the same.

    Args:
        kind: What.
        num_layers: How many there are.
        token_bytes: Of a token, all of these layers together; 0 for state.
        window_tokens: How many tokens a window reaches back.
        state_bytes: Of one state, all of these layers together.
    """

    kind: Kind
    num_layers: int
    token_bytes: int = 0
    window_tokens: int | None = None
    state_bytes: int = 0

    @property
    def text(self) -> str:
        """For people."""
        layers = f"{self.num_layers} of {self.kind.value}"
        return layers + (f" ({self.window_tokens} tokens)" if self.window_tokens else "")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model keeps of a prompt, all ranks together.

    Args:
        layers: By kind; those that keep nothing are left out.
        dtype: Of K and V.
    """

    layers: tuple[Layers, ...]
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Of each token that is kept; windows and states aside."""
        return sum(each.token_bytes for each in self.layers if each.window_tokens is None)

    def tail_bytes(self, num_tokens: float) -> float:
        """Of the end of each prompt that is kept: its windows and its states.

        Args:
            num_tokens: Of the prompt.
        """
        return sum(
            each.state_bytes
            if each.window_tokens is None
            else min(each.window_tokens, num_tokens) * each.token_bytes
            for each in self.layers
        )

    @property
    def text(self) -> str:
        """For people."""
        return ", ".join(each.text for each in self.layers)


def read_config(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The `config.json` of a model that is on this machine.

    Args:
        model: A folder, a `config.json` itself, or a name that the hub's local cache has.
        environ: The process's environment, for the place of that cache.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    path = Path(model).expanduser()
    if path.suffix != ".json":
        folder = path if path.is_dir() else local_folder(model, environ)
        if folder is None:
            raise ConfigError(
                f"model {model} is not on this machine: give a folder with a config.json, or the "
                f"file itself, or {BY_HAND}"
            )
        path = folder / "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        config = json.loads(data) if len(data) <= _MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object of up to {_MAX_CONFIG_BYTES} bytes")
    return config


def shape_of(
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    state_dtype: str = "auto",
) -> Shape:
    """What a model of this `config.json` keeps.

    Args:
        config: As `read_config` gives it; of a model with images, its text part counts.
        dtype: vLLM's `--dtype`; auto: the config's, and 16 bits where it says 32, as in vLLM.
        kv_dtype: vLLM's `--kv-cache-dtype`; auto: as `dtype`.
        state_dtype: vLLM's `--mamba-ssm-cache-dtype`; auto: what the model or its config says.

    Raises:
        ConfigError: A field is missing or no number, or its kind of cache is not known here.
    """
    text = _text_part(config)
    model_dtype = _dtype(text, config) if dtype == "auto" else dtype
    kept = model_dtype if kv_dtype == "auto" else kv_dtype
    layers = []
    for kind, num_layers in Counter(_kinds(text)).items():
        if kind is Kind.STATE:
            element = _bytes_of(model_dtype, "--dtype")
            large = _large_element(text, state_dtype, element)
            each = state_bytes(text, element, large)
            layers.append(Layers(kind, num_layers, state_bytes=num_layers * each))
        elif kind is not Kind.NOTHING:
            each = _token_bytes(kind, text, _bytes_of(kept, "--kv-cache-dtype"))
            window = _window(text) if kind is Kind.WINDOW else None
            layers.append(Layers(kind, num_layers, num_layers * each, window))
    if not layers:
        raise ConfigError(f"no layer of this model keeps anything; {BY_HAND}")
    return Shape(tuple(layers), kept)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, Mapping) and "num_hidden_layers" in part:
            return part
    return config


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                found = str(part[key]).removeprefix("torch.")
                return "bfloat16" if found in ("float32", "float") else found
    return "bfloat16"


def _bytes_of(dtype: str, where: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{where} is {dtype!r}, whose bytes are not known here; known are "
            f"{', '.join(DTYPE_BYTES)}; or {BY_HAND}"
        )
    return DTYPE_BYTES[dtype]


def _large_element(text: Mapping[str, Any], asked: str, element: int) -> int:
    """Bytes of an element of the larger of a layer's two states."""
    if asked != "auto":
        return _bytes_of(asked, "--state-dtype")
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if isinstance(text.get(key), str):
            return _bytes_of(text[key], f"{key} in the model's config")
    return DTYPE_BYTES["float32"] if text.get("model_type") == "nemotron_h" else element


# --- layers -----------------------------------------------------------------------------------


def _kinds(text: Mapping[str, Any]) -> list[Kind]:
    """What each layer keeps."""
    for key in _OTHER_FIELDS:
        if text.get(key):
            raise ConfigError(
                f"the model's config has {key}, a cache of a kind that is not known here; {BY_HAND}"
            )
    named = text.get("layer_types") or text.get("layers_block_type")
    named = named or text.get("hybrid_override_pattern")
    if isinstance(named, list | str) and named:
        kinds = [_kind(str(each), text) for each in named]
    else:
        kinds = _unnamed(text, number(text, "num_hidden_layers"))
    # The last so many layers read what those before them keep.
    num_sharing = text.get("num_kv_shared_layers")
    return kinds[:-num_sharing] if isinstance(num_sharing, int) and num_sharing > 0 else kinds


def _kind(named: str, text: Mapping[str, Any]) -> Kind:
    if named not in _KINDS:
        raise ConfigError(
            f"the model's config has layers of {named!r}, which are not known here; {BY_HAND}"
        )
    kind = _KINDS[named]
    return _full(text) if kind is Kind.ATTENTION else kind


def _full(text: Mapping[str, Any]) -> Kind:
    return Kind.LATENT if text.get("kv_lora_rank") else Kind.ATTENTION


def _unnamed(text: Mapping[str, Any], num_layers: int) -> list[Kind]:
    model_type = str(text.get("model_type", ""))
    if any(part in model_type for part in _STATEFUL):
        raise ConfigError(
            f"a model of type {model_type} keeps state, and its config does not say in which "
            f"layers; {BY_HAND}"
        )
    full = _full(text)
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return [full] * num_layers
    period = text.get("sliding_window_pattern")
    if isinstance(period, int) and period > 0:
        return [full if (n + 1) % period == 0 else Kind.WINDOW for n in range(num_layers)]
    first = number(text, "max_window_layers", num_layers) if text.get("use_sliding_window") else 0
    return [full] * first + [Kind.WINDOW] * (num_layers - first)


def _window(text: Mapping[str, Any]) -> int:
    return number(text, "sliding_window" if text.get("sliding_window") else "attention_chunk_size")


def _token_bytes(kind: Kind, text: Mapping[str, Any], element: int) -> int:
    """Of a token and layer."""
    if kind is Kind.LATENT:
        latent = number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim")
        # Where attention is sparse, the indexer keeps a key for each token, and its scale.
        index = number(text, "index_head_dim") if text.get("index_head_dim") else 0
        return latent * element + index + index // _INDEX_BLOCK * _SCALE_BYTES
    heads = number(text, "num_attention_heads")
    size = number(text, "head_dim", number(text, "hidden_size", 1) // heads or None)
    return 2 * number(text, "num_key_value_heads", heads) * size * element
