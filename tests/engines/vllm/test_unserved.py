"""Engines that would answer wrongly are refused; those that answer rightly are not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shapes import SMALL_LLAMA
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from undercroft.engines.vllm import preview, unserved
from undercroft.errors import ConfigError


def config(*, cache_dtype: str = "auto", use_mla: bool = False, backend: Any = None) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(use_mla=use_mla),
        attention_config=SimpleNamespace(backend=backend),
    )


def has_tiles(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: answer)


@pytest.mark.parametrize("cache_dtype", ["int8", "int4", "fp8"])
def test_scales_by_token_and_head(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on CPUs, by the name that the user wrote; not where kernels know the type."""
    given = config(cache_dtype=f"{cache_dtype}_per_token_head")
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {cache_dtype}_per_token_head"):
        unserved.check_attention(given)
    monkeypatch.setattr(unserved, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    unserved.check_attention(given)


@pytest.mark.parametrize(
    ("tiles", "backend", "served"),
    [
        (True, None, True),
        (True, AttentionBackendEnum.CPU_MLA, False),
        (False, None, False),
        (False, AttentionBackendEnum.CPU_MLA, False),
    ],
)
def test_latents(monkeypatch: pytest.MonkeyPatch, tiles: bool, backend: Any, served: bool) -> None:
    """As vLLM chooses: its kernels with AMX go on from a prefix, its plain ones do not."""
    has_tiles(monkeypatch, tiles)
    reason = unserved.wrong_attention(config(use_mla=True, backend=backend))
    assert (reason is None) == served


def test_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain attention, fp8 with one scale, and engines that do not tell."""
    has_tiles(monkeypatch, False)
    for given in (config(), config(cache_dtype="fp8"), None):
        unserved.check_attention(given)


def test_doctor_foresees_it(tmp_path: Path) -> None:
    """In seconds, with the line that an engine shows only after its weights are loaded."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "16MiB"},
    }
    words = [str(tmp_path), "--kv-transfer-config", json.dumps(transfer)]
    assert preview.preview(words)["refused"] is None
    refused = preview.preview([*words, "--kv-cache-dtype", "int8_per_token_head"])["refused"]
    assert refused.startswith("not served: --kv-cache-dtype int8_per_token_head")


def test_int8_writes_over_the_next_block() -> None:
    """Why it is refused: a token of block 0 changes block 1. When this fails, serve it."""
    from vllm import _custom_ops as operators

    tensor = torch.zeros((3, 2, 32, 64), dtype=torch.int8)
    keys, values = tensor.view((3, 2, 64, -1)).chunk(2, dim=2)
    token = torch.ones((1, 2, 32), dtype=torch.bfloat16)
    slot = torch.tensor([0])
    operators.cpu_attn_reshape_and_cache(
        token, token, keys, values, slot, "vec16",
        k_scale=1.0, v_scale=1.0, kv_cache_dtype="int8_per_token_head",
    )  # fmt: skip
    assert tensor[1].any()
