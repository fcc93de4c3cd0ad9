"""Bytes of a cache by a model's config are those that vLLM's own layers give, model by model.

The answers are recorded: `python -m tests.engines.vllm.lab.specs` asks vLLM anew, and
tests/engines/vllm/test_model_specs.py checks that it still says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engines.vllm.lab.specs import (
    ANSWERS,
    Question,
    lab_configs,
    lab_questions,
    maker_configs,
    maker_questions,
)

from undercroft.errors import ConfigError
from undercroft.plan.shape import shape_of

CONFIGS = {**lab_configs(), **maker_configs()}
QUESTIONS = {each.name: each for each in [*lab_questions(), *maker_questions()]}
SAID: dict[str, Any] = json.loads(ANSWERS.read_text())
REFUSED = {
    "minicpm3 (MLA as heads)": "kv_lora_rank",
    "mimo-v2-flash": "hybrid_layer_pattern",
    "phi-3.5-moe": "sliding_window",
    "qwen3-next without an interval": "linear_num_value_heads",
}
"""What is not understood, and the field that the message names."""


def computed(question: Question) -> list[tuple[str, int, int, int | None]]:
    """In the form of a recorded answer; on CPUs vLLM keeps the recurrence's state in 32 bits."""
    shape = shape_of(
        CONFIGS[question.model],
        dtype="bfloat16",
        kv_dtype=question.kv,
        state_dtype="float32",
        num_ranks=question.tp,
    )
    return sorted(
        (each.kind.value, each.num_layers, each.token_bytes or each.state_bytes, each.window_tokens)
        for each in shape.layers
    )


@pytest.mark.parametrize("name", [n for n in SAID if QUESTIONS[n].model not in REFUSED])
def test_it_is_what_vllm_says(name: str) -> None:
    """Of each kind: layers, bytes of all of them and of all ranks, and the window."""
    said = SAID[name]
    if "error" in said:  # vLLM does not run it; then nothing is at stake
        assert QUESTIONS[name].model == "qwen2 with windows"
        return
    assert computed(QUESTIONS[name]) == sorted(map(tuple, said))


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_not_understood_is_refused_by_its_field(model: str) -> None:
    """vLLM runs these; a guess would be wrong, and look right."""
    with pytest.raises(ConfigError, match=REFUSED[model]) as refused:
        computed(Question(model))
    assert "--bytes-per-token" in str(refused.value)
    assert isinstance(SAID[Question(model).name], list)


def test_every_question_has_its_answer() -> None:
    """All models of the lab, all kinds, ranks, and types are among them."""
    assert set(SAID) == set(QUESTIONS)
    kinds = {row[0] for said in SAID.values() if isinstance(said, list) for row in said}
    assert kinds == {"attention", "latent attention", "sliding window", "state"}
    assert {each.model for each in lab_questions()} == set(lab_configs())
    assert len(maker_configs()) >= 50
    assert {each.tp for each in QUESTIONS.values()} == {1, 2, 4}


def test_heads_that_do_not_share_out() -> None:
    """Three ranks for two heads: vLLM would not start either."""
    with pytest.raises(ConfigError, match="over which 2 KV heads do not share out"):
        computed(Question("llama", 3))
    assert computed(Question("llama", 4))[0][2] == 2 * computed(Question("llama", 2))[0][2]


def test_other_kinds_of_cache() -> None:
    """By name, in a line that says which there are."""
    for kv in ("fp9", "turboquant_k8v4", "fp8_ds_mla"):
        with pytest.raises(ConfigError, match=f"is '{kv}', whose bytes are not known"):
            computed(Question("llama", 1, kv))
    narrow = {**CONFIGS["deepseek_v2"], "kv_lora_rank": 256}
    with pytest.raises(ConfigError, match="latents of 576 elements"):
        shape_of(narrow, kv_dtype="fp8_ds_mla")
    strange = {"quant_method": "modelopt", "kv_cache_quant_algo": "INT3"}
    with pytest.raises(ConfigError, match="kv_cache_quant_algo in the model's quantization_config"):
        shape_of({**CONFIGS["llama"], "quantization_config": strange})
