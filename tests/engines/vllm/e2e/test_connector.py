"""`UndercroftConnector` in a real engine: the same answers, whatever its loads do."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one, total
from tests.engines.vllm.lab import adapters
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Engine, Nursery, prompt

PROMPTS = [prompt(650, seed=1), prompt(330, seed=3, shared=320), prompt(1000, seed=4)]
WHOLE_BLOCKS = [len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]


def connected(nursery: Nursery, disk: Path | None = None, **more: Any) -> Engine:
    """An engine set up as the docs say, without spec_name and spec_module_path."""
    settings = offload(disk)
    del settings["spec_name"], settings["spec_module_path"]
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    return nursery.engine("llama", None, kv_transfer_config=transfer, **more)


def test_one_key_space_with_the_plain_spec(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Cold, reset, restarted, and found by an engine with the plain spec: the same answers."""
    expected = plain.answers(PROMPTS)
    first = connected(nursery, tmp_path)
    assert_same(one_by_one(first, PROMPTS), expected)
    first.settle()
    first.reset()
    loaded = one_by_one(first, PROMPTS)
    assert_same(loaded, expected)
    assert [output.cached_tokens for output in loaded] == WHOLE_BLOCKS
    first.close()

    second = connected(nursery, tmp_path)
    restarted = one_by_one(second, PROMPTS)
    assert_same(restarted, expected)
    assert [output.cached_tokens for output in restarted] == WHOLE_BLOCKS
    assert restarted[0].external_tokens == WHOLE_BLOCKS[0]
    second.settle()
    second.reset()
    second.zero_loads(on=True)
    zeroed = one_by_one(second, PROMPTS)
    assert all(a.tokens != b.tokens for a, b in zip(zeroed, expected, strict=True))
    second.close()

    # What the workers tell a plain spec of the model is what the connector sees itself.
    third = nursery.engine("llama", offload(tmp_path))
    assert one_by_one(third, PROMPTS[:1])[0].external_tokens == WHOLE_BLOCKS[0]
    third.close()


@pytest.mark.parametrize("with_disk", [False, True])
def test_failed_loads_are_recomputed(
    nursery: Nursery, plain: Plain, tmp_path: Path, with_disk: bool
) -> None:
    """Some chunks cannot be loaded, then none: right answers from a live engine, and it is seen."""
    expected = plain.answers(PROMPTS)
    engine = connected(nursery, tmp_path if with_disk else None)
    one_by_one(engine, PROMPTS)
    engine.settle()
    engine.reset()

    engine.inside("failing:fail", chunk=7)
    (partly,) = one_by_one(engine, PROMPTS[:1])
    assert_same([partly], expected[:1])
    assert partly.cached_tokens == 7 * BLOCK_TOKENS, "the chunks before the bad one are loaded"
    dropped = total(engine.metrics(), "dropped_chunks_total", "load_failed")
    assert dropped == (2 if with_disk else 1)

    engine.reset()
    num_failures = engine.inside("failing:fail", everything=True)
    assert num_failures >= 2
    computed = one_by_one(engine, PROMPTS)
    assert_same(computed, expected)
    assert all(output.cached_tokens <= 320 for output in computed), "the engine's own hits only"
    assert engine.inside("failing:fail") > num_failures
    metrics = engine.metrics()
    assert total(metrics, "dropped_chunks_total", "load_failed") > dropped
    assert total(metrics, "broken_invariants") == 0
    assert total(metrics, "is_on") == 1

    engine.inside("failing:heal")
    engine.settle()
    engine.reset()
    one_by_one(engine, PROMPTS)
    engine.settle()
    engine.reset()
    again = one_by_one(engine, PROMPTS)
    assert_same(again, expected)
    assert [output.cached_tokens for output in again] == WHOLE_BLOCKS
    engine.close()


def test_a_burst_on_loads_that_fail(nursery: Nursery, plain: Plain) -> None:
    """Many requests on one prefix, whose load fails while the others wait for it."""
    prompts = [prompt(650, seed=60 + number, shared=640) for number in range(6)]
    expected = plain.answers(prompts)
    engine = connected(nursery)
    one_by_one(engine, prompts[:1])
    engine.settle()
    engine.reset()
    engine.inside("failing:fail", chunk=3)
    assert_same(engine.generate(prompts), expected)
    engine.inside("failing:fail", everything=True)
    engine.reset()
    assert_same(engine.generate(prompts), expected)
    engine.close()


def test_an_adapter_overwritten_in_place(nursery: Nursery, tmp_path: Path) -> None:
    """After a restart nothing of its old content is found; with the old files back, all is."""
    folder = tmp_path / "adapter"
    question = {"prompt": PROMPTS[0], "path": str(folder)}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}

    def ask(engine: Engine, adapter_id: int = 1) -> tuple[list[int], int]:
        answer = engine.inside("adapters:ask", adapter_id=adapter_id, **question)
        return answer["tokens"], answer["external_tokens"]

    adapters.make(folder, seed=1)
    first = connected(nursery, tmp_path / "kv", **lora)
    old_answer, hits = ask(first)
    assert hits == 0
    first.settle()
    first.reset()
    assert ask(first) == (old_answer, WHOLE_BLOCKS[0])
    first.close()

    adapters.make(folder, seed=2)
    second = connected(nursery, tmp_path / "kv", **lora)
    new_answer, hits = ask(second)
    assert hits == 0
    assert new_answer != old_answer
    second.settle()
    second.reset()
    assert ask(second) == (new_answer, WHOLE_BLOCKS[0])
    adapters.make(folder, seed=1)
    second.reset()
    assert ask(second)[1] == 0, "the engine may still compute with the new files"
    second.reset()
    assert ask(second, adapter_id=2) == (old_answer, WHOLE_BLOCKS[0])
    second.close()
