"""Bytes of a cache from a model's config alone are what a real vLLM comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.rig import ROOT

from undercroft.errors import ConfigError
from undercroft.plan.kinds import Kind
from undercroft.plan.shape import Shape, read_config, shape_of

CONFIGS: dict[str, Any] = json.loads((ROOT / "tests/data/model_configs.json").read_text())
"""Of the tiny models in the engine tests, as they are written there."""
SEEN: dict[str, Any] = json.loads((ROOT / "docs/reference/models.json").read_text())
"""What real engines told of the same models."""
IN_16_BITS = ("gptoss", "granite_hybrid", "nemotron_h", "lfm2", "qwen3_next")
WITH_GROUPS = sorted(name for name, told in SEEN.items() if "groups" in told)


def dtype_of(model: str) -> str:
    return "bfloat16" if model in IN_16_BITS else "float32"


def as_told(groups: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """By kind: layers, and bytes of a token, or of a state."""
    found: dict[str, tuple[int, int]] = {}
    for group in groups:
        layers, num_bytes = found.get(group["kind"], (0, 0))
        per = 1 if group["kind"] == "state" else group["tokens_per_chunk"]
        assert group["chunk_bytes"] % per == 0
        found[group["kind"]] = (layers + group["layers"], num_bytes + group["chunk_bytes"] // per)
    return found


def as_computed(shape: Shape) -> dict[str, tuple[int, int]]:
    return {
        each.kind.value: (each.num_layers, each.token_bytes or each.state_bytes)
        for each in shape.layers
    }


@pytest.mark.parametrize("case", WITH_GROUPS)
def test_it_is_what_real_engines_told(case: str) -> None:
    """Of every shape, in chunks of one block and of two: layers and bytes of each kind.

    The engines ran on CPUs, where vLLM keeps the recurrence's state in 32 bits.
    """
    model = case.partition("-")[0]
    shape = shape_of(CONFIGS[model], dtype=dtype_of(model), state_dtype="float32")
    assert as_computed(shape) == as_told(SEEN[case]["groups"])


def test_all_kinds_were_compared() -> None:
    """Attention, windows and state, alone and together."""
    kinds = {frozenset(as_told(SEEN[case]["groups"])) for case in WITH_GROUPS}
    assert kinds == {
        frozenset({"attention"}),
        frozenset({"sliding window"}),
        frozenset({"attention", "sliding window"}),
        frozenset({"attention", "state"}),
    }


@pytest.mark.parametrize("model", ["gemma3", "gptoss", "mistral_swa"])
def test_what_real_engines_held_is_what_is_foreseen(model: str) -> None:
    """Of four prompts, three of which begin alike: each whole prefix once, and a window each."""
    lengths, shared, chunk = (650, 650, 330, 1000), 320, 32
    shape = shape_of(CONFIGS[model], dtype=dtype_of(model))
    num_tokens = shared + sum(length // chunk * chunk for length in lengths) - 3 * shared
    foreseen = num_tokens * shape.token_bytes + sum(map(shape.tail_bytes, lengths))
    groups = SEEN[f"{model}-plain"]["groups"]
    assert sum(group["chunks"] * group["chunk_bytes"] for group in groups) == foreseen


REAL = {
    "Qwen3-8B": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 4096,
            "sliding_window": None,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
        },
        144 * 1024,
    ),
    "a model of Qwen2 with windows switched off": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_size": 3584,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "torch_dtype": "bfloat16",
        },
        28 * 2 * 4 * 128 * 2,
    ),
    "dense heads": (
        {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        32 * 2 * 32 * 128 * 2,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hidden_size": 7168,
            "torch_dtype": "bfloat16",
        },
        61 * (512 + 64) * 2,
    ),
    "DeepSeek-V3.2, with its indexer": (
        {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "hidden_size": 7168,
        },
        61 * ((512 + 64) * 2 + 128 + 4),
    ),
    "layers that read what others keep": (
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "hidden_size": 512,
            "num_kv_shared_layers": 2,
        },
        2 * 2 * 8 * 64 * 2,
    ),
    "text beside images": (
        {
            "vision_config": {"num_hidden_layers": 24},
            "torch_dtype": "float16",
            "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256},
        },
        2 * 2 * 4 * 64 * 2,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_bytes_of_a_token(name: str) -> None:
    """By hand, for configs written after what makers publish."""
    config, token_bytes = REAL[name]
    shape = shape_of(config)
    assert shape.token_bytes == token_bytes
    assert shape.tail_bytes(10_000) == 0
    if "index_head_dim" in config:  # latents of 8 bits are packed with their scales
        assert shape_of(config, kv_dtype="fp8").token_bytes == 61 * (656 + 128 + 4)
    else:
        assert shape_of(config, kv_dtype="fp8").token_bytes * 2 == token_bytes


def test_windows_by_a_period_and_from_a_layer_on() -> None:
    """Two ways in which older configs say it."""
    base = {"num_attention_heads": 4, "hidden_size": 256, "sliding_window": 512}
    layer = 2 * 4 * 64 * 2
    by_period = shape_of({**base, "num_hidden_layers": 7, "sliding_window_pattern": 3})
    assert by_period.token_bytes == 2 * layer
    assert by_period.tail_bytes(10_000) == 5 * layer * 512
    assert by_period.tail_bytes(100) == 5 * layer * 100
    late = {**base, "num_hidden_layers": 7, "use_sliding_window": True, "max_window_layers": 5}
    assert shape_of(late).token_bytes == 5 * layer
    everywhere = {**base, "num_hidden_layers": 7, "model_type": "mistral"}
    assert shape_of(everywhere).token_bytes == 0


def test_dtypes() -> None:
    """16 bits unless something else is said; state as the model says."""
    base = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    assert shape_of(base).token_bytes == 2 * 64 * 2
    assert shape_of({**base, "dtype": "float32"}).token_bytes == 2 * 64 * 2
    assert shape_of({**base, "torch_dtype": "torch.float16"}).token_bytes == 2 * 64 * 2
    assert shape_of(base, dtype="float32").token_bytes == 2 * 64 * 4
    assert shape_of(base, dtype="float32", kv_dtype="fp8").token_bytes == 2 * 64
    by_default = shape_of(CONFIGS["nemotron_h"], dtype="bfloat16")
    assert by_default == shape_of(CONFIGS["nemotron_h"], dtype="bfloat16", state_dtype="float32")
    (state,) = (e for e in shape_of(CONFIGS["qwen3_next"]).layers if e.kind is Kind.STATE)
    assert state.state_bytes == 3 * (1024 * 3 * 2 + 65536 * 2)
    says = {**CONFIGS["qwen3_next"], "mamba_ssm_dtype": "float32"}
    (state,) = (e for e in shape_of(says).layers if e.kind is Kind.STATE)
    assert state.state_bytes == 3 * (1024 * 3 * 2 + 65536 * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"layer_types": ["telepathy"] * 2}, "layers of 'telepathy'"),
        ({"model_type": "zamba2"}, "of type zamba2 means that layers keep state"),
        ({"layer_types": ["mamba"] * 2}, "state is of a kind that is not known"),
        ({"compress_ratios": [1, 4]}, "config has compress_ratios"),
        ({"torch_dtype": "int3"}, "is 'int3', whose bytes are not known"),
        ({"layer_types": ["mlp"] * 2}, "no layer of this model keeps anything"),
        ({"layer_types": ["sliding_attention"] * 2}, "attention_chunk_size is missing"),
        ({"sliding_window": 512}, "has sliding_window, and of models of type ''"),
        ({"sliding_window": 512, "sliding_window_pattern": "LX"}, "sliding_window_pattern is 'LX'"),
        ({"attention_chunk_size": 512}, "has attention_chunk_size, and of models of type ''"),
        ({"kv_lora_rank": 512}, "has kv_lora_rank, and of models of type ''"),
        ({"v_head_dim": 32}, "v_head_dim is 32"),
        ({"conv_L_cache": 3}, "conv_L_cache in the model's config says that layers keep state"),
        ({"block_configs": [{}]}, "has block_configs"),
        ({"is_encoder_decoder": True}, "has is_encoder_decoder"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    """In a line that says what to do instead: give the bytes by hand."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, **change}
    with pytest.raises(ConfigError, match=message) as refused:
        shape_of(config)
    assert "--bytes-per-token" in str(refused.value)


def test_a_config_is_found_where_models_lie(tmp_path: Path) -> None:
    """A file, a folder, and the hub's cache."""
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(str(tmp_path), {}) == {"a": 1}
    assert read_config(str(tmp_path / "config.json"), {}) == {"a": 1}
    commit = "0123456789" * 4
    folder = tmp_path / "models--some--model"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "config.json").write_text('{"b": 2}')
    assert read_config("some/model", {"HF_HUB_CACHE": str(tmp_path)}) == {"b": 2}
    for model, message in (
        ("no/such", "is not on this machine"),
        (str(tmp_path / "refs.json"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config(model, {"HF_HUB_CACHE": str(tmp_path)})
    for wrong in ("[1]", "{", "\x00"):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(ConfigError):
            read_config(str(tmp_path), {})
