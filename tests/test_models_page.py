"""docs/reference/models.md says what real engines gave, of the cases that there are."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.cases import CASES, OWN_CASES

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
            assert case["outcome"] in ("refused", "not run"), name
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
