"""Every model shape that runs on a CPU: loaded chunks give the answers that computed ones give.

With `UNDERCROFT_TEST_RESULTS` set, what came of each case is written there.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import LOGPROB_TOLERANCE, Plain, offload, one_by_one, total
from tests.engines.vllm.lab import adapters
from tests.engines.vllm.lab.cases import CASES, UNRUN, Case, results_path
from tests.engines.vllm.lab.engine import (
    BLOCK_TOKENS,
    Engine,
    EngineFailed,
    Nursery,
    Output,
    prompt,
)
from tests.engines.vllm.lab.models import model_path
from tests.engines.vllm.lab.results import Results
from undercroft.plan.kinds import Kind
from undercroft.plan.shape import read_config, shape_of

slow = pytest.mark.slow
_HAS_FACTS = ("-plain", "-chunks_of_2")


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(results_path())


def engine_of(case: Case) -> dict[str, Any]:
    """The engine's arguments, with the folder of the drafter's model."""
    speculative = case.engine.get("speculative_config", {})
    if "model" not in speculative:
        return dict(case.engine)
    drafter = {"model": str(model_path(speculative["model"]))}
    return case.engine | {"speculative_config": speculative | drafter}


def started(
    nursery: Nursery, case: Case, disk: Path | None = None, *, before: tuple[str, ...] = ()
) -> Engine:
    settings = offload(disk, **case.settings)
    engine = engine_of(case)
    engine["before"] = (*engine.get("before", ()), *before)
    if not case.connector:
        return nursery.engine(case.model, settings, **engine)
    del settings["spec_name"], settings["spec_module_path"]
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    return nursery.engine(case.model, None, kv_transfer_config=transfer, **engine)


def prompts_of(case: Case) -> list[list[int]]:
    """Random prompts; the first three may begin alike."""
    prompts = []
    for number, length in enumerate(case.lengths):
        if case.period:
            phrase = prompt(case.period, seed=number)
            prompts.append(list(itertools.islice(itertools.cycle(phrase), length)))
        else:
            shared = case.shared if number <= 2 and length > case.shared else 0
            prompts.append(prompt(length, seed=number, shared=shared))
    return prompts


def assert_alike(
    outputs: list[Output], expected: list[Output], tolerance: float = LOGPROB_TOLERANCE
) -> None:
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.tokens == wanted.tokens, f"prompt {number}"
        pairs = zip(output.logprobs, wanted.logprobs, strict=True)
        gap = max(abs(one - other) for one, other in pairs)
        assert gap <= tolerance, f"prompt {number}: log-probabilities {gap} apart"


def wanted_of(
    case: Case, loaded: list[Output], fresh: list[Output], own: list[Output]
) -> list[Output]:
    """Fresh answers; where vLLM's own hits give others in some prompts, either of the two."""
    if case.same_as == "fresh":
        return fresh
    whole = zip(loaded, fresh, own, strict=True)
    return [f if got.logprobs == f.logprobs else o for got, f, o in whole]


def assert_needed(engine: Engine, prompts: list[list[int]], expected: list[Output]) -> None:
    """The control: when what is loaded is zeroed, every answer changes, and tokens of some."""
    engine.settle()
    engine.reset()
    engine.zero_loads(on=True)
    zeroed = one_by_one(engine, prompts, len(expected[0].tokens))
    engine.zero_loads(on=False)
    assert engine.counts()["pages_zeroed"] > 0
    pairs = list(zip(zeroed, expected, strict=True))
    assert any(output.tokens != wanted.tokens for output, wanted in pairs)
    for number, (output, wanted) in enumerate(pairs):
        gaps = [abs(a - b) for a, b in zip(output.logprobs, wanted.logprobs, strict=True)]
        changed = output.tokens != wanted.tokens or max(gaps) > 30 * LOGPROB_TOLERANCE
        assert changed, f"prompt {number} does not depend on its KV"


