"""The demo's verdict and chart; the engine runs themselves are `make demo`."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("demo_script", EXAMPLES / "demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_script"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))
    for name in [name for name in sys.modules if name == "demo_script" or name.startswith("demo")]:
        del sys.modules[name]


def _answers(demo: ModuleType, disk_s: float, disk_tokens: list[int]) -> dict[str, object]:
    times = {"cold": 20.0, "own": 0.3, "host": 0.5}
    answers = {
        case: demo.Answer(seconds, seconds + 1, [1, 2], "text", 0, 7000)
        for case, seconds in times.items()
    }
    answers["disk"] = demo.Answer(disk_s, disk_s + 1, disk_tokens, "text", 6976, 7000)
    return answers


@pytest.mark.parametrize(
    ("disk_s", "disk_tokens", "status"),
    [(0.8, [1, 2], 0), (0.8, [1, 3], 1), (2.5, [1, 2], 1)],
    ids=["good", "another answer", "too slow"],
)
def test_verdict_and_chart(
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    disk_s: float,
    disk_tokens: list[int],
    status: int,
) -> None:
    """The demo fails when answers differ or the restart is slow, and draws its chart anyway."""
    model = demo.model.DemoModel(tmp_path, "a model", is_real=True)
    chart = tmp_path / "chart.png"
    assert demo.report(_answers(demo, disk_s, disk_tokens), model, chart) == status
    printed = capsys.readouterr().out
    assert ("DIFFERENT" in printed) == (disk_tokens != [1, 2])
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_text_is_long_enough(demo: ModuleType) -> None:
    """The document has the tokens the demo asks for, at four characters a token."""
    assert len(demo.TEXT.read_text(encoding="utf-8")) > 4 * demo.TEXT_TOKENS
