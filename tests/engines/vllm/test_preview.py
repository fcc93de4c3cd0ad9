"""The size of a chunk that doctor foresees is the one that an engine has."""

import json
from pathlib import Path
from typing import Any

import pytest
from shapes import SMALL_LLAMA

from undercroft.engines.vllm import preview

PAGE_BYTES = 64 * 64 * 2 * 2
"""Of one layer and head: 64 tokens, 64 elements of a key and a value each, two bytes an element."""


@pytest.mark.parametrize(
    ("tp", "pp", "more", "num_heads"),
    [
        (1, 1, {}, 2),
        (2, 1, {}, 2),
        (4, 1, {}, 4),
        (4, 1, {"canonical_layout": True}, 2),
        (2, 2, {}, 2),
        (4, 2, {"canonical_layout": True}, 4),
    ],
    ids=["one", "two", "each its copy", "one copy", "stages", "stages, each its copy"],
)
def test_bytes_of_a_chunk(tmp_path: Path, tp: int, pp: int, more: Any, num_heads: int) -> None:
    """Two KV heads: of four ranks two have each, and canonical pages have each once."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "16MiB", **more},
    }
    sizes = ["--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)]
    words = ["--kv-transfer-config", json.dumps(transfer), "--block-size", "64", *sizes]
    found = preview.preview([str(tmp_path), *words])
    assert found["refused"] is None
    assert found["chunk"] == {"tokens": 64, "bytes": 2 * num_heads * PAGE_BYTES}
