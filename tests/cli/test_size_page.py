"""The numbers of docs/how-to/size-it.md are what `doctor` and the library come to."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.rig import ROOT
from tests.engines.vllm.lab.engine import environment
from undercroft.cli.check_engine import check_model, geometry_of, look_at
from undercroft.cli.flags import Asked
from undercroft.engines.assemble import _NUM_THREADS, _NUM_THREADS_SMALL, tokens_that_fit
from undercroft.settings import format_bytes, load, parse_size
from undercroft.settings.schema import ENGINE_KEYS

PAGE = (ROOT / "docs" / "how-to" / "size-it.md").read_text()
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}


def rows() -> list[tuple[str, int, str, int]]:
    """Model, bytes a token by the formula, and the two last columns as written."""
    found = re.findall(
        r"^\| ([^|]+) \| (\d+) \| ([\dx+ ]+) \| (\d) \| ([\d.]+) KiB \| ([\d,]+) \|$",
        PAGE,
        re.MULTILINE,
    )
    return [
        (
            name,
            int(layers) * eval(elements.replace("x", "*")) * int(size),
            shown,
            int(tokens.replace(",", "")),
        )
        for name, layers, elements, size, shown, tokens in found
    ]


def test_the_table_adds_up() -> None:
    """Layers times elements times bytes; and what 64 GiB hold of it."""
    assert len(rows()) >= 4
    for name, token_bytes, shown, tokens in rows():
        assert float(shown) == round(token_bytes / 1024, 1), name
        assert tokens == 64 * 1024**3 // token_bytes, name


@pytest.mark.engine
def test_vllm_comes_to_the_same_bytes_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row, as vLLM and our spec foresee it from the model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    transfer = {"kv_connector": "UndercroftConnector", "kv_role": "kv_both"}
    transfer["kv_connector_module_path"] = "undercroft.engines.vllm"
    extra = {"kv_connector_extra_config": {"host": "64GiB"}}
    words = [str(tmp_path), "--max-model-len", "32768"]
    look = look_at([*words, "--kv-transfer-config", json.dumps(transfer | extra)])
    geometry = geometry_of(look)
    assert geometry is not None, look
    name, token_bytes, _, tokens = rows()[0]
    assert name == "Qwen3-8B"
    assert geometry.chunk_bytes[0] == token_bytes * geometry.tokens_per_chunk[0]
    assert tokens_that_fit(geometry, 64 * 1024**3) == tokens


def test_the_line_of_doctor_is_what_it_says() -> None:
    """For blocks of 16 tokens, as on GPUs."""
    (words,) = re.findall(r"^undercroft doctor (Qwen.*)$", PAGE, re.MULTILINE)
    host, disk = re.findall(r"--host (\w+) --disk /nvme/kv:(\w+)", words)[0]
    tier = {"type": "disk", "path": "/nvme/kv", "capacity": disk}
    settings = load({"host": host, "tiers": [tier]})
    look = {
        "dtype": "bfloat16",
        "block_tokens": 16,
        "max_model_tokens": 32768,
        "replicas": 1,
        "prefix_caching": True,
        "chunk": {"bytes": 16 * rows()[0][1], "tokens": 16},
    }
    found = [f.message for f in check_model(Asked("Qwen/Qwen3-8B", {}, ()), settings, look)]
    (shown,) = re.findall(r"^ok +model +(host about .*)$", PAGE, re.MULTILINE)
    assert shown in found


def test_tokens_a_second_of_a_disk() -> None:
    """Bandwidth over bytes a token, rounded down."""
    table = re.findall(r"^\| (\d+) GB/s \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(table) >= 3
    for bandwidth, shown in table:
        assert int(shown.replace(",", "")) == int(int(bandwidth) * 1e9 / rows()[0][1])


def test_defaults_are_what_they_are() -> None:
    """Threads, blocks a chunk, the write budget, and the example of small chunks."""
    assert (
        f"`num_threads` of a disk is {_NUM_THREADS_SMALL} for chunks below 1 MiB, else "
        + str(_NUM_THREADS)
        in PAGE
    )
    assert f"`blocks_per_chunk` ({ENGINE_KEYS['blocks_per_chunk'].default})" in PAGE
    settings = load({"host": "64GiB"})
    assert settings.max_queued_write_bytes * 4 == settings.host_bytes
    a_token, small, large = re.findall(
        r"(\d+) KiB\s+a token in blocks of 16 has chunks of (\d+) KiB; 4 blocks make (\d+) KiB",
        PAGE,
    )[0]
    assert int(a_token) * 16 == int(small)
    assert int(small) * 4 == int(large)
    assert parse_size("256KiB", "") < int(large) * 1024 < parse_size("4MiB", "")
    assert format_bytes(16 * rows()[0][1]) == "2.25 MiB"