def assert_found(loaded: list[Output], own: list[Output], chunk: int, case: Case) -> None:
    """As many tokens as in the engine's own cache, in whole chunks."""
    possible = [output.cached_tokens // chunk * chunk for output in own]
    most_fewer = case.fewer[1] * chunk
    for number, (output, wanted) in enumerate(zip(loaded, possible, strict=True)):
        assert output.cached_tokens >= wanted - most_fewer, f"prompt {number} of {wanted} tokens"
    assert sum(output.external_tokens for output in loaded) > 0


def assert_foreseen(case: Case, groups: list[dict[str, Any]]) -> None:
    """What `undercroft plan` makes of the model's config is what the engine keeps."""
    dtype = case.engine.get("dtype", "float32")
    config = read_config(str(model_path(case.model)), {})
    shape = shape_of(config, dtype=dtype, state_dtype="float32")
    for each in shape.layers:
        ours = [group for group in groups if group["kind"] == each.kind.value]
        per = 1 if each.kind is Kind.STATE else ours[0]["tokens_per_chunk"]
        assert sum(group["layers"] for group in ours) == each.num_layers
        expected = (each.token_bytes or each.state_bytes) * per
        assert sum(group["chunk_bytes"] for group in ours) == expected
    assert len({group["kind"] for group in groups}) == len(shape.layers)


def ids(cases: Any) -> list[Any]:
    return [pytest.param(c, id=c.name, marks=() if c.quick else slow) for c in cases]


@pytest.mark.parametrize("case", ids(CASES))
def test_loaded_is_computed(nursery: Nursery, results: Results, case: Case) -> None:
    """From host memory the same answers and as many hits as from the engine's own cache."""
    results.begin(case.name)
    reload(nursery, results, case)


def reload(nursery: Nursery, results: Results, case: Case) -> None:
    engine = started(nursery, case)
    prompts = prompts_of(case)
    fresh = one_by_one(engine, prompts, case.max_tokens)
    own = one_by_one(engine, prompts, case.max_tokens)
    if case.same_as == "fresh":
        assert_alike(own, fresh, case.tolerance)
    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, prompts, case.max_tokens)
    assert_alike(loaded, wanted_of(case, loaded, fresh, own), case.tolerance)
    facts = engine.inside("groups:describe")
    if case.name.endswith(_HAS_FACTS):
        assert_foreseen(case, facts["groups"])
    chunk = max(group["tokens_per_chunk"] for group in facts["groups"])
    assert_found(loaded, own, chunk, case)
    if "speculative_config" in case.engine:
        assert drafts(engine) > 0
    assert_needed(engine, prompts, loaded)
    engine.close()
    results.note(
        case.name,
        "served",
        compared_with=case.same_as,
        loaded_tokens=[output.cached_tokens for output in loaded],
        own_cache_tokens=[output.cached_tokens for output in own],
        **({"why_fewer": case.fewer[0]} if case.fewer[0] else {}),
        **(facts if case.name.endswith(_HAS_FACTS) else {}),
    )


def drafts(engine: Engine) -> float:
    return sum(n for name, n in engine.metrics().items() if "num_draft_tokens_total" in name)


@pytest.mark.parametrize("case", ids(c for c in CASES if c.name.endswith("-plain")))
@slow
def test_disk_after_restart(nursery: Nursery, results: Results, tmp_path: Path, case: Case) -> None:
    """A new process finds all groups of what an ended one stored."""
    results.begin(f"{case.model}-disk")
    prompts = prompts_of(case)
    first = started(nursery, case, tmp_path)
    fresh = one_by_one(first, prompts, case.max_tokens)
    own = one_by_one(first, prompts, case.max_tokens)
    first.settle()
    facts = first.inside("groups:describe")
    first.close()
    second = started(nursery, case, tmp_path)
    loaded = one_by_one(second, prompts, case.max_tokens)
    assert_alike(loaded, wanted_of(case, loaded, fresh, own), case.tolerance)
    assert loaded[0].external_tokens > 0
    assert_found(loaded, own, max(g["tokens_per_chunk"] for g in facts["groups"]), case)
    assert_needed(second, prompts, loaded)
    second.close()
    results.note(
        f"{case.model}-disk",
        "served",
        compared_with=case.same_as,
        loaded_tokens=[output.cached_tokens for output in loaded],
        own_cache_tokens=[output.cached_tokens for output in own],
    )


