"""How many KV heads a layer of attention has, and of what size, from a model's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.errors import ConfigError
from undercroft.plan.fields import number, number_of, unknown

__all__ = ["heads_on_ranks", "kv_heads"]

_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "hidden_size_per_head", "attention_head_dim", "kv_channels")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
_NOT_SAID: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"head_dim": 128},
}
"""By type of model: what is taken for fields that its published configs leave out."""


def kv_heads(text: Mapping[str, Any], *, is_window: bool) -> tuple[int, int]:
    """Their number and their size.

    Args:
        text: The model's config.
        is_window: Of a layer with a window; some models have other heads there.

    Raises:
        ConfigError: A field is missing or no number, or heads are of a kind that is not known here.
    """
    text = {**_NOT_SAID.get(str(text.get("model_type")), {}), **_said(text)}
    heads = number_of(text, _NUM_HEADS)
    size = number_of(text, _HEAD_SIZE, number_of(text, _HIDDEN, 1) // heads or None)
    value_size = text.get("v_head_dim")
    if value_size is not None and value_size != size:
        raise unknown(
            f"v_head_dim is {value_size!r} in the model's config, where head_dim is {size}: V of "
            "another size than K is not known here"
        )
    if text.get("global_head_dim") and not is_window:
        key = "num_global_key_value_heads"
        is_other = text.get("attention_k_eq_v") and text.get(key)
        num_heads = number(text, key) if is_other else _num_kv_heads(text, heads)
        return num_heads, number(text, "global_head_dim")
    return _num_kv_heads(text, heads), size


def _said(text: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in text.items() if value is not None}


def _num_kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    if text.get("multi_query_attention"):
        return number(text, "multi_query_group_num")
    attention = text.get("attn_config")
    if isinstance(attention, Mapping):
        return number(attention, "kv_n_heads", heads)
    return number_of(text, _NUM_KV_HEADS, heads)


def heads_on_ranks(num_heads: int, num_ranks: int) -> int:
    """How many are kept by all ranks together: of too few heads each rank has one.

    Raises:
        ConfigError: They do not share out over the ranks.
    """
    if num_heads % num_ranks == 0:
        return num_heads
    if num_ranks % num_heads:
        raise ConfigError(
            f"--tensor-parallel-size is {num_ranks}, over which {num_heads} KV heads do not share "
            "out; vLLM takes divisors and multiples of their number"
        )
    return num_ranks
