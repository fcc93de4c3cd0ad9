"""Who may see what: engines on one folder, other weights, and a reset."""

import time
from pathlib import Path

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Engine, Nursery, prompt

ONE, OTHER = prompt(650, seed=500), prompt(650, seed=501)
WHOLE = 650 // BLOCK_TOKENS * BLOCK_TOKENS


def _eventually_loads(engine: Engine, tokens: list[int], within_s: float = 60.0) -> int:
    """Ask until the whole prefix comes from below, as another engine's chunks need a moment."""
    deadline = time.monotonic() + within_s
    while True:
        engine.settle()
        engine.reset()
        (output,) = one_by_one(engine, [tokens])
        if output.external_tokens == WHOLE or time.monotonic() > deadline:
            return output.external_tokens


def test_two_engines_one_folder(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Two engines store at once; each finds what the other stored; one's death is no harm."""
    expected = plain.answers([ONE, OTHER])
    left = nursery.engine("llama", offload(tmp_path))
    right = nursery.engine("llama", offload(tmp_path))
    assert_same(one_by_one(left, [ONE]), expected[:1])
    assert_same(one_by_one(right, [OTHER]), expected[1:])
    left.settle()
    right.settle()
    assert _eventually_loads(right, ONE) == WHOLE
    assert_same(one_by_one(right, [ONE, OTHER]), expected)
    left.kill()
    right.reset()
    assert_same(one_by_one(right, [ONE, OTHER]), expected)
    right.close()
    third = nursery.engine("llama", offload(tmp_path))
    outputs = one_by_one(third, [ONE, OTHER])
    assert_same(outputs, expected)
    assert [output.external_tokens for output in outputs] == [WHOLE, WHOLE]
    third.close()


def test_other_weights_never_meet(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """A model of the same shape with other weights finds nothing of the first, nor harms it."""
    first = nursery.engine("llama", offload(tmp_path))
    one_by_one(first, [ONE])
    first.settle()
    first.close()
    second = nursery.engine("llama_other", offload(tmp_path))
    outputs = one_by_one(second, [ONE])
    assert outputs[0].external_tokens == 0
    assert_same(outputs, plain.answers([ONE], model="llama_other"))
    second.settle()
    second.close()
    third = nursery.engine("llama", offload(tmp_path))
    outputs = one_by_one(third, [ONE])
    assert outputs[0].external_tokens == WHOLE
    assert_same(outputs, plain.answers([ONE]))
    third.close()


def test_reset_forgets_everywhere(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """After a reset of the connector nothing stored before it hits: now, or after a restart."""
    expected = plain.answers([ONE, OTHER])
    engine = nursery.engine("llama", offload(tmp_path))
    one_by_one(engine, [ONE])
    engine.settle()
    engine.reset(connector=True)
    engine.close()
    again = nursery.engine("llama", offload(tmp_path))
    outputs = one_by_one(again, [ONE])
    assert outputs[0].external_tokens == 0, "a restart brought back what was reset"
    assert_same(outputs, expected[:1])
    again.settle()
    again.reset(connector=True)
    assert one_by_one(again, [ONE])[0].external_tokens == 0
    again.settle()
    again.reset()
    outputs = one_by_one(again, [ONE])
    assert outputs[0].external_tokens == WHOLE, "after a reset nothing is stored any more"
    assert_same(outputs, expected[:1])
    again.close()


def test_reset_with_stores_in_flight(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """A reset right behind a prefill, its stores under way: those do not come back either."""
    expected = plain.answers([ONE, OTHER])
    engine = nursery.engine("llama", offload(tmp_path))
    for _ in range(5):
        one_by_one(engine, [ONE])
        engine.reset(connector=True)
        outputs = one_by_one(engine, [OTHER, ONE])
        assert_same(outputs, expected[::-1])
        assert [output.external_tokens for output in outputs] == [0, 0]
        engine.reset(connector=True)
    engine.settle()
    engine.close()
