"""`undercroft serve` as a user types it: doctor, a real vLLM, chunks on disk, `top` beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.rig import undercroft_json
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, prompt
from tests.engines.vllm.lab.server import Server

pytestmark = pytest.mark.engine

TOKENS = prompt(650, seed=601)
WHOLE = 650 // BLOCK_TOKENS * BLOCK_TOKENS


class Served(Server):
    """The same server, started by our command."""

    def _command(self, model: str, offload: dict[str, Any]) -> list[str]:
        words = ["--host", offload["host"], "--disk", offload["disk"], "--set", "policy=arc"]
        return [sys.executable, "-m", "undercroft", "serve", model, *words, *self._options()]


@pytest.mark.timeout(300)
def test_serve_starts_vllm_which_stores_and_loads(tmp_path: Path) -> None:
    """Doctor finds nothing in the way; the prompt comes back from the connector; top shows it."""
    disk = tmp_path / "kv"
    disk.mkdir()
    with Served(tmp_path, {"host": "32MiB", "disk": f"{disk}:64MiB"}) as server:
        assert "undercroft: nothing is in the way, starting vLLM" in server.log_text()
        cold = server.complete(TOKENS, max_tokens=16)
        server.reset()
        loaded = server.complete(TOKENS, max_tokens=16)
        assert (cold["cached_tokens"], loaded["cached_tokens"]) == (0, WHOLE)
        assert loaded["text"] == cold["text"]
        url = f"http://127.0.0.1:{server.port}/metrics"
        shown = undercroft_json("top", "--url", url, "--interval", "0.5")
        assert server.stop() == 0
    host, below = shown["levels"]
    assert (host["name"], host["capacity_bytes"]) == ("host", 32 * 1024**2)
    assert (below["name"], below["is_usable"]) == ("disk", True)
    assert host["resident_bytes"] > 0
    assert below["capacity_bytes"] == 64 * 1024**2
    assert 0 < shown["hit_ratio_since_start"] <= 1
    assert shown["is_on"]
    assert list(disk.glob("undercroft-v1/*/seg-*.slab")), "nothing was kept on disk"
