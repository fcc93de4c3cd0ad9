"""The self-check in a real engine with recurrent state: speaks of a true cause, and only then."""

import pytest

from tests.engines.vllm.e2e.conftest import offload, one_by_one
from tests.engines.vllm.lab.cases import HYBRID
from tests.engines.vllm.lab.engine import Engine, Nursery, prompt

pytestmark = pytest.mark.slow

BLOCK = 128
"""Of the tiny LFM2: two layers of attention, and so many tokens as a state takes bytes."""
SAID = "nothing was served from the cache for the last"


def ask_again_and_again(engine: Engine, num_tokens: int) -> int:
    """Two prompts, six times, the engine's cache emptied before each; how many tokens are found."""
    prompts = [prompt(num_tokens, seed=seed) for seed in (1, 2)]
    found = []
    for _ in range(6):
        engine.settle()
        engine.reset()
        found.append(sum(output.external_tokens for output in one_by_one(engine, prompts)))
    assert found[0] == 0
    return sum(found)


@pytest.mark.parametrize("is_stored_at_chunk_ends", [True, False])
def test_state_of_a_hybrid(nursery: Nursery, is_stored_at_chunk_ends: bool) -> None:
    """vLLM keeps a prompt's state at its last whole block: if no chunk ends there, none is kept."""
    settings = offload(blocks_per_chunk=2)
    engine = nursery.engine("lfm2", settings, **HYBRID)
    facts = engine.inside("groups:describe")
    assert {group["tokens_per_chunk"] for group in facts["groups"]} == {2 * BLOCK}
    engine.inside("hurry:self_check", times=60)
    before = len(nursery.log_text())
    num_tokens = (4 if is_stored_at_chunk_ends else 5) * BLOCK + 20
    found = ask_again_and_again(engine, num_tokens)
    engine.settle()
    told = engine.inside("hurry:told")
    engine.close()
    said = [line for line in nursery.log_text()[before:].splitlines() if SAID in line]
    if is_stored_at_chunk_ends:
        assert found == 2 * 5 * 4 * BLOCK
        assert told["requests"] == {"new": 2, "served": 10}
        assert (said, told["warnings"]) == ([], {})
        return
    assert found == 0
    assert told["requests"]["group"] >= 5
    assert told["warnings"] == {"group": 1}
    (line,) = said
    assert "has made a miss of all" in line
    assert "the engine never offered a chunk of it; set blocks_per_chunk to 1" in line
