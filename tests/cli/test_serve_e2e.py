"""`undercroft serve` as a user types it: doctor, a real vLLM, chunks on disk, `top` beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.rig import undercroft_json
from tests.engines.vllm.e2e.conftest import total
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
    """Cold, own cache, loaded, reset: the same text each time; counters and `top` say it all."""
    disk = tmp_path / "kv"
    disk.mkdir()
    with Served(tmp_path, {"host": "32MiB", "disk": f"{disk}:64MiB"}) as server:
        assert "undercroft: nothing is in the way, starting vLLM" in server.log_text()
        cold = server.complete(TOKENS, max_tokens=16)
        assert cold["num_pieces"] > 1, "not streamed"
        own = server.complete(TOKENS, max_tokens=16)
        server.reset()
        loaded = server.complete(TOKENS, max_tokens=16)
        assert (cold["cached_tokens"], loaded["cached_tokens"]) == (0, WHOLE)
        metrics = server.metrics()
        assert total(metrics, "lookups", "hit") >= WHOLE // BLOCK_TOKENS
        assert sum(v for k, v in metrics.items() if "kv_offload_load_bytes_total" in k) > 0
        url = f"http://127.0.0.1:{server.port}/metrics"
        shown = undercroft_json("top", "--url", url, "--interval", "0.5")
        server.reset(connector=True)
        forgotten = server.complete(TOKENS, max_tokens=16)
        assert forgotten["cached_tokens"] == 0
        assert {answer["text"] for answer in (own, loaded, forgotten)} == {cold["text"]}
        assert "Traceback" not in server.log_text()
        assert server.stop() == 0
    # While stopping, vLLM's API server may notice that its engine core has gone, and say so at
    # length; the engine core, where we live, has nothing to complain of.
    lines = server.log_text().splitlines()
    assert not [x for x in lines if "Traceback" in x and "APIServer" not in x]
    host, below = shown["levels"]
    assert (host["name"], host["capacity_bytes"]) == ("host", 32 * 1024**2)
    assert (below["name"], below["is_usable"]) == ("disk", True)
    assert host["resident_bytes"] > 0
    assert below["capacity_bytes"] == 64 * 1024**2
    assert 0 < shown["hit_ratio_since_start"] <= 1
    assert shown["is_on"]
    assert list(disk.glob("undercroft-v1/*/seg-*.slab")), "nothing was kept on disk"