@pytest.mark.parametrize("connector", [False, True])
@slow
def test_two_adapters(nursery: Nursery, results: Results, tmp_path: Path, connector: bool) -> None:
    """One prompt without and with two adapters: three answers, each from its own chunks."""
    results.begin("adapters")
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = started(nursery, Case("", "", "", "llama", lora, connector=connector))
    question = prompt(650, seed=1)
    whole = 650 // BLOCK_TOKENS * BLOCK_TOKENS
    for seed in (1, 2):
        adapters.make(tmp_path / f"adapter{seed}", seed=seed)
    voices = [None, *([f"adapter{n}", n, str(tmp_path / f"adapter{n}")] for n in (1, 2))]

    def answers() -> list[dict[str, Any]]:
        return [engine.inside("asking:ask", prompt=question, adapter=voice) for voice in voices]

    fresh = answers()
    assert [answer["external_tokens"] for answer in fresh] == [0, 0, 0]
    assert len({tuple(answer["tokens"]) for answer in fresh}) == 3
    engine.settle()
    engine.reset()
    loaded = answers()
    assert [answer["external_tokens"] for answer in loaded] == [whole] * 3
    assert [answer["tokens"] for answer in loaded] == [answer["tokens"] for answer in fresh]
    engine.settle()
    engine.reset()
    engine.zero_loads(on=True)
    assert all(a["tokens"] != b["tokens"] for a, b in zip(answers(), fresh, strict=True))
    engine.close()
    results.note("adapters", "served", compared_with="fresh, by tokens alone")


@slow
def test_salts(nursery: Nursery, results: Results) -> None:
    """A prompt is found under its own salt only."""
    results.begin("salts")
    engine = nursery.engine("llama", offload())
    question, whole = prompt(650, seed=1), 650 // BLOCK_TOKENS * BLOCK_TOKENS

    def asked(salt: str | None) -> dict[str, Any]:
        engine.settle()
        engine.reset()
        answer: dict[str, Any] = engine.inside("asking:ask", prompt=question, salt=salt)
        return answer

    answers = [asked(salt) for salt in ("a", "b", "a", "c", None, "b")]
    assert [answer["external_tokens"] for answer in answers] == [0, 0, whole, 0, 0, whole]
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    engine.zero_loads(on=True)
    assert asked("a")["tokens"] != answers[0]["tokens"]
    engine.close()
    results.note("salts", "served", compared_with="fresh, by tokens alone")


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@slow
def test_preemption(nursery: Nursery, results: Results, plain: Plain, model: str) -> None:
    """Requests that are thrown out for others, and take up again what they have stored."""
    results.begin(f"preemption-{model}")
    prompts = [prompt(200 + 10 * number, seed=30 + number) for number in range(10)]
    expected = plain.answers(prompts, max_tokens=60, model=model)
    blocks = 36 if model == "llama" else 100
    small = {"num_gpu_blocks_override": blocks, "max_model_len": 1024, "max_num_seqs": 16}
    engine = nursery.engine(model, offload(offload_prompt_only=False), **small)
    for _ in range(2):
        assert_alike(engine.generate(prompts, max_tokens=60), expected)
        engine.settle()
    preempted = sum(n for name, n in engine.metrics().items() if "num_preemptions_total" in name)
    assert preempted > 0
    assert engine.counts()["loads"] > 0
    assert total(engine.metrics(), "broken_invariants") == 0
    engine.reset()
    engine.zero_loads(on=True)
    zeroed = one_by_one(engine, prompts, max_tokens=60)
    assert all(a.tokens != b.tokens for a, b in zip(zeroed, expected, strict=True))
    engine.close()
    with_what = "an engine without a connector; tokens found are not counted"
    results.note(f"preemption-{model}", "served", compared_with=with_what)


@pytest.mark.parametrize("prompt_only", [True, False])
@slow
def test_answers(nursery: Nursery, results: Results, plain: Plain, prompt_only: bool) -> None:
    """With `offload_prompt_only` off a second turn finds the first's answer, else the prompt."""
    name = f"answers-{'on' if prompt_only else 'off'}"
    results.begin(name)
    question = prompt(330, seed=20)
    (answer,) = plain.answers([question], max_tokens=100)
    turn = question + list(answer.tokens) + prompt(40, seed=21)
    expected = plain.answers([turn])
    engine = nursery.engine("llama", offload(offload_prompt_only=prompt_only))
    engine.generate([question], max_tokens=100)
    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, [turn])
    assert_alike(loaded, expected)
    known = 330 if prompt_only else 330 + 99
    assert loaded[0].external_tokens == known // BLOCK_TOKENS * BLOCK_TOKENS
    assert_needed(engine, [turn], expected)
    engine.close()
    results.note(
        name,
        "served",
        compared_with="an engine without a connector",
        loaded_tokens=[output.cached_tokens for output in loaded],
    )


