"""Bytes of the state that a recurrent layer keeps, whatever the length of the prompt.

As vLLM 0.32 computes them in `model_executor/layers/mamba/mamba_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from undercroft.plan.fields import number, unknown

__all__ = ["state_bytes"]

_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
)
"""Heads, their size, that of the state, groups and kernel, as different makers call them."""


def state_bytes(
    config: Mapping[str, Any], element: int, large_element: int, num_ranks: int = 1
) -> int:
    """Of one layer, on all ranks together.

    Args:
        config: The model's.
        element: Bytes of an element of the convolution's state.
        large_element: The same of the recurrence's, which is most of it.
        num_ranks: Of tensor parallelism.

    Raises:
        ConfigError: It is of a kind that is not known here.
    """
    if "linear_num_value_heads" in config:
        return _gated_delta(config, element, large_element)
    if config.get("model_type") in ("mamba", "falcon_mamba"):
        inner = number(config, "intermediate_size", _expanded(config, "expand"))
        size, kernel = number(config, "state_size"), number(config, "conv_kernel")
        return inner * (kernel - 1) * element + inner * size * large_element
    for names in _MAMBA2:
        if names[0] in config:
            return _mamba2(
                [number(config, name) for name in names], element, large_element, num_ranks
            )
    if "mamba_d_state" in config:
        inner = _expanded(config, "mamba_expand")
        size, kernel = number(config, "mamba_d_state"), number(config, "mamba_d_conv")
        return inner * (kernel - 1) * element + inner * size * large_element
    if "conv_L_cache" in config:
        kept = number(config, "conv_L_cache") - 1
        return number(config, "conv_dim", number(config, "hidden_size")) * kept * element
    raise unknown("the model's state is of a kind that is not known here")


def _expanded(config: Mapping[str, Any], key: str) -> int:
    return number(config, key) * number(config, "hidden_size")


def _gated_delta(config: Mapping[str, Any], element: int, large_element: int) -> int:
    key_size = number(config, "linear_key_head_dim")
    value_heads = number(config, "linear_num_value_heads")
    value_size = number(config, "linear_value_head_dim")
    width = 2 * key_size * number(config, "linear_num_key_heads") + value_size * value_heads
    convolution = width * (number(config, "linear_conv_kernel_dim") - 1)
    return convolution * element + value_heads * value_size * key_size * large_element


def _mamba2(sizes: Sequence[int], element: int, large_element: int, num_ranks: int) -> int:
    """Of sizes in the order of `_MAMBA2`."""
    heads, size, state, groups, kernel = sizes
    if groups % num_ranks:
        groups = num_ranks  # each rank has the groups that its heads need
    convolution = (heads * size + 2 * groups * state) * (kernel - 1)
    return convolution * element + heads * size * state * large_element
