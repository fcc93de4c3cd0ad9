"""A real engine's own account of what decides its bytes."""

import json
from pathlib import Path

import pytest

from tests.cli.store_rig import run
from tests.engines.vllm.e2e.conftest import Plain, offload, one_by_one
from tests.engines.vllm.lab.engine import Nursery, prompt

LENGTH = 650
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}


def connector(disk: Path) -> dict[str, object]:
    """What a user writes for our connector."""
    extra = {key: value for key, value in offload(disk).items() if not key.startswith("spec_")}
    return {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def test_another_rope_finds_nothing_and_is_named(
    nursery: Nursery,
    plain: Plain,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was stored with other positions is not found, and `explain` says why."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    disk, tokens = tmp_path / "kv", prompt(LENGTH, seed=900)
    disk.mkdir()
    (tmp_path / "prompt").write_text(json.dumps(tokens))
    first = nursery.engine("llama", offload(disk))
    one_by_one(first, [tokens])
    first.settle()
    first.close()

    turned = nursery.engine("llama", None, kv_transfer_config=connector(disk), hf_overrides=ROPE)
    ran = run(capsys, "explain", "--tokens", tmp_path / "prompt", "--path", disk, "--json")
    (other,) = ran.document["elsewhere"]
    assert other["differs"] == (
        "model.facts.model.hf_config.rope_parameters.rope_theta: 20000.0 here, 10000.0 there"
    )
    (output,) = one_by_one(turned, [tokens])
    assert output.external_tokens == 0
    assert output.tokens != plain.answers([tokens])[0].tokens, "the rope changed nothing"
    turned.settle()
    turned.close()

    manifests = [json.loads(path.read_text()) for path in disk.rglob("manifest.json")]
    layers = [manifest["model"]["facts"]["layers"] for manifest in manifests]
    assert [found["backend"] for found in layers] == ["CPU_ATTN", "CPU_ATTN"]
    assert all(found["isa"] for found in layers)