REFUSED = {
    "int8": ("llama", {"kv_cache_dtype": "int8_per_token_head", "dtype": "bfloat16"}),
    "latents": (
        "deepseek_v2",
        {"attention_config": {"backend": "CPU_MLA"}, "dtype": "bfloat16", "block_size": None},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@slow
def test_refused(nursery: Nursery, results: Results, name: str) -> None:
    """vLLM would start and answer wrongly from loaded chunks: with us it does not start."""
    results.begin(name)
    model, arguments = REFUSED[name]
    with pytest.raises(EngineFailed, match="ConfigError: not served: ") as failed:
        started(nursery, Case("", "", "", model, {"max_model_len": 4096} | arguments))
    nursery._engines[-1].close()
    line = next(line for line in str(failed.value).splitlines() if "not served: " in line)
    results.note(name, "refused", why=line.partition("not served: ")[2])


@pytest.mark.parametrize("name", UNRUN)
@slow
def test_ends_without_a_connector(nursery: Nursery, results: Results, name: str) -> None:
    """vLLM itself cannot: once it can, this fails, and there is a case to be made of it."""
    results.begin(name)
    case, says, why = UNRUN[name]
    with pytest.raises(EngineFailed, match=says):
        one_by_one(nursery.engine(case.model, None, **engine_of(case)), prompts_of(case))
    nursery._engines[-1].close()
    results.note(name, "not run", why=why)


@slow
def test_latents(nursery: Nursery, results: Results) -> None:
    """MLA where the machine has AMX; elsewhere it is noted as not run."""
    results.begin("latents-amx")
    import torch

    case = Case(
        "latents-amx",
        "",
        "",
        "deepseek_v2",
        {"dtype": "bfloat16", "max_model_len": 4096},
        lengths=(650, 522, 330),
        shared=0,
        same_as="own cache",
    )
    if torch.cpu._is_amx_tile_supported():
        reload(nursery, results, case)
    else:
        results.note(case.name, "not run", why="the machine of the tests has no AMX")


@slow
def test_media_keys(results: Results) -> None:
    """The same tokens around another image have other keys, so other chunks."""
    results.begin("media")
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def keys(image: str | None) -> list[bytes]:
        place = PlaceholderRange(offset=40, length=8)
        media = [MultiModalFeatureSpec(None, "image", image, place)] if image else None
        request = Request(
            "r",
            prompt_token_ids=list(range(96)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=media,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        return [bytes(key) for key in request.block_hashes]

    none, one, other = keys(None), keys("one"), keys("other")
    assert none[0] == one[0] == other[0], "before the image"
    assert len({none[1], one[1], other[1]}) == len({none[2], one[2], other[2]}) == 3
    assert keys("one") == one
    results.note(
        "media", "not run", why="no model with images; that its keys name the image is checked"
    )


@slow
def test_real_model(nursery: Nursery, results: Results) -> None:
    """SmolLM2-135M with its real weights, which `make demo` fetches; elsewhere it is not run."""
    results.begin("real_model")
    folder = Path(__file__).resolve().parents[4] / ".cache" / "demo" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        results.note("real_model", "not run", why="its weights are not here: run `make demo`")
        return
    engine = nursery.engine(str(folder), offload(host="256MiB"), max_model_len=4096)
    prompts = [prompt(650, seed=1, shared=320), prompt(650, seed=2, shared=320)]
    fresh = one_by_one(engine, prompts)
    own = one_by_one(engine, prompts)
    engine.settle()
    engine.reset()
    loaded = one_by_one(engine, prompts)
    assert_alike(loaded, fresh)
    assert_found(loaded, own, BLOCK_TOKENS, Case("", "", "", "smollm2"))
    assert_needed(engine, prompts, loaded)
    engine.close()
    results.note(
        "real_model",
        "served",
        compared_with="fresh",
        loaded_tokens=[output.cached_tokens for output in loaded],
        own_cache_tokens=[output.cached_tokens for output in own],
    )
