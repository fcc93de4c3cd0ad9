"""The disk's mover process on a real engine: same answers, before and after its death."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Nursery, prompt

PROMPTS = [prompt(650, seed=number + 70) for number in range(4)]
WHOLE_BLOCKS = 650 // BLOCK_TOKENS * BLOCK_TOKENS


def by_process(folder: Path) -> dict[str, Any]:
    given = offload(folder)
    (tier,) = given["tiers"]
    return {**given, "tiers": [tier | {"mover_process": True}]}


@pytest.mark.timeout(300)
def test_same_answers_while_it_lives_and_after_it_was_killed(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    expected = plain.answers(PROMPTS)
    said_before = len(nursery.log_text())  # by the engines of other tests
    engine = nursery.engine("llama", by_process(tmp_path))
    pid = engine.inside("storm:mover_process")["pid"]
    assert_same(one_by_one(engine, PROMPTS), expected)
    engine.settle()
    engine.close()
    assert not Path(f"/proc/{pid}").exists()

    engine = nursery.engine("llama", by_process(tmp_path))  # its host memory is empty
    pid = engine.inside("storm:mover_process")["pid"]
    loaded = one_by_one(engine, PROMPTS[:2])
    assert_same(loaded, expected[:2])
    assert [output.external_tokens for output in loaded] == [WHOLE_BLOCKS] * 2
    os.kill(pid, signal.SIGKILL)
    loaded = one_by_one(engine, PROMPTS[2:])
    assert_same(loaded, expected[2:])
    assert [output.external_tokens for output in loaded] == [WHOLE_BLOCKS] * 2
    assert engine.inside("storm:mover_process")["num_deaths"] == 1
    assert engine.inside("storm:mover_process")["pid"] not in {None, pid}
    pid = engine.inside("storm:mover_process")["pid"]
    engine.kill()
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, "it outlives its engine"
        time.sleep(0.01)
    assert "Traceback" not in nursery.log_text()[said_before:]
