"""Bytes of a model's KV cache, from its `config.json` alone: no engine, no weights.

Checked against what vLLM's layers give, for models of every shape (tests/data/vllm_specs.json), and
against what real engines held of some (docs/reference/models.json).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError
from undercroft.identity import local_folder
from undercroft.plan.elements import (
    DTYPE_BYTES,
    checkpoint_type,
    element_bytes,
    latent_bytes,
    vector_bytes,
)
from undercroft.plan.fields import BY_HAND, NUM_LAYERS, number, unknown
from undercroft.plan.heads import heads_on_ranks, kv_heads
from undercroft.plan.kinds import Kind, kept_by_layer, window_tokens
from undercroft.plan.state import state_bytes

__all__ = ["Layers", "Shape", "read_config", "shape_of"]

_MAX_CONFIG_BYTES = 16 << 20
_INDEX_BLOCK = 128
_SCALE_BYTES = 4


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
    num_ranks: int = 1,
) -> Shape:
    """What a model of this `config.json` keeps.

    Args:
        config: As `read_config` gives it; of a model with images, its text part counts.
        dtype: vLLM's `--dtype`; auto: the config's, and 16 bits where it says 32, as in vLLM.
        kv_dtype: vLLM's `--kv-cache-dtype`; auto: what the weights were quantized for, or `dtype`.
        state_dtype: vLLM's `--mamba-ssm-cache-dtype`; auto: what the model or its config says.
        num_ranks: vLLM's `--tensor-parallel-size`.

    Raises:
        ConfigError: A field is missing or no number, or its kind of cache is not known here.
    """
    text = _text_part(config)
    model_dtype = _dtype(text, config) if dtype == "auto" else dtype
    kept = kv_dtype
    if kept == "auto":
        kept = checkpoint_type(config) or checkpoint_type(text) or model_dtype
    layers = []
    for kind, num_layers in Counter(kept_by_layer(text)).items():
        if kind is Kind.STATE:
            element = element_bytes(model_dtype, "--dtype")
            large = _large_element(text, state_dtype, element)
            each = state_bytes(text, element, large, num_ranks)
            layers.append(Layers(kind, num_layers, state_bytes=num_layers * each))
        elif kind is not Kind.NOTHING:
            each = _token_bytes(kind, text, kept, num_ranks)
            window = window_tokens(text) if kind is Kind.WINDOW else None
            layers.append(Layers(kind, num_layers, num_layers * each, window))
    if not layers:
        raise unknown("no layer of this model keeps anything")
    return Shape(tuple(layers), kept)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, Mapping) and any(name in part for name in NUM_LAYERS):
            return part
    return config


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                found = str(part[key]).removeprefix("torch.")
                return "bfloat16" if found in ("float32", "float") else found
    return "bfloat16"


def _large_element(text: Mapping[str, Any], asked: str, element: int) -> int:
    """Bytes of an element of the larger of a layer's two states."""
    if asked != "auto":
        return element_bytes(asked, "--state-dtype")
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if isinstance(text.get(key), str):
            return element_bytes(text[key], f"{key} in the model's config")
    return DTYPE_BYTES["float32"] if text.get("model_type") == "nemotron_h" else element


def _token_bytes(kind: Kind, text: Mapping[str, Any], dtype: str, num_ranks: int) -> int:
    """Of a token and layer, on all ranks together; latents, which all have alike, once."""
    if kind is Kind.LATENT:
        size = number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim")
        if not text.get("index_head_dim"):
            return latent_bytes(size, dtype)
        # Where attention is sparse, the indexer keeps a key for each token, and its scale; latents
        # of 8 bits are packed with scales of their own.
        index = number(text, "index_head_dim")
        packed = "fp8_ds_mla" if dtype.startswith("fp8") else dtype
        return latent_bytes(size, packed) + index + index // _INDEX_BLOCK * _SCALE_BYTES
    num_heads, size = kv_heads(text, is_window=kind is Kind.WINDOW)
    return 2 * heads_on_ranks(num_heads, num_ranks) * vector_bytes(size, dtype)
