"""What vLLM's offloading configuration does not say, and yet decides the bytes of KV cache."""

import json
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from undercroft.engines.vllm import facts
from undercroft.engines.vllm.facts import leave_facts, take_facts
from undercroft.errors import ConfigError


class HfConfig:
    """A model's own configuration, after vLLM has applied `hf_overrides`."""

    def __init__(self, **changes):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        base = {"hidden_size": 64, "rope_parameters": rope, "transformers_version": "5.0"}
        self.fields = {**base, **changes}

    def to_dict(self):
        return self.fields


def engine(hf=None, *, model=(), load_format="auto", layers=(), text=None, **more):
    hf_config = HfConfig(**(hf or {}))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=HfConfig(**text) if text else hf_config,
            **{"model": "m", "dtype": torch.bfloat16, "revision": None, **dict(model)},
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format=load_format),
        compilation_config=SimpleNamespace(static_forward_context=dict(layers)),
        **{"speculative_config": None, **more},
    )


def model_facts(config, environ=()):
    return facts.model_facts(config, dict(environ))


def layer(backend, **more):
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), **more)


def drafting(path, method="eagle", **more):
    draft = SimpleNamespace(
        model=str(path), hf_config=HfConfig(), hf_text_config=HfConfig(), **more
    )
    return engine(speculative_config=SimpleNamespace(method=method, draft_model_config=draft))


