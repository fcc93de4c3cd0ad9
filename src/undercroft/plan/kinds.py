"""Which layers of a model keep what, from its `config.json`.

Older configs say it in ways of their own, or not at all: then it is the model's type that tells,
by the rule that vLLM and transformers have for it. Where a config has a field that is known to
change what is kept, and not how, it is refused: a wrong number looks like a right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from undercroft.plan.fields import NUM_LAYERS, number, number_of, unknown

__all__ = ["Kind", "kept_by_layer", "window_tokens"]


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
_OTHER_CACHES = (
    "compress_ratios",
    "linear_attn_config",
    "attn_type_list",
    "block_configs",
    "hybrid_layer_pattern",
    "attention_other_setting",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "is_encoder_decoder",
)
"""Of models whose cache is made in a way of its own, or whose layers differ in more than kind."""
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")
"""Types of models of whose layers vLLM keeps the latents, where their config has any."""
_OF_STATE = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "conv_L_cache")
_STATEFUL = ("rwkv", "zamba", "bamba", "minimax", "plamo")
"""Parts of the names of model types that keep state in layers which their configs do not tell."""
_ALL_STATE = ("mamba", "mamba2", "falcon_mamba")
_BOTH = ("falcon_h1",)
"""Types whose every layer has attention and state."""
_ALL_WINDOWS = ("mistral", "mixtral", "phi3", "starcoder2")
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4}
"""Of types that do not say it: every so manyth layer attends to everything, the others slide."""
_CHUNK_PERIOD = 4
_ONE_MORE = ("cohere2",)
"""Types whose windows reach back one token more than their configs say."""

_Layers = list[tuple[Kind, ...]]


def kept_by_layer(text: Mapping[str, Any]) -> list[Kind]:
    """What the layers keep, in order; a layer may keep two things, and one that shares none.

    Raises:
        ConfigError: The config does not say, or in a way that is not known here.
    """
    for key in _OTHER_CACHES:
        if text.get(key):
            raise unknown(f"the model's config has {key}, a cache of a kind that is not known here")
    layers: _Layers | None = None
    for rule in (_named, _spaced, _placed, _by_type):
        layers = rule(text)
        if layers is not None:
            break
    layers = layers or _windows(text)
    # The last so many layers read what those before them keep.
    num_sharing = text.get("num_kv_shared_layers")
    if isinstance(num_sharing, int) and num_sharing > 0:
        layers = layers[:-num_sharing]
    return [kind for layer in layers for kind in layer]


def window_tokens(text: Mapping[str, Any]) -> int:
    """How many tokens a window reaches back.

    Raises:
        ConfigError: The config does not say.
    """
    key = "sliding_window" if text.get("sliding_window") else "attention_chunk_size"
    return number(text, key) + (text.get("model_type") in _ONE_MORE)


def _named(text: Mapping[str, Any]) -> _Layers | None:
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        named = text.get(key)
        if isinstance(named, list | str) and named:
            return [(_kind(str(each), key, text),) for each in named]
    return None


def _kind(named: str, key: str, text: Mapping[str, Any]) -> Kind:
    if named not in _KINDS:
        raise unknown(f"{key} in the model's config has layers of {named!r}, not known here")
    kind = _KINDS[named]
    return _full(text) if kind is Kind.ATTENTION else kind


def _full(text: Mapping[str, Any]) -> Kind:
    if not text.get("kv_lora_rank"):
        return Kind.ATTENTION
    if text.get("model_type") not in _LATENT:
        raise unknown(
            f"the model's config has kv_lora_rank, and of models of type "
            f"{text.get('model_type', '')!r} it is not known here whether an engine keeps latents"
        )
    return Kind.LATENT


def _spaced(text: Mapping[str, Any]) -> _Layers | None:
    """Attention in every so manyth layer, state in the others."""
    if text.get("full_attention_interval") is not None:
        interval = number(text, "full_attention_interval")
        return _mixed(text, lambda layer: (layer + 1) % interval == 0, Kind.STATE)
    if text.get("attn_layer_period") is not None:
        period, offset = number(text, "attn_layer_period"), text.get("attn_layer_offset", 0)
        return _mixed(text, lambda layer: layer % period == offset, Kind.STATE)
    return None


def _placed(text: Mapping[str, Any]) -> _Layers | None:
    """Attention in the layers of a list, state in the others."""
    for key in ("attn_layer_indices", "full_attn_idxs"):
        places = text.get(key)
        if isinstance(places, list) and places:
            return _mixed(text, places.__contains__, Kind.STATE)
    return None


def _mixed(text: Mapping[str, Any], is_full: Callable[[int], bool], other: Kind) -> _Layers:
    full = _full(text)
    return [(full if is_full(layer) else other,) for layer in range(number_of(text, NUM_LAYERS))]


def _by_type(text: Mapping[str, Any]) -> _Layers | None:
    model_type = str(text.get("model_type", ""))
    if model_type in _ALL_STATE:
        return [(Kind.STATE,)] * number_of(text, NUM_LAYERS)
    if model_type in _BOTH:
        return [(_full(text), Kind.STATE)] * number_of(text, NUM_LAYERS)
    said = next((key for key in _OF_STATE if text.get(key)), None)
    if said or any(part in model_type for part in _STATEFUL):
        has = f"{said} in the model's config says" if said else f"being of type {model_type} means"
        raise unknown(
            f"{has} that layers keep state, and neither layer_types nor a list says which"
        )
    return None


def _windows(text: Mapping[str, Any]) -> _Layers:
    """Windows, in some or all of the layers, or in none."""
    model_type = str(text.get("model_type", ""))
    if text.get("attention_chunk_size"):
        return _chunks(text, model_type)
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return _mixed(text, lambda _layer: True, Kind.WINDOW)
    pattern = text.get("sliding_window_pattern", _PERIODS.get(model_type))
    if isinstance(pattern, int) and pattern > 0:
        return _mixed(text, lambda layer: (layer + 1) % pattern == 0, Kind.WINDOW)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return _mixed(text, lambda layer: pattern[layer % len(pattern)] == "G", Kind.WINDOW)
    if pattern is not None:
        raise unknown(
            f"sliding_window_pattern is {pattern!r} in the model's config, neither a number of "
            'layers nor letters such as "LLLG"'
        )
    if text.get("use_sliding_window"):
        first = number(text, "max_window_layers", number_of(text, NUM_LAYERS))
        return _mixed(text, lambda layer: layer < first, Kind.WINDOW)
    if model_type not in _ALL_WINDOWS:
        raise unknown(
            f"the model's config has sliding_window, and of models of type {model_type!r} it is "
            "not known here which layers have one; it does not say so by layer_types"
        )
    return _mixed(text, lambda _layer: False, Kind.WINDOW)


def _chunks(text: Mapping[str, Any], model_type: str) -> _Layers:
    if not model_type.startswith("llama4"):
        raise unknown(
            f"the model's config has attention_chunk_size, and of models of type {model_type!r} it "
            "is not known here which layers attend to chunks"
        )
    has_positions = text.get("no_rope_layers")  # 1 where there are, whatever the name says
    if isinstance(has_positions, list) and has_positions:
        full = _full(text)
        return [(Kind.WINDOW if each else full,) for each in has_positions]
    return _mixed(text, lambda layer: (layer + 1) % _CHUNK_PERIOD == 0, Kind.WINDOW)
