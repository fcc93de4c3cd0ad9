"""Which groups keep a recurrent state: of a chunk of theirs only the last block is ever used.

A state stands for everything before it. vLLM hands out the state at a chunk's end, in one block,
and asks for that block alone: the chunk's others need no room, and nobody can fill them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase

from undercroft.layout.plan import GroupGeometry

__all__ = ["last_blocks_only", "recurrent_groups"]

_ALIGNED = "align"
"""The one way in which vLLM 0.32 caches states by prefix."""


def recurrent_groups(
    config: VllmConfig | None, layer_names: Sequence[Sequence[str]]
) -> frozenset[int]:
    """Indices of the groups all of whose layers keep a state.

    Args:
        config: The engine's whole configuration; None where it does not tell: then none is known.
        layer_names: Of each group.
    """
    if config is None or getattr(config.cache_config, "mamba_cache_mode", None) != _ALIGNED:
        return frozenset()
    layers = config.compilation_config.static_forward_context
    return frozenset(
        index
        for index, names in enumerate(layer_names)
        if names and all(isinstance(layers.get(name), MambaBase) for name in names)
    )


def last_blocks_only(
    groups: Sequence[GroupGeometry], recurrent: frozenset[int]
) -> tuple[GroupGeometry, ...]:
    """The groups, those that are recurrent with room for one block in a chunk."""
    return tuple(
        replace(group, blocks_per_chunk=1) if index in recurrent else group
        for index, group in enumerate(groups)
    )
