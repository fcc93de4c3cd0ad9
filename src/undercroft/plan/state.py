"""Bytes of the state that a recurrent layer keeps, whatever the length of the prompt.

As vLLM 0.32 computes them in `model_executor/layers/mamba/mamba_utils.py`, for one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.errors import ConfigError
from undercroft.plan.fields import BY_HAND, number

__all__ = ["state_bytes"]


def state_bytes(config: Mapping[str, Any], element: int, large_element: int) -> int:
    """Of one layer.

    Args:
        config: The model's.
        element: Bytes of an element of the convolution's state.
        large_element: The same of the recurrence's, which is most of it.

    Raises:
        ConfigError: It is of a kind that is not known here.
    """
    if "linear_num_value_heads" in config:
        return _gated_delta(config, element, large_element)
    if "mamba_n_heads" in config or "mamba_num_heads" in config:
        return _mamba2(config, element, large_element)
    if "conv_L_cache" in config:
        kept = number(config, "conv_L_cache") - 1
        return number(config, "conv_dim", number(config, "hidden_size")) * kept * element
    raise ConfigError(f"the model's state is of a kind that is not known here; {BY_HAND}")


def _gated_delta(config: Mapping[str, Any], element: int, large_element: int) -> int:
    key_size = number(config, "linear_key_head_dim")
    value_heads = number(config, "linear_num_value_heads")
    value_size = number(config, "linear_value_head_dim")
    width = 2 * key_size * number(config, "linear_num_key_heads") + value_size * value_heads
    convolution = width * (number(config, "linear_conv_kernel_dim") - 1)
    return convolution * element + value_heads * value_size * key_size * large_element


def _mamba2(config: Mapping[str, Any], element: int, large_element: int) -> int:
    """By the names of Granite and Falcon, or by those of Nemotron."""
    if "mamba_n_heads" in config:
        heads, size = number(config, "mamba_n_heads"), number(config, "mamba_d_head")
        state, groups = number(config, "mamba_d_state"), number(config, "mamba_n_groups")
        kernel = number(config, "mamba_d_conv")
    else:
        heads, size = number(config, "mamba_num_heads"), number(config, "mamba_head_dim")
        state, groups = number(config, "ssm_state_size"), number(config, "n_groups")
        kernel = number(config, "conv_kernel")
    convolution = (heads * size + 2 * groups * state) * (kernel - 1)
    return convolution * element + heads * size * state * large_element
