"""Model shapes and set-ups in which a real engine has to answer the same from loaded chunks.

What comes of each is recorded in docs/reference/models.json, and told by docs/reference/models.md.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HYBRID: dict[str, Any] = {"dtype": "bfloat16", "block_size": None, "max_model_len": 8192}
"""Engines that choose their own block size, in the type that their kernels take."""
MAMBA = HYBRID | {"before": ("patches:mamba_states",)}
CHUNKED = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
}
EAGLE = {"method": "eagle", "model": "llama_eagle", "num_speculative_tokens": 2}
DRAFTS = {"method": "draft_model", "model": "llama_other", "num_speculative_tokens": 2}
SHORT = (650, 650, 330, 1000)


@dataclass(frozen=True)
class Case:
    """One engine set-up.

    Args:
        name: Of the case; the end of its test's name.
        shape: Of the model, as the table has it.
        feature: What it is about, as the table has it.
        model: Of `lab.models`, or a folder.
        engine: Arguments of the engine.
        settings: Of the connector.
        connector: `UndercroftConnector` instead of vLLM's own with our spec.
        lengths: Of the prompts.
        shared: How many tokens the first three prompts begin with in common.
        max_tokens: Of answers.
        period: Prompts repeat themselves after so many tokens; 0: they do not.
        same_as: What loaded chunks are compared with: `fresh` answers, or those from the engine's
            `own cache` where those differ from fresh ones in vLLM itself.
        fewer: Why fewer tokens are found than in the engine's own cache, and at most how many
            chunks fewer; empty: as many, in whole chunks.
        quick: Part of `make test`.
    """

    name: str
    shape: str
    feature: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    connector: bool = False
    lengths: tuple[int, ...] = SHORT
    period: int = 0
    shared: int = 320
    max_tokens: int = 8
    same_as: str = "fresh"
    tolerance: float = 1e-3
    fewer: tuple[str, int] = ("", 0)
    quick: bool = False


def _shape(
    name: str,
    shape: str,
    *,
    engine: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = SHORT,
    in_chunks: tuple[int, ...] = (),
    chunked: dict[str, Any] | None = None,
    quick: tuple[str, ...] = (),
    **more: Any,
) -> list[Case]:
    """What every shape is tried in: as it is, larger chunks, our connector, chunked prefill.

    Recurrent state is stored at the last whole block of a prompt: there a chunk has to end too.
    """
    engine = {"max_model_len": 4096} | (engine or {})
    ways: list[tuple[str, str, dict[str, Any], dict[str, Any], bool]] = [
        ("plain", "host memory", {}, {}, False),
        ("chunks_of_2", "2 blocks a chunk", {}, {"blocks_per_chunk": 2}, True),
        ("chunks_of_3", "3 blocks a chunk", {}, {"blocks_per_chunk": 3}, False),
        ("chunked", "chunked prefill", chunked or CHUNKED, {}, True),
    ]
    return [
        Case(
            name=f"{name}-{way}",
            shape=shape,
            feature=feature,
            model=name,
            engine=engine | arguments,
            settings=settings,
            connector=connector,
            lengths=in_chunks or lengths if way.startswith("chunks") else lengths,
            quick=way in quick,
            **more,
        )
        for way, feature, arguments, settings, connector in ways
    ]


def _speculative(
    model: str, shape: str, *, engine: dict[str, Any] | None = None, **more: Any
) -> list[Case]:
    """A shape other than the Llama with each kind of drafter."""
    engine = {"max_model_len": 4096} | (engine or {})
    ngram = {"speculative_config": NGRAM, "before": ("patches:plain_ngrams",)}
    ways: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("ngram", "speculative: n-grams", ngram, {}),
        (
            "eagle",
            "speculative: EAGLE",
            {"speculative_config": EAGLE},
            {"offload_prompt_only": False},
        ),
        ("draft_model", "speculative: a smaller model", {"speculative_config": DRAFTS}, {}),
    ]
    return [
        Case(
            name=f"{model}-{way}",
            shape=shape,
            feature=feature,
            model=model,
            engine=engine | arguments,
            settings=settings,
            **more,
        )
        for way, feature, arguments, settings in ways
    ]


def _around_chunks(block: int, blocks_per_chunk: int) -> Case:
    chunk = block * blocks_per_chunk
    return Case(
        name=f"lengths-{block}x{blocks_per_chunk}",
        shape="Llama",
        feature=f"lengths around chunks of {blocks_per_chunk} blocks of {block} tokens",
        model="llama",
        engine={"block_size": block, "max_model_len": 4096, "num_gpu_blocks_override": 256},
        settings={"blocks_per_chunk": blocks_per_chunk},
        lengths=(2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 2 * chunk + block),
        shared=0,
    )


_ONE_GROUP = ("gemma3-draft_model", "lfm2-draft_model", "qwen3_next-draft_model")

CASES: tuple[Case, ...] = (
    *_shape("llama", "Llama"),
    *_shape("mistral_swa", "Mistral, all windows"),
    *_shape("gemma3", "Gemma 3"),
    *_shape("gptoss", "gpt-oss", engine={"dtype": "bfloat16"}, quick=("chunks_of_2",)),
    *_shape(
        "qwen3_next",
        "Qwen3-Next",
        engine=HYBRID,
        lengths=(2310, 3460),
        in_chunks=(6920,),
        max_tokens=64,
        chunked={"max_num_batched_tokens": 2048},
        quick=("plain",),
    ),
    *_shape(
        "granite_hybrid",
        "Granite 4 hybrid",
        engine=MAMBA,
        lengths=(1600, 1600, 3100),
        chunked={"max_num_batched_tokens": 512},
        quick=("plain",),
    ),
    *_shape(
        "nemotron_h",
        "Nemotron-H",
        engine=MAMBA,
        lengths=(1600, 1600, 3100),
        chunked={"max_num_batched_tokens": 512},
    ),
    *_shape(
        "lfm2",
        "LFM2",
        engine=HYBRID,
        lengths=(800, 800, 1560),
        chunked={"max_num_batched_tokens": 256},
        same_as="own cache",
    ),
    Case("fp8", "Llama", "fp8 KV cache", "llama", {"kv_cache_dtype": "fp8"}),
    Case(
        "ngram",
        "Llama",
        "speculative: n-grams",
        "llama",
        {"speculative_config": NGRAM, "before": ("patches:plain_ngrams",)},
    ),
    Case(
        "eagle",
        "Llama",
        "speculative: EAGLE",
        "llama",
        {"speculative_config": EAGLE},
        settings={"offload_prompt_only": False},
    ),
    Case(
        "draft_model",
        "Llama",
        "speculative: a smaller model",
        "llama",
        {"speculative_config": DRAFTS},
    ),
    *_speculative("mistral_swa", "Mistral, all windows"),
    *(case for case in _speculative("gemma3", "Gemma 3") if case.name not in _ONE_GROUP),
    Case(
        "qwen3_next-eagle",
        "Qwen3-Next",
        "speculative: EAGLE",
        "qwen3_next",
        HYBRID | {"speculative_config": EAGLE, "before": ("patches:speculative_states",)},
        settings={"offload_prompt_only": False},
        lengths=(2310, 3460),
        max_tokens=64,
    ),
    *(_around_chunks(block, chunk) for block in (32, 64, 96, 128) for chunk in (1, 2, 3, 4)),
)


def _unrun(case: Case) -> tuple[Case, str, str]:
    if case.name in _ONE_GROUP:
        says = "All drafting layers should belong to the same kv cache group"
        return case, says, f"vLLM ends at start, whatever the connector: {says}"
    says = "'function' object is not subscriptable"
    why = "vLLM moves recurrent state under speculative decoding by Triton kernels, which CPUs lack"
    return case, says, f"{why}: it ends at the first prompt, whatever the connector"


UNRUN: dict[str, tuple[Case, str, str]] = {
    case.name: _unrun(case)
    for case in (
        *(case for case in _speculative("gemma3", "Gemma 3") if case.name in _ONE_GROUP),
        *_speculative("lfm2", "LFM2", engine=HYBRID, lengths=(800,)),
        *_speculative("qwen3_next", "Qwen3-Next", engine=HYBRID, lengths=(2310,)),
    )
    if case.name not in {each.name for each in CASES}
}
"""Cases that vLLM itself ends with an error, what it says, and the reason for the table."""


@dataclass(frozen=True)
class Own:
    """A case with a test of its own, because more than reloading is to be seen."""

    name: str
    shape: str
    feature: str
    test: str


OWN_CASES: tuple[Own, ...] = (
    *(
        Own(f"{model}-disk", shape, "disk, after a restart", "test_disk_after_restart")
        for model, shape in sorted({(c.model, c.shape) for c in CASES})
    ),
    Own("adapters", "Llama", "two LoRA adapters", "test_two_adapters"),
    Own("salts", "Llama", "cache_salt", "test_salts"),
    Own("preemption-llama", "Llama", "preemption", "test_preemption"),
    Own("preemption-gemma3", "Gemma 3", "preemption", "test_preemption"),
    Own("answers-on", "Llama", "offload_prompt_only on", "test_answers"),
    Own("answers-off", "Llama", "offload_prompt_only off", "test_answers"),
    Own("int8", "Llama", "int8_per_token_head KV cache", "test_refused"),
    Own("latents", "DeepSeek-V2, latents", "CPU without AMX", "test_refused"),
    *(
        Own(name, case.shape, case.feature, "test_ends_without_a_connector")
        for name, (case, _, _) in UNRUN.items()
    ),
    Own("latents-amx", "DeepSeek-V2, latents", "CPU with AMX", "test_latents"),
    Own(
        "media",
        "Llama",
        "images: hashes in the keys",
        "test_media_keys",
    ),
    Own("real_model", "SmolLM2-135M, real weights", "host memory", "test_real_model"),
)

RESULTS = "UNDERCROFT_TEST_RESULTS"
"""Environment variable: the file that a run adds its results to."""


def results_path() -> Path | None:
    """Where this run's results go, if anywhere."""
    named = os.environ.get(RESULTS)
    return Path(named) if named else None
