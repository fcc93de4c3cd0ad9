"""Change what decides bytes, get no hit, and `explain` names the field; change the rest, get hits.

vLLM's own parser and configuration classes see the options; no engine is started.
"""

import copy
import json
from types import SimpleNamespace

import pytest
from rig import running
from shapes import SMALL_LLAMA, prompt

from undercroft.cli.main import main
from undercroft.engines.vllm import UndercroftConnector, preview

TOKENS = 160
ROPE = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 4096,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def override(**changes):
    return ["--hf-overrides", json.dumps(changes)]


DECIDES = {
    "--dtype": (["--dtype", "float16"], "model.dtype"),
    "--kv-cache-dtype fp8": (["--kv-cache-dtype", "fp8"], "cache.cache_dtype"),
    "--kv-cache-dtype fp8_e5m2": (["--kv-cache-dtype", "fp8_e5m2"], "cache.cache_dtype"),
    "--quantization": (["--quantization", "fp8"], "model.quantization"),
    "--revision": (["--revision", "abc"], "model.revision"),
    "--disable-sliding-window": (["--disable-sliding-window"], "model.disable_sliding_window"),
    "rope": (override(rope_parameters=ROPE), "model.hf_config.rope_parameters"),
    "rope theta": (
        override(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        "model.hf_config.rope_parameters.rope_theta",
    ),
    "sliding window": (override(sliding_window=128), "sliding_window"),
    "positions": (
        override(max_position_embeddings=4096),
        "model.hf_config.max_position_embeddings",
    ),
    "--load-format dummy": (["--load-format", "dummy"], "dummy_weights.seed"),
    "hashes": (["--prefix-caching-hash-algo", "sha256_cbor"], "hash.algorithm"),
    "n-gram": (["--speculative-config", json.dumps(NGRAM)], "speculative.method"),
    "adapters of some layers": (
        ["--enable-lora", "--lora-target-modules", "q_proj"],
        "lora.target_modules",
    ),
}
DOES_NOT = {
    "memory": ["--gpu-memory-utilization", "0.5"],
    "seed": ["--seed", "3"],
    "eager": ["--enforce-eager"],
    "batching": ["--max-num-batched-tokens", "2048", "--max-num-seqs", "7"],
    "names and ports": ["--served-model-name", "x", "--port", "9"],
    "longest prompt": ["--max-model-len", "4096"],
    "asking for what is chosen anyway": ["--attention-backend", "CPU_ATTN"],
    "adapters": ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "32"],
    "logging": ["--disable-log-stats"],
    "fewer chunks at once": ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"],
}


class Store:
    """One disk and a model; engines of other options come and go."""

    def __init__(self, folder):
        self.disk, self.model = folder / "kv", folder / "model"
        self.disk.mkdir()
        self.model.mkdir()
        self.num = 0
        self.base, _, self.key = self.run()

    def engine(self, words=(), config=SMALL_LLAMA):
        (self.model / "config.json").write_text(json.dumps(config))
        return preview._config([str(self.model), *words])

    def run(self, engine=None, connector=None):
        """The namespace of an engine, the tokens it found, and a key of the prompt."""
        self.num += 1
        tier = {"type": "disk", "path": str(self.disk), "capacity": "64MiB"}
        with running(
            {"host": "1MiB", "tiers": [tier]},
            engine_id=f"engine-{self.num}",
            connector=connector,
            current=engine or self.engine(),
        ) as rig:
            found = rig.run(prompt(1, TOKENS)).num_hit_tokens
            return rig.hierarchy.levels[0].tier.namespace, found, rig.host_keys()[0].hex()

    def explain(self, capsys, namespace, other):
        """What `explain` says the two differ in."""
        capsys.readouterr()
        main(
            [
                *("explain", "--key", self.key, "--path", str(self.disk)),
                *("--namespace", namespace.id, "--json"),
            ]
        )
        document = json.loads(capsys.readouterr().out)
        return {one["namespace"]: one["differs"] for one in document["elsewhere"]}[other.id]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("identity"))


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_bytes_finds_nothing_and_is_named(name, store, capsys):
    """One option of vLLM: no hit, and the field with both values."""
    words, field = DECIDES[name]
    namespace, found, _ = store.run(store.engine(words))
    assert found == 0
    differs = store.explain(capsys, namespace, store.base)
    assert field in differs.partition(":")[0]


@pytest.mark.parametrize("connector", [None, UndercroftConnector], ids=["spec", "connector"])
@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_decide_bytes_finds_all(name, connector, store):
    """How much, where, when, and by whom."""
    namespace, found, _ = store.run(store.engine(DOES_NOT[name]), connector)
    assert (namespace.id, found) == (store.base.id, TOKENS)


def built(engine, backend, kv_cache_dtype, isa):
    """The engine, as a rank has it when its layers are there."""
    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_dtype=kv_cache_dtype,
        isa=isa,
    )
    engine.compilation_config.static_forward_context["layer"] = layer
    return engine


@pytest.mark.parametrize("connector", [None, UndercroftConnector], ids=["spec", "connector"])
@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("backend", ("FLASH_ATTN", "auto", None), ("TRITON_ATTN", "auto", None)),
        ("isa", ("CPU_ATTN", "auto", "vec"), ("CPU_ATTN", "auto", "amx")),
        ("kv_cache_dtype", ("FLASHINFER", "auto", None), ("FLASHINFER", "fp8", None)),
    ],
)
def test_what_layers_chose_counts(field, one, other, connector, store, capsys):
    """Nobody asked for it, and yet it decides how elements lie in a page."""

    def run(made):
        made.model_config.revision = "for connector" if connector else "for spec"  # a case's own
        return store.run(made, connector)

    first, _, _ = run(built(store.engine(), *one))
    second, found, _ = run(built(store.engine(), *other))
    assert found == 0
    assert store.explain(capsys, second, first).startswith(f"model.facts.layers.{field}: ")
    assert run(built(store.engine(), *one))[:2] == (first, TOKENS)


def test_the_longest_prompt_counts_for_longrope(store, capsys):
    """It decides which factors all positions get."""
    config = {**SMALL_LLAMA, "rope_parameters": LONG_ROPE}
    first, _, _ = store.run(store.engine(["--max-model-len", "4096"], config))
    second, found, _ = store.run(store.engine(["--max-model-len", "8192"], config))
    assert found == 0
    differs = store.explain(capsys, second, first)
    assert differs == "model.facts.model.max_model_len: 8192 here, 4096 there"


def test_a_drafter_counts_by_its_files(store, tmp_path, capsys):
    """Same options, same path, other weights."""
    weights = tmp_path / "model.safetensors"

    def drafting():
        engine = store.engine()
        draft = copy.copy(engine.model_config)
        object.__setattr__(draft, "model", str(tmp_path))
        engine.speculative_config = SimpleNamespace(
            method="eagle", num_speculative_tokens=2, draft_model_config=draft
        )
        return engine

    weights.write_bytes(b"one")
    first, _, _ = store.run(drafting())
    assert store.run(drafting())[:2] == (first, TOKENS)
    weights.write_bytes(b"two")
    second, found, _ = store.run(drafting())
    assert found == 0
    differs = store.explain(capsys, second, first)
    assert differs.startswith("model.facts.speculative.weights.value: ")
