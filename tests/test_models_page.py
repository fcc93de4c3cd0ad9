"""docs/reference/models.md says what real engines gave, of the cases that there are."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.cases import CASES, OWN_CASES
from tests.engines.vllm.lab.results import FAILED, Results

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "engines" / "vllm" / "e2e" / "test_models.py"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts/models_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(generator().RESULTS.read_text())
    return found


def test_the_page_is_what_the_results_say() -> None:
    """Run `make models`, or scripts/models_page.py after a change to the results alone."""
    made = generator()
    assert made.PAGE.read_text() == made.page(recorded())


def test_results_are_of_cases_that_exist() -> None:
    """All of them, each under the shape and the feature it is run as, by a test that is there."""
    cases = {case.name: (case.shape, case.feature) for case in (*CASES, *OWN_CASES)}
    assert len(cases) == len(CASES) + len(OWN_CASES), "two cases have one name"
    assert {n: (c["shape"], c["feature"]) for n, c in recorded().items()} == cases
    tests = {n.name for n in ast.parse(TESTS.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert {case.test for case in OWN_CASES} <= tests


def test_every_outcome_has_its_reason() -> None:
    """Served cases found something and say what they were compared with; others say why."""
    for name, case in recorded().items():
        if case["outcome"] == "served":
            assert case["compared_with"], name
            assert sum(case.get("loaded_tokens", [1])) > 0, name
        else:
            assert case["outcome"] in ("refused", "not run", "failed"), name
            assert case["why"], name


def test_a_changed_result_changes_the_page() -> None:
    """The page depends on outcomes, reasons and sizes."""
    made, cases = generator(), recorded()
    whole = made.page(cases)
    for name, changes in (
        ("llama-plain", {"outcome": "refused", "why": "so"}),
        ("int8", {"why": "another reason"}),
        ("lfm2-plain", {"stock_slot_bytes": 1 << 30}),
    ):
        assert made.page(cases | {name: cases[name] | changes}) != whole


def test_a_case_that_fails_is_no_longer_served(tmp_path: Path) -> None:
    """Begun and not ended well: the file says so, and the page too, wherever the case stands."""
    made, path = generator(), tmp_path / "models.json"
    path.write_text(json.dumps(recorded() | {"gone": {"outcome": "served"}}))
    results = Results(path)
    every_llama = [name for name in recorded() if name.startswith("llama-")]
    for name in ("lfm2-plain", "lfm2-chunks_of_2", "salts", *every_llama):
        results.begin(name)
    cases = json.loads(path.read_text())
    assert {n for n, case in cases.items() if case["outcome"] == "failed"} == {
        "lfm2-plain",
        "lfm2-chunks_of_2",
        "salts",
        *every_llama,
    }
    assert "gone" not in cases
    lines = made.page(cases).splitlines()
    (lfm2,) = [line for line in lines if line.startswith("| LFM2 | - |")]
    assert lfm2.split(" | ")[2:5] == ["**failed**", "served (own cache)", "**failed**"]
    assert f"| Llama | cache_salt | **failed** | {FAILED} |" in lines
    (llama,) = [line for line in lines if line.startswith("| Llama | - |")]
    assert llama.count("**failed**") == len(every_llama)
    assert not [line for line in lines if line.startswith("| LFM2 | host memory |")]

    results.note("salts", "served", compared_with="fresh")
    assert json.loads(path.read_text())["salts"]["outcome"] == "served"


def test_every_case_is_begun_before_anything_can_fail() -> None:
    """Else a failing test would leave what an earlier run gave."""
    functions = [n for n in ast.parse(TESTS.read_text()).body if isinstance(n, ast.FunctionDef)]
    tests = [each for each in functions if each.name.startswith("test_")]
    assert len(tests) > 8
    for test in tests:
        assert "results" in [argument.arg for argument in test.args.args], test.name
        first_two = [ast.unparse(statement) for statement in test.body[1:3]]
        assert any(line.startswith("results.begin(") for line in first_two), test.name
