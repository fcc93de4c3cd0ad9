"""`vllm serve` with our offloading, as a user starts it: streaming answers and /metrics."""

from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import offload, total
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, prompt
from tests.engines.vllm.lab.server import Server

TOKENS = prompt(650, seed=600)
WHOLE = 650 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.timeout(300)
def test_serve_streams_loads_and_counts(tmp_path: Path) -> None:
    """Cold, own cache, loaded, reset: same text each time; counters say what happened."""
    with Server(tmp_path, offload(tmp_path / "kv")) as server:
        cold = server.complete(TOKENS, max_tokens=16)
        assert cold["cached_tokens"] == 0
        assert cold["num_pieces"] > 1, "not streamed"
        own = server.complete(TOKENS, max_tokens=16)
        server.reset()
        loaded = server.complete(TOKENS, max_tokens=16)
        assert (own["text"], loaded["text"]) == (cold["text"], cold["text"])
        assert loaded["cached_tokens"] == WHOLE
        metrics = server.metrics()
        assert total(metrics, "hit") >= WHOLE // BLOCK_TOKENS
        assert sum(v for k, v in metrics.items() if "kv_offload_load_bytes_total" in k) > 0
        server.reset(connector=True)
        forgotten = server.complete(TOKENS, max_tokens=16)
        assert forgotten["cached_tokens"] == 0
        assert forgotten["text"] == cold["text"]
        assert "Traceback" not in server.log_text()
        assert server.stop() == 0
    # While stopping, vLLM's API server may notice that its engine core has gone, and say so at
    # length; the engine core, where we live, has nothing to complain of.
    lines = server.log_text().splitlines()
    assert not [x for x in lines if "Traceback" in x and "APIServer" not in x]
