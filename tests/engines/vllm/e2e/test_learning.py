"""Eviction that learns, on a real engine: a long generation on a full level."""

from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, LLAMA_CHUNK_BYTES, Nursery, prompt

CHUNKS = 48
LONG_CHUNKS, SHORT_CHUNKS, FILLER_CHUNKS = 24, 2, 6
DECODED = 60


@pytest.mark.parametrize("where", ["host", "disk"])
def test_what_a_long_generation_began_with_is_not_evicted_first(
    nursery: Nursery, plain: Plain, tmp_path: Path, where: str
) -> None:
    """It decodes for 60 steps while others come and go, and the level is full.

    Then all of its prompt is there still, and right; of the disk, in the next process.
    """
    long = prompt(LONG_CHUNKS * BLOCK_TOKENS + 3, seed=500)
    fillers = [prompt(FILLER_CHUNKS * BLOCK_TOKENS + 3, seed=501 + number) for number in range(8)]
    others = [prompt(SHORT_CHUNKS * BLOCK_TOKENS + 3, seed=520 + number) for number in range(10)]
    arrivals = {1 + number: (0, 12 + 4 * number) for number in range(len(others))}
    limits = [DECODED, *([1] * len(others))]
    expected = plain.engine("llama")
    expected.reset()
    wanted = expected.generate([long, *others], max_tokens=limits, after_tokens=arrivals)
    small = CHUNKS * (LLAMA_CHUNK_BYTES + 4096)
    if where == "host":
        extra = offload(host=f"{small // 1024}KiB", policy="hazard")
    else:
        tier = {"type": "disk", "path": str(tmp_path), "capacity": small, "policy": "hazard"}
        extra = offload(host="32MiB", policy="hazard", tiers=[tier])
    engine = nursery.engine("llama", extra)
    one_by_one(engine, fillers)
    engine.settle()
    outputs = engine.generate([long, *others], max_tokens=limits, after_tokens=arrivals)
    engine.settle()
    assert_same(outputs, wanted)
    census = engine.inside("storm:census")
    assert census["evicted"].get(where, 0) > len(others), "the level was not full"
    assert census["broken_invariants"] == 0
    if where == "disk":
        # What is lost while it is in host memory still is written again at the request's end.
        num_chunks = 8 * FILLER_CHUNKS + LONG_CHUNKS + len(others) * SHORT_CHUNKS
        assert census["cascaded"]["disk"] == num_chunks, "chunks were written twice"
        engine.close()
        engine = nursery.engine("llama", extra)
    else:
        engine.reset()
    (again,) = engine.generate([long], max_tokens=DECODED)
    assert_same([again], wanted[:1])
    assert again.external_tokens == LONG_CHUNKS * BLOCK_TOKENS
    engine.close()


def test_what_vllm_serves_from_its_own_cache_is_a_use(nursery: Nursery) -> None:
    """Nobody asks us for it, nothing of it is stored again, and the policy hears of it."""
    engine = nursery.engine("llama", offload(host="32MiB", policy="hazard"))
    before = engine.inside("storm:learned")
    tokens = prompt(10 * BLOCK_TOKENS + 3, seed=540)
    outputs = one_by_one(engine, [tokens] * 6)
    engine.settle()
    assert [output.cached_tokens for output in outputs[1:]] == [10 * BLOCK_TOKENS] * 5
    assert [output.external_tokens for output in outputs] == [0] * 6
    after = engine.inside("storm:learned")
    assert after["requests"] - before["requests"] == 6
    assert after["most_sights"] >= 6
    assert engine.counts()["blocks_stored"] == 10
    engine.close()
