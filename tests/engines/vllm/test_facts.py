"""What vLLM's offloading configuration does not say, and yet decides the bytes of KV cache."""

import json
from types import SimpleNamespace

import pytest

from undercroft.engines.vllm.facts import leave_facts, model_facts, take_facts
from undercroft.errors import ConfigError


class HfConfig:
    """A model's own configuration, after vLLM has applied `hf_overrides`."""

    def __init__(self, **changes):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        base = {"hidden_size": 64, "rope_parameters": rope, "transformers_version": "5.0"}
        self.fields = {**base, **changes}

    def to_dict(self):
        return self.fields


def engine(hf=None, *, model=(), cache=(), speculative=None, load_format="auto"):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=HfConfig(**(hf or {})),
            **{"dtype": "bfloat16", "quantization": None, "revision": None, **dict(model)},
        ),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", **dict(cache)}),
        speculative_config=speculative,
        load_config=SimpleNamespace(load_format=load_format),
    )


OTHERS = {
    "rope scaling": engine({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
    "sliding window": engine({"sliding_window": 128}),
    "quantization": engine(model={"quantization": "fp8"}),
    "model dtype": engine(model={"dtype": "float16"}),
    "revision": engine(model={"revision": "abc"}),
    "KV dtype": engine(cache={"cache_dtype": "fp8"}),
    "drafter": engine(speculative=SimpleNamespace(method="eagle", model="d")),
    "random weights": engine(load_format="dummy"),
}
LONG_ROPE = {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_the_bytes_changes_the_facts(name):
    """An override of rope scaling, a quantization, a KV dtype, ...: other chunks."""
    assert model_facts(OTHERS[name]) != model_facts(engine())


def test_what_does_not_is_left_out():
    """The same model saved by another version of transformers is the same model."""
    assert model_facts(engine({"transformers_version": "6.0"})) == model_facts(engine())
    assert model_facts(None) == {}


@pytest.mark.parametrize(
    ("hf", "counts"),
    [
        ({}, False),
        (LONG_ROPE, True),
        ({"rope_scaling": {"type": "LongRope"}}, True),
        ({"model_type": "llama4_text"}, True),
    ],
)
def test_the_longest_prompt_counts_where_it_decides_bytes(hf, counts):
    """`--max-model-len` chooses LongRoPE's factors and Llama 4's temperature, else nothing."""
    short, long = (engine(hf, model={"max_model_len": n}) for n in (4096, 131072))
    assert (model_facts(short) != model_facts(long)) is counts


def test_random_weights_of_one_seed_are_the_same():
    """`--load-format dummy` is a model of its own, and not the one in the files."""
    one, other = (engine(model={"seed": n}, load_format="dummy") for n in (0, 1))
    assert model_facts(one) != model_facts(other)
    assert model_facts(engine(load_format="safetensors")) == model_facts(engine())


def test_facts_are_json_and_short():
    """They end up in a manifest that people read."""
    facts = model_facts(engine({"long": list(range(10_000))}))
    assert len(json.dumps(facts)) < 2_000


def test_facts_leave_no_trace_in_the_region(monkeypatch):
    """The scheduler reads what the rank left, and slots begin empty."""
    monkeypatch.setattr("undercroft.engines.vllm.facts.get_current_vllm_config_or_none", engine)
    region = memoryview(bytearray(1 << 16))
    leave_facts(region)
    assert take_facts(region) == json.loads(json.dumps(model_facts(engine())))
    assert bytes(region) == bytes(1 << 16)
    with pytest.raises(ConfigError, match="left no facts"):
        take_facts(region)
    with pytest.raises(ConfigError, match=r"host is 4096 bytes, but \d+ bytes are needed"):
        leave_facts(memoryview(bytearray(4096)))
