"""Which groups keep a state, and that their chunks have room for one block."""

from types import SimpleNamespace
from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase

from undercroft.engines.vllm.recurrent import last_blocks_only, recurrent_groups
from undercroft.layout.plan import GroupGeometry, PageRef

NAMES = (("state0", "state1"), ("attention0",), ("state0", "attention0"), ("unknown",), ())


def config(mode: str = "align") -> Any:
    kind = type("State", (MambaBase,), {})
    kind.__abstractmethods__ = frozenset()
    state = object.__new__(kind)
    layers = {"state0": state, "state1": state, "attention0": object()}
    return SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def test_groups_of_states_alone() -> None:
    """All layers keep a state; one that does not, or that nobody knows, and the group does not."""
    assert recurrent_groups(config(), NAMES) == {0}


def test_unless_states_are_cached_by_prefix() -> None:
    """Without a configuration, or with states that are not cached, nothing is known."""
    assert recurrent_groups(config("none"), NAMES) == frozenset()
    assert recurrent_groups(None, NAMES) == frozenset()


def test_room_for_one_block() -> None:
    """Recurrent groups' chunks shrink to a block, the others keep theirs."""
    group = GroupGeometry((PageRef(0, 512), PageRef(1, 512)), 3)
    state, attention = last_blocks_only((group, group), frozenset({0}))
    assert (state.payload_bytes, attention.payload_bytes) == (1024, 3072)
