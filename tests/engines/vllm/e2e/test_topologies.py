"""Real engines of several ranks: what they load is what they computed, and others load it too."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import offload
from tests.engines.vllm.lab.engine import prompt
from tests.engines.vllm.lab.topologies import PHASES, run

pytestmark = pytest.mark.slow

PROMPTS = [prompt(650, seed=1), prompt(650, seed=2, shared=320), prompt(330, seed=3, shared=320)]

OURS = {
    "kv_connector": "UndercroftConnector",
    "kv_connector_module_path": "undercroft.engines.vllm",
    "kv_role": "kv_both",
}
"""Which alone sees the tensors of stages of several ranks."""


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def _key_space(log: str) -> str:
    found = re.search(r"ready: key space (\w+)", log)
    assert found, log[-4000:]
    return found[1]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {"enforce_eager": False}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"enforce_eager": False}),
    ],
    ids=["tp2", "pp2", "tp2-pp2"],
)
def test_what_several_ranks_store_one_rank_loads(
    tmp_path: Path, ranks: dict[str, int], more: dict[str, Any]
) -> None:
    """Loaded equals fresh, zeroed loads do not; one rank finds the same chunks on the same disk."""
    (tmp_path / "kv").mkdir()
    extra = offload(tmp_path / "kv")
    if len(ranks) > 1:
        more = more | {"kv_transfer_config": OURS | {"kv_connector_extra_config": extra}}
    several, log = run("llama", extra, PROMPTS, PHASES, tmp_path, **ranks, **more)
    assert _tokens(several["loaded"]) == _tokens(several["fresh"])
    assert [answer["cached_tokens"] for answer in several["loaded"]] == [640, 640, 320]
    assert all(
        a != b for a, b in zip(_tokens(several["zeroed"]), _tokens(several["fresh"]), strict=True)
    )
    assert "Traceback" not in log

    one, log_of_one = run("llama", extra, PROMPTS, ["fresh"], tmp_path)
    assert _key_space(log_of_one) == _key_space(log)
    assert _tokens(one["fresh"]) == _tokens(several["fresh"])
    assert [answer["cached_tokens"] for answer in one["fresh"]] == [640, 640, 320]
