"""Prefixes larger than host memory: part is reused, nothing is read for nothing, nobody waits."""

from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, LLAMA_CHUNK_BYTES, Nursery, Output, prompt

HOST = "4MiB"
HOST_CHUNKS = 4 * 1024**2 // LLAMA_CHUNK_BYTES
RECORD_BYTES = LLAMA_CHUNK_BYTES + 4096
OTHER_READS = 2 * 1024**2  # this process's other reads: modules, /proc, indexes
DECODER = prompt(20, seed=300)
DECODED = 40


@pytest.mark.parametrize("times_host", [1.5, 4.0])
def test_restore_while_another_decodes(
    nursery: Nursery, plain: Plain, tmp_path: Path, times_host: float
) -> None:
    """A prefix of 1.5 and 4 times host memory, all on disk, beside a request that decodes."""
    num_chunks = int(times_host * HOST_CHUNKS)
    long = prompt(num_chunks * BLOCK_TOKENS + 7, seed=301)
    writer = nursery.engine("llama", offload(tmp_path, host="48MiB"))
    one_by_one(writer, [long])
    writer.settle()
    assert writer.counts()["blocks_stored"] == num_chunks
    writer.close()

    # Loose, for a busy machine, and a few tries; `bench/cases/first_token.py` compares properly.
    # A restore that waits for its deadline fails each of them.
    tries = []
    for _ in range(4):
        took, recomputed = restored_and_recomputed(nursery, plain, tmp_path, long)
        tries.append((took.loaded_s, took.first_token_s, recomputed.first_token_s))
        if (
            took.loaded_s <= recomputed.first_token_s + 0.3
            and took.first_token_s <= 1.5 * recomputed.first_token_s + 0.3
        ):
            return
    raise AssertionError(f"waited longer than recompute (load, first token, recompute): {tries}")


def restored_and_recomputed(
    nursery: Nursery, plain: Plain, disk: Path, long: list[int]
) -> tuple[Output, Output]:
    """What became of `long`, right and read from disk beside a request that decodes; and without
    any offloading."""
    recompute = plain.engine("llama")
    recompute.reset()
    limits, start = [DECODED, 8], {1: (0, 4)}
    expected = recompute.generate([DECODER, long], max_tokens=limits, after_tokens=start)

    engine = nursery.engine("llama", offload(disk, host=HOST))
    one_by_one(engine, [prompt(100, seed=302)])  # first-use costs are not the point here
    engine.settle()
    before = engine.counts()
    outputs = engine.generate([DECODER, long], max_tokens=limits, after_tokens=start)
    after = engine.counts()
    assert_same(outputs, expected)
    loaded = after["blocks_loaded"] - before["blocks_loaded"]
    assert loaded >= HOST_CHUNKS
    assert outputs[1].external_tokens == loaded * BLOCK_TOKENS
    read = after["read_bytes"] - before["read_bytes"]
    assert read >= loaded * LLAMA_CHUNK_BYTES, "the loads did not come from disk"
    assert read <= 1.1 * loaded * RECORD_BYTES + OTHER_READS
    engine.close()
    return outputs[1], expected[1]


def test_many_restores_at_once(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Six prefixes that together need twice host memory: all end, all right, little read twice."""
    num_chunks = HOST_CHUNKS // 3
    prompts = [prompt(num_chunks * BLOCK_TOKENS + 5, seed=320 + i) for i in range(6)]
    expected = plain.answers(prompts)
    writer = nursery.engine("llama", offload(tmp_path, host="48MiB"))
    one_by_one(writer, prompts)
    writer.settle()
    writer.close()
    engine = nursery.engine("llama", offload(tmp_path, host=HOST))
    before = engine.counts()
    outputs = engine.generate(prompts)
    after = engine.counts()
    assert_same(outputs, expected)
    loaded = after["blocks_loaded"] - before["blocks_loaded"]
    assert loaded >= HOST_CHUNKS // 3 * 3
    assert after["read_bytes"] - before["read_bytes"] <= 1.1 * loaded * RECORD_BYTES + OTHER_READS
    engine.close()


def test_one_step_stores_more_than_host(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """One step offers twice the chunks there are slots: what is kept is a prefix, every time."""
    num_chunks = 2 * HOST_CHUNKS
    long = prompt(num_chunks * BLOCK_TOKENS + 7, seed=310)
    expected = plain.answers([long])
    engine = nursery.engine("llama", offload(tmp_path, host=HOST))
    reused = []
    for _ in range(5):
        outputs = one_by_one(engine, [long])
        assert_same(outputs, expected)
        reused.append(outputs[0].external_tokens // BLOCK_TOKENS)
        engine.settle()
        engine.reset()
    assert reused[0] == 0
    assert min(reused[1:]) >= HOST_CHUNKS * 3 // 4, reused
    engine.close()
