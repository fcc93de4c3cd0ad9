"""`undercroft serve` as a user types it: doctor, a real vLLM, chunks on disk, `top` beside it."""

from __future__ import annotations

import pytest

from tests.cli.rig import undercroft_json
from tests.engines.vllm.e2e.conftest import total
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, prompt
from tests.engines.vllm.lab.server import Server

TOKENS = prompt(650, seed=601)
WHOLE = 650 // BLOCK_TOKENS * BLOCK_TOKENS


def counted(server: Server) -> tuple[float, float]:
    """Chunks that were hits, and bytes that were loaded."""
    metrics = server.metrics()
    loaded = sum(v for k, v in metrics.items() if "kv_offload_load_bytes_total" in k)
    return total(metrics, "lookups", "hit"), loaded


@pytest.mark.timeout(400)
def test_serve_starts_vllm_which_stores_and_loads(served: Server) -> None:
    """Cold, own cache, loaded, reset: the same text each time; counters and `top` say it all."""
    assert "undercroft: nothing is in the way, starting vLLM" in served.log_text()
    before = counted(served)
    cold = served.complete(TOKENS, max_tokens=16)
    assert cold["num_pieces"] > 1, "not streamed"
    own = served.complete(TOKENS, max_tokens=16)
    served.reset()
    loaded = served.complete(TOKENS, max_tokens=16)
    assert (cold["cached_tokens"], loaded["cached_tokens"]) == (0, WHOLE)
    after = counted(served)
    assert after[0] - before[0] >= WHOLE // BLOCK_TOKENS
    assert after[1] > before[1]
    url = f"http://127.0.0.1:{served.port}/metrics"
    shown = undercroft_json("top", "--url", url, "--interval", "0.5")
    served.reset(connector=True)
    forgotten = served.complete(TOKENS, max_tokens=16)
    assert forgotten["cached_tokens"] == 0
    assert {answer["text"] for answer in (own, loaded, forgotten)} == {cold["text"]}
    host, below = shown["levels"]
    assert (host["name"], host["capacity_bytes"]) == ("host", 2 * 1024**2)
    assert (below["name"], below["is_usable"]) == ("disk", True)
    assert host["resident_bytes"] > 0
    assert below["capacity_bytes"] == 64 * 1024**2
    assert 0 < shown["hit_ratio_since_start"] <= 1
    assert shown["is_on"]
    slabs = list((served.folder / "kv").glob("undercroft-v1/*/seg-*.slab"))
    assert slabs, "nothing was kept on disk"
