"""vLLM still says of models' layers what is recorded of them, and what the planner goes by."""

from __future__ import annotations

import json

import pytest

from tests.engines.vllm.lab.specs import (
    ANSWERS,
    Question,
    ask,
    lab_questions,
    maker_questions,
)

pytestmark = pytest.mark.engine
SAID = json.loads(ANSWERS.read_text())


def recorded(questions: list[Question]) -> dict[str, object]:
    return {each.name: SAID[each.name] for each in questions}


def test_the_labs_models() -> None:
    """Every shape; ranks and types of cache in one shape of attention, and in latents."""
    questions = [
        each
        for each in lab_questions()
        if (each.tp, each.kv) == (1, "auto") or each.model in ("llama", "deepseek_v2")
    ]
    assert ask(questions) == recorded(questions)


@pytest.mark.slow
def test_all_of_them() -> None:
    """The rest, and models of other makers; minutes."""
    questions = [*lab_questions(), *maker_questions()]
    assert ask(questions) == recorded(questions)
