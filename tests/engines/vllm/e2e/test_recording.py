"""A real engine's own trace: what its own cache had is in it, and the answers are the same."""

from pathlib import Path

from tests.engines.vllm.e2e.conftest import Plain, assert_same, one_by_one
from tests.engines.vllm.lab.engine import Nursery, prompt
from tests.traces.plain import read


def test_what_the_engines_own_cache_had_is_in_the_trace(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    """The second request is served from vLLM's cache, of which nobody asks us; a third from ours.

    Each has all of its blocks, exact numbers of tokens, and how it ended.
    """
    prompts = [prompt(400, seed=1), prompt(400, seed=1), prompt(500, seed=2, shared=128)]
    prompts.append([*prompts[2][:300], *prompts[0][:100]])
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "32MiB", "record": str(tmp_path / "t")},
    }
    engine = nursery.engine("llama", None, kv_transfer_config=transfer)
    outputs = one_by_one(engine, prompts[:3])
    engine.reset()
    outputs += one_by_one(engine, prompts[3:])
    assert outputs[1].cached_tokens >= 384
    assert outputs[1].external_tokens == 0
    assert outputs[3].external_tokens > 0
    engine.close()
    assert_same(outputs, plain.answers(prompts))
    (file,) = (tmp_path / "t").glob("trace-*")
    found = read(file)
    assert found.header["requests"] == 4
    assert found.blocks == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 6]]
    assert [(line["in"], line["out"]) for line in found.lines] == [
        (400, 8),
        (400, 8),
        (500, 8),
        (400, 8),
    ]
    assert [line["k"] for line in found.lines] == [8] * 4  # length
    times = [line["t"] for line in found.lines]
    assert times == sorted(times)
    assert times[-1] > 0