OTHERS = {
    "rope scaling": engine({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
    "of the text part": engine(text={"sliding_window": 128}),
    "nested": engine({"vision_config": {"num_hidden_layers": 3}}),
    "drafter": drafting("/nowhere"),
    "n-gram": engine(speculative_config=SimpleNamespace(method="ngram")),
    "random weights": engine(load_format="dummy"),
    "backend": engine(layers={"l": layer("FLASH_ATTN")}),
    "adapters' type": engine(lora_config=SimpleNamespace(lora_dtype=torch.float16)),
    "adapters of the tower": engine(
        lora_config=SimpleNamespace(lora_dtype="auto", enable_tower_connector_lora=True)
    ),
    "runner": engine(use_v2_model_runner=True),
    "weights that change": engine(weight_transfer_config=object()),
    "transformers": engine(model={"using_transformers_backend": lambda: True}),
}
LONG_ROPE = {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_the_bytes_changes_the_facts(name):
    """An override of rope scaling, a drafter, another backend, ...: other chunks."""
    assert model_facts(OTHERS[name]) != model_facts(engine())


def test_what_does_not_is_left_out():
    """The same model saved by another version of transformers is the same model."""
    assert model_facts(engine({"transformers_version": "6.0"})) == model_facts(engine())
    nested = [engine({"text_config": {"transformers_version": v}}) for v in ("5.0", "6.0")]
    assert model_facts(nested[0]) == model_facts(nested[1])
    same = engine(lora_config=SimpleNamespace(lora_dtype=torch.bfloat16, max_loras=4))
    assert model_facts(same) == model_facts(engine())


@pytest.mark.parametrize(
    "config", [None, engine(weight_transfer_config=object())], ids=["unknown", "replaced weights"]
)
def test_where_nothing_can_be_known_nothing_is_shared(config, caplog):
    """Two starts of the same engine differ, and each says so."""
    assert model_facts(config) != model_facts(config)
    assert "after a restart" in caplog.text or "found later" in caplog.text


@pytest.mark.parametrize(
    ("hf", "counts"),
    [
        ({}, False),
        (LONG_ROPE, True),
        ({"rope_scaling": {"type": "LongRope"}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"model_type": "llama4_text"}, True),
        ({"quantization_config": {"activation_scheme": "dynamic"}}, False),
    ],
)
def test_the_longest_prompt_counts_where_it_decides_bytes(hf, counts):
    """`--max-model-len` chooses LongRoPE's factors and Llama 4's temperature, else nothing."""
    short, long = (engine(hf, model={"max_model_len": n}) for n in (4096, 131072))
    assert (model_facts(short) != model_facts(long)) is counts


def test_a_length_that_vllm_writes_into_the_model_does_not_count():
    """It does so for MiniMax M2, to size a table."""
    short, long = (engine({"max_model_len": n}) for n in (4096, 131072))
    assert model_facts(short) == model_facts(long)


def test_backends_of_stages_that_rank_0_does_not_see_count_as_asked_for():
    """With one stage its layers say what was chosen, and what was asked for does not count."""

    def asking(pp_size, kinds):
        return engine(
            parallel_config=SimpleNamespace(pipeline_parallel_size=pp_size),
            attention_config=SimpleNamespace(backend_per_kind=kinds),
        )

    one, two = {"sliding": "FLASH_ATTN"}, {"sliding": "TRITON_ATTN"}
    assert model_facts(asking(1, one)) == model_facts(asking(1, two)) == model_facts(engine())
    assert model_facts(asking(2, one)) != model_facts(asking(2, two))
    assert model_facts(asking(2, {})) == model_facts(engine())


def test_a_configuration_that_cannot_be_read_does_not_keep_the_engine_from_starting(caplog):
    """Its chunks are nobody else's then, and a line says so."""

    class Odd(HfConfig):
        def to_dict(self):
            raise TypeError("odd")

    config = engine()
    config.model_config.hf_config = Odd()
    assert model_facts(config) != model_facts(config)
    assert "cannot be read" in caplog.text
    assert "TypeError: odd" in caplog.text


def test_random_weights_of_one_seed_are_the_same():
    """`--load-format dummy` is a model of its own, and not the one in the files."""
    one, other = (engine(model={"seed": n}, load_format="dummy") for n in (0, 1))
    assert model_facts(one) != model_facts(other)
    assert model_facts(engine(load_format="safetensors")) == model_facts(engine())


def test_a_drafter_is_known_by_its_files(tmp_path):
    """Its pages lie in the same chunks: the same path with other weights is another drafter."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    one = model_facts(drafting(tmp_path))
    assert model_facts(drafting(tmp_path)) == one
    weights.write_bytes(b"two")
    assert model_facts(drafting(tmp_path)) != one


def test_a_drafter_of_random_weights_is_known_by_its_seed(tmp_path):
    """As the model."""
    one, other = (drafting(tmp_path, seed=n) for n in (0, 1))
    assert model_facts(one) == model_facts(other)
    for config in (one, other):
        config.load_config.load_format = "dummy"
        config.model_config.seed = 5
    assert model_facts(one) != model_facts(other)


def test_a_method_without_a_drafter_says_the_model_once():
    """vLLM then names the model as its own drafter."""
    config = engine(speculative_config=SimpleNamespace(method="ngram"))
    config.speculative_config.draft_model_config = config.model_config
    assert model_facts(config)["speculative"] == {"method": "ngram"}


def test_layers_tell_what_they_chose():
    """Backends, element types and the order of elements on a CPU; layers without pages do not."""

    class Nameless:
        @staticmethod
        def get_name():
            raise NotImplementedError

    layers = {
        "0": layer("CPU_ATTN", kv_cache_dtype="auto", isa="vec"),
        "1": layer("CPU_ATTN", kv_cache_dtype="auto", isa="vec"),
        "2": SimpleNamespace(get_attn_backend=lambda: Nameless),
        "3": SimpleNamespace(),
    }
    found = model_facts(engine(layers=layers))
    name = f"{__name__}.{Nameless.__qualname__}"
    both = " ".join(sorted(["CPU_ATTN", name]))
    assert found["layers"] == {"backend": both, "kv_cache_dtype": "auto", "isa": "vec"}
    assert "amx" not in found["device"]
    assert "amx" in model_facts(engine())["device"]
    layers["1"] = layer("CPU_ATTN", kv_cache_dtype="auto", isa="amx")
    assert model_facts(engine(layers=layers)) != found


@dataclass
class Later:
    """A configuration object as a later vLLM has it."""

    cache_dtype: str = "auto"
    invented: int = 7
    rounding: dict = field(default_factory=dict)


def test_a_field_of_a_later_version_counts_where_it_is_not_at_its_default(caplog):
    """It keeps chunks apart, and is named; at its default it does neither."""
    plain = engine()
    later = engine()
    later.cache_config = Later()
    assert model_facts(later) == model_facts(plain)
    assert not caplog.records
    later.cache_config = Later(invented=8, rounding={"mode": "up"})
    found = model_facts(later)["unjudged"]
    assert found["cache_config.invented"] == 8
    assert found["cache_config.rounding"].startswith("sha256:")
    assert "cache_config.invented, cache_config.rounding" in caplog.text
    later.cache_config.rounding = {"mode": "down"}
    assert model_facts(later)["unjudged"] != found


def needs_the_others(others):
    raise AssertionError(others)


@dataclass
class Linked:
    """Its field's default follows from other fields."""

    cache_dtype: str = "auto"
    linked: int = field(default_factory=needs_the_others)


def test_a_later_field_without_a_plain_default_counts():
    """Nobody can say whether it is at its default."""
    config = engine()
    config.cache_config = Linked(linked=3)
    assert model_facts(config)["unjudged"] == {"cache_config.linked": 3}


def test_values_that_may_be_secret_are_digests():
    """Manifests lie readable beside the chunks."""
    config = engine()
    config.load_config.model_loader_extra_config = {"s3_secret_access_key": "hunter2"}
    found = model_facts(config)
    assert found != model_facts(engine())
    assert "hunter2" not in json.dumps(found)
    later = engine()
    later.cache_config = Later(rounding={"api_key": "hunter2"})
    assert "hunter2" not in json.dumps(model_facts(later))


def test_the_environment_counts_where_it_is_judged_to():
    """Precision does; logging does not."""
    plain = model_facts(engine())
    assert model_facts(engine(), {"VLLM_LOGGING_LEVEL": "DEBUG"}) == plain
    found = model_facts(engine(), {"VLLM_FLOAT32_MATMUL_PRECISION": "high"})
    assert found["environment"] == {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}


def test_values_become_short_json():
    """Numbers that JSON lacks, sets, classes, paths: equal for equal values, and readable."""
    odd = {"nan": float("inf"), "set": {"b", "a"}, "class": HfConfig, "type": torch.float8_e4m3fn}
    assert (
        model_facts(engine(odd))["model"]["hf_config"]
        | {
            "nan": "inf",
            "set": ["a", "b"],
            "class": f"{__name__}.HfConfig",
            "type": "float8_e4m3fn",
        }
        == model_facts(engine(odd))["model"]["hf_config"]
    )
    found = model_facts(engine({"long": list(range(10_000)), "text": "x" * 10_000}))
    assert len(json.dumps(found, allow_nan=False)) < 2_000


def test_an_object_of_a_plug_in_counts_by_its_hash():
    """Its words have an address in them, which no other start has."""

    class Hashed:
        def __init__(self, value):
            self.compute_hash = lambda: value

    one, same, other = (engine(additional_config=Hashed(value)) for value in "aab")
    assert model_facts(one) == model_facts(same) != model_facts(other)


def test_facts_leave_no_trace_in_the_region():
    """The scheduler reads what the rank left, and slots begin empty."""
    region = memoryview(bytearray(1 << 16))
    found = model_facts(engine())
    leave_facts(region, found)
    assert take_facts(region) == json.loads(json.dumps(found))
    assert bytes(region) == bytes(1 << 16)
    with pytest.raises(ConfigError, match="left no facts"):
        take_facts(region)
    with pytest.raises(ConfigError, match=r"host is 4096 bytes, but \d+ bytes are needed"):
        leave_facts(memoryview(bytearray(4096)), found)


@pytest.mark.parametrize("length", [0, 5, (1 << 32) - 1])
@pytest.mark.parametrize("content", [b"", b"\xff" * 64, zlib.compress(b"[" * 100_000)])
def test_facts_that_cannot_be_read_are_one_line(length, content):
    """Whatever a rank of another version left, at any length that it says."""
    region = memoryview(bytearray(1 << 16))
    leave_facts(region, {})
    start = bytes(region).index(b"UCFACTS1") + 8
    region[start : start + 4 + len(content)] = length.to_bytes(4, "little") + content
    with pytest.raises(ConfigError, match="facts that cannot be read"):
        take_facts(region)
