"""One nursery of engines and one plain engine to compare with, for all tests of this folder."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery, Output
from tests.engines.vllm.lab.server import Server

HERE = Path(__file__).parent
LOGPROB_TOLERANCE = 1e-3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here runs a real engine."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    folder = Path(tempfile.mkdtemp(prefix="uc-"))  # short: a unix socket lies in it
    with Nursery(folder) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server, started by our command, with 32 chunks of host memory above a disk.

    At the end it has to stop well.
    """
    folder = tmp_path_factory.mktemp("served")
    (folder / "kv").mkdir()
    disk = {"type": "disk", "path": str(folder / "kv"), "capacity": "64MiB", "write_budget": "1TiB"}
    words = ["--host", "2MiB", "--set", f"tiers={json.dumps([disk])}", "--set", "policy=arc"]
    with Server(folder, words) as server:
        yield server
        assert "Traceback" not in server.log_text()
        assert server.stop() == 0
    # While stopping, vLLM's API server may notice that its engine core has gone, and say so at
    # length; the engine core, where we live, has nothing to complain of.
    lines = server.log_text().splitlines()
    assert not [line for line in lines if "Traceback" in line and "APIServer" not in line]


class Plain:
    """What vLLM answers without any offloading."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._engines: dict[str, Engine] = {}
        self._known: dict[tuple[Any, ...], Output] = {}

    def engine(self, model: str) -> Engine:
        if model not in self._engines:
            self._engines[model] = self._nursery.engine(model, None, **SIZES.get(model, {}))
        return self._engines[model]

    def answers(
        self, prompts: list[list[int]], *, max_tokens: int = 8, model: str = "llama"
    ) -> list[Output]:
        answers = []
        for prompt in prompts:
            key = (model, max_tokens, *prompt)
            if key not in self._known:
                engine = self.engine(model)
                engine.reset()
                (self._known[key],) = engine.generate([prompt], max_tokens=max_tokens)
            answers.append(self._known[key])
        return answers


SIZES: dict[str, dict[str, Any]] = {
    "gemma3": {"max_model_len": 4096, "num_gpu_blocks_override": 1024}
}


@pytest.fixture(scope="session")
def plain(nursery: Nursery) -> Plain:
    return Plain(nursery)


def offload(disk: Path | None = None, *, host: str = "32MiB", **more: Any) -> dict[str, Any]:
    """The connector's extra config as a user writes it; a busy machine must not make reads late."""
    tiers = [{"type": "disk", "path": str(disk), "capacity": "64MiB"}] if disk else []
    patience = {"promote_deadline_s": 30, "drain_deadline_s": 20, "load_only_if_faster": False}
    return {**OFFLOADER, "host": host, "tiers": tiers, **patience, **more}


def one_by_one(engine: Engine, prompts: list[list[int]], max_tokens: int = 8) -> list[Output]:
    """Each prompt alone, in order."""
    return [engine.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]


def assert_same(outputs: list[Output], expected: list[Output]) -> None:
    """Token for token, and as probable up to rounding."""
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.tokens == wanted.tokens, f"prompt {number}"
        gap = max(
            abs(one - other) for one, other in zip(output.logprobs, wanted.logprobs, strict=True)
        )
        assert gap < LOGPROB_TOLERANCE, f"prompt {number}: log-probabilities {gap} apart"


def total(metrics: dict[str, float], *words: str) -> float:
    """The sum of our own samples whose name and labels contain all of `words`."""
    return sum(
        value
        for name, value in metrics.items()
        if "undercroft" in name and all(word in name for word in words)
    )
