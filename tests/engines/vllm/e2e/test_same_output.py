"""Loaded KV gives the output that computed KV gives."""

from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import SIZES, Plain, assert_same, offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Nursery, prompt

PROMPTS = [
    prompt(650, seed=1),
    prompt(650, seed=2, shared=320),
    prompt(330, seed=3, shared=320),
    prompt(1000, seed=4),
]
WHOLE_BLOCKS = [len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_host_memory(nursery: Nursery, plain: Plain, model: str) -> None:
    """Fresh, from the engine's own cache and loaded agree; with zeroed loads they do not."""
    expected = plain.answers(PROMPTS, model=model)
    engine = nursery.engine(model, offload(), **SIZES.get(model, {}))
    assert_same(one_by_one(engine, PROMPTS), expected)
    assert_same(one_by_one(engine, PROMPTS), expected)
    assert engine.counts()["loads"] == 0

    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, PROMPTS)
    assert_same(loaded, expected)
    assert [output.cached_tokens for output in loaded] == WHOLE_BLOCKS
    assert loaded[0].external_tokens == WHOLE_BLOCKS[0]

    engine.reset()
    engine.zero_loads(on=True)
    zeroed = one_by_one(engine, PROMPTS)
    assert engine.counts()["pages_zeroed"] > 0
    for number, (output, wanted) in enumerate(zip(zeroed, expected, strict=True)):
        assert output.tokens != wanted.tokens, f"prompt {number} does not depend on its KV"
    engine.close()


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_prompt_lengths_around_a_chunk(
    nursery: Nursery, plain: Plain, blocks_per_chunk: int
) -> None:
    """Prompts one token shorter, as long as, and one longer than whole chunks; chunks of blocks."""
    chunk = blocks_per_chunk * BLOCK_TOKENS
    prompts = [prompt(4 * chunk + more, seed=10 + more) for more in (-1, 0, 1, BLOCK_TOKENS)]
    expected = plain.answers(prompts)
    engine = nursery.engine("llama", offload(blocks_per_chunk=blocks_per_chunk))
    one_by_one(engine, prompts)
    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, prompts)
    assert_same(loaded, expected)
    whole = [len(tokens) // chunk for tokens in prompts]
    assert [output.external_tokens // chunk for output in loaded] == whole
    engine.close()


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_disk_after_restart(nursery: Nursery, plain: Plain, tmp_path: Path, model: str) -> None:
    """A new process finds on disk what an ended one stored, for one group and for several."""
    expected = plain.answers(PROMPTS, model=model)
    first = nursery.engine(model, offload(tmp_path), **SIZES.get(model, {}))
    one_by_one(first, PROMPTS)
    first.settle()
    first.close()

    second = nursery.engine(model, offload(tmp_path), **SIZES.get(model, {}))
    loaded = one_by_one(second, PROMPTS)
    assert_same(loaded, expected)
    assert [output.cached_tokens for output in loaded] == WHOLE_BLOCKS
    assert loaded[0].external_tokens == WHOLE_BLOCKS[0]

    second.settle()
    second.reset()
    second.zero_loads(on=True)
    zeroed = one_by_one(second, PROMPTS)
    assert all(a.tokens != b.tokens for a, b in zip(zeroed, expected, strict=True))
    second.close()


def test_disk_hit_takes_two_lookups(nursery: Nursery, tmp_path: Path) -> None:
    """A prefix on disk is PENDING once, then HIT."""
    first = nursery.engine("llama", offload(tmp_path))
    one_by_one(first, PROMPTS[:1])
    first.settle()
    first.close()
    second = nursery.engine("llama", offload(tmp_path))
    (loaded,) = one_by_one(second, PROMPTS[:1])
    assert loaded.external_tokens == WHOLE_BLOCKS[0]
    pending = loaded.lookups - 1
    assert pending >= 1, "nothing can be read within the step that asks for it"
    # Each further lookup is a step that came before the disk had answered (1 ms apart).
    assert pending <= 2 + 1000 * loaded.first_token_s
    second.close()


def test_generated_tokens_too(nursery: Nursery, plain: Plain) -> None:
    """With offload_prompt_only off, a second turn loads the first turn's answer as well."""
    question = prompt(330, seed=20)
    (answer,) = plain.answers([question], max_tokens=100)
    second_turn = question + list(answer.tokens) + prompt(40, seed=21)
    expected = plain.answers([second_turn])
    engine = nursery.engine("llama", offload(offload_prompt_only=False))
    engine.generate([question], max_tokens=100)
    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, [second_turn])
    assert_same(loaded, expected)
    assert loaded[0].external_tokens >= (330 + 99) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.close()
