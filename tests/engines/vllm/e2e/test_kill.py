"""`kill -9` at any moment, then a restart: it starts, it is right, it remembers."""

import random
import time
from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Nursery, prompt

NUM_KILLS = 20
COMMON = prompt(650, seed=100)


def _shared_memory() -> set[str]:
    """Names of ours; other tests may have folders of their own there."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if "undercroft" in name and "undercroft-test-" not in name}


@pytest.mark.timeout(300)
def test_kill_twenty_times(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Twenty kills while stores and cascades run: no wrong token, no file left behind."""
    before = _shared_memory()
    moments = random.Random(1)
    news = [prompt(650, seed=200 + number) for number in range(NUM_KILLS)]
    common_answer, *new_answers = plain.answers([COMMON, *news])
    hits = []
    for number, new in enumerate(news):
        engine = nursery.engine("llama", offload(tmp_path))
        common = one_by_one(engine, [COMMON])
        assert_same(common, [common_answer])
        hits.append(common[0].cached_tokens)
        if number == 0:
            engine.settle()
        assert_same(one_by_one(engine, [new]), [new_answers[number]])
        time.sleep(moments.uniform(0, 0.05))
        engine.kill()
    whole = len(COMMON) // BLOCK_TOKENS * BLOCK_TOKENS
    assert hits == [0] + [whole] * (NUM_KILLS - 1)
    patience = time.monotonic() + 10
    while _shared_memory() - before and time.monotonic() < patience:
        time.sleep(0.1)  # tests beside this one have regions too, for a moment
    assert _shared_memory() <= before
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert used <= 64 * 1024**2

    survivor = nursery.engine("llama", offload(tmp_path))
    assert_same(one_by_one(survivor, [COMMON, *news]), [common_answer, *new_answers])
    survivor.close()


def test_kill_during_a_load(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """A kill while chunks come up from disk leaves the disk as it was."""
    expected = plain.answers([COMMON])
    first = nursery.engine("llama", offload(tmp_path))
    one_by_one(first, [COMMON])
    first.settle()
    first.kill()
    second = nursery.engine("llama", offload(tmp_path))
    second.begin([COMMON])
    time.sleep(0.01)
    second.kill()
    third = nursery.engine("llama", offload(tmp_path))
    loaded = one_by_one(third, [COMMON])
    assert_same(loaded, expected)
    assert loaded[0].external_tokens == len(COMMON) // BLOCK_TOKENS * BLOCK_TOKENS
    third.close()
