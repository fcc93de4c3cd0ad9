"""The engine case: what it asks, what it takes for the same answer, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.lab.models import model_path

from cases.engine import Answers, Sizes, Texts

ROOT = Path(__file__).parents[2]


def _answer(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": logprobs}


def _compare(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    answers = Answers()
    answers.take("round 0", [one])
    answers.take("round 0", [two])


def test_wrong_answers_end_the_run() -> None:
    """Another token is an error, however sure of it the engine was before or after."""
    right = _answer([1, 2, 3], [-0.1, -0.2, -0.3])
    _compare([right], [right])
    for wrong in (
        _answer([1, 7, 3], [-0.1, -0.5, -0.3]),
        _answer([1, 7, 3], [-0.9, -0.2, -0.3]),
        _answer([1, 2, 7], [-0.1, -0.3, -0.3]),
    ):
        with pytest.raises(SystemExit, match="round 0, client 0, turn 1"):
            _compare([right, right], [right, wrong])


def test_a_tie_may_go_either_way_and_ends_the_comparison() -> None:
    """As likely but for rounding: what follows in that conversation has another history."""
    one = _answer([1, 2, 3], [-0.1, -0.7, -0.3])
    two = _answer([1, 7, 4], [-0.1, -0.7001, -2.3])
    _compare([one, one], [two, _answer([9, 9, 9], [-5.0, -5.0, -5.0])])


@pytest.mark.parametrize("workload", ["cold", "chat", "documents"])
def test_prompts_repeat_within_a_round_only_where_meant(workload: str) -> None:
    """The same for both engines, new in every round, and told apart in the first block."""
    texts = Texts(model_path("llama"))
    sizes = Sizes()
    asked = {seed: texts.clients(workload, sizes, seed) for seed in ("0", "1")}
    assert texts.clients(workload, sizes, "0") == asked["0"]
    first_blocks = {
        seed: [tuple(text[:32]) for client in clients for _, text in client]
        for seed, clients in asked.items()
    }
    assert not set(first_blocks["0"]) & set(first_blocks["1"])
    num_repeated = len(first_blocks["0"]) - len(set(first_blocks["0"]))
    expected = sizes.num_documents * (sizes.num_questions - 1) if workload == "documents" else 0
    assert num_repeated == expected


@pytest.mark.engine
def test_the_case_runs_on_real_engines(tmp_path: Path) -> None:
    """In small, with the same answers; ours spares most of what is sent again, and can fail to."""
    results = tmp_path / "results.json"
    command = [sys.executable, "bench/run.py", "engine", "--quick", "--rounds", "1"]
    command += ["--path", str(tmp_path), "--json", str(results)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (measured,) = json.loads(results.read_text())["cases"]["engine"]["measured"]
    assert measured["on"]["chat cached"] > 0.5
    assert measured["on"]["documents cached"] > 0.5
    assert measured["on"]["cold cached"] == 0
    assert measured["off"]["chat loaded"] == measured["off"]["documents loaded"] == 0
    assert measured["off"]["chat cached"] < 0.3
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
