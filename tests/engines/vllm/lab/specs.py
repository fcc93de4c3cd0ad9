"""What vLLM says that a model keeps of each layer: without weights, without an engine.

    python -m tests.engines.vllm.lab.specs              all that is recorded, written anew
    python -m tests.engines.vllm.lab.specs --asked      questions on stdin, answers on stdout

The modules of a model are made on the `meta` device, where tensors have shapes and no bytes, so
that models of hundreds of billions of parameters can be asked, and latent attention on processors
that cannot serve it. Each layer then gives its `KVCacheSpec`, and what the kernels of GPUs pack
into a token of a quantized cache is asked of their backends.

The answers lie in tests/data/vllm_specs.json, beside configs written by hand after what
their makers publish (vocabularies and experts are cut down).
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[4]
LAB = ROOT / "tests/data/model_configs.json"
MAKER_CONFIGS = ROOT / "tests/data/maker_configs.json"
ANSWERS = ROOT / "tests/data/vllm_specs.json"
_LAB_CLASSES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "mistral_swa": "MistralForCausalLM",
    "gptoss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granite_hybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
_KINDS = {
    "FullAttentionSpec": "attention",
    "MLAAttentionSpec": "latent attention",
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "sliding window",
    "MambaSpec": "state",
}
Told = list[list[Any]]
"""Kind, layers, bytes of a token or state of all of them and all ranks, window."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of vLLM.

    Args:
        model: Name of a config, here.
        tp: Tensor parallel size.
        kv: `--kv-cache-dtype`.
    """

    model: str
    tp: int = 1
    kv: str = "auto"

    @property
    def name(self) -> str:
        """Under which the answer is kept."""
        return f"{self.model}, tp {self.tp}, {self.kv}"


def lab_configs() -> dict[str, dict[str, Any]]:
    """Those of the models that real engines serve in the tests."""
    configs = json.loads(LAB.read_text())
    return {
        name: {**config, "architectures": [_LAB_CLASSES[name]]} for name, config in configs.items()
    }


def maker_configs() -> dict[str, dict[str, Any]]:
    """Written by hand after what makers of models publish; not downloaded."""
    found: dict[str, dict[str, Any]] = json.loads(MAKER_CONFIGS.read_text())
    return found


def lab_questions() -> list[Question]:
    """Every shape alone and over two ranks; more ranks than heads; caches of other types."""
    names = list(lab_configs())
    return [
        *(Question(name, tp) for name in names for tp in (1, 2)),
        Question("llama", 4),
        Question("llama", 1, "fp8"),
        *(
            Question(name, 1, f"{kv}_per_token_head")
            for name in ("llama", "deepseek_v2")
            for kv in ("int8", "fp8", "int4")
        ),
        Question("gemma3", 2, "int8_per_token_head"),
        Question("llama", 1, "nvfp4"),
        Question("deepseek_v2", 1, "fp8_ds_mla"),
        Question("deepseek_v2", 1, "nvfp4_ds_mla"),
    ]


def maker_questions() -> list[Question]:
    """Each one alone."""
    return [Question(name) for name in maker_configs()]


# --- in a process that has vLLM ---------------------------------------------------------------


def tell(question: Question, config: dict[str, Any], folder: Path) -> Told:
    """What the layers of a model keep."""
    (folder / "config.json").write_text(json.dumps(config))
    kinds: Counter[tuple[str, int | None]] = Counter()
    sums: Counter[tuple[str, int | None]] = Counter()
    for spec in _specs(question, folder):
        kind = _KINDS[type(spec).__name__]
        window = getattr(spec, "sliding_window", None)
        window = window or getattr(spec, "attention_chunk_size", None)
        num_ranks = 1 if kind == "latent attention" else question.tp
        kinds[kind, window] += 1
        sums[kind, window] += num_ranks * _bytes_of(spec)
    return [[kind, num, sums[kind, window], window] for (kind, window), num in kinds.items()]


def _specs(question: Question, folder: Path) -> list[Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        kv_cache_dtype="fp8" if question.kv == "fp8" else "auto",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
        patch.object(parallel_state.get_tp_group(), "world_size", question.tp),
    ):
        initialize_model(config)
        specs = [
            layer.get_kv_cache_spec(config)
            for layer in config.compilation_config.static_forward_context.values()
            if hasattr(layer, "get_kv_cache_spec")
            and getattr(layer, "kv_sharing_target_layer_name", None) is None
        ]
    return [_packed(spec, question.kv) for spec in specs if spec is not None]


def _packed(spec: Any, kv: str) -> Any:
    """As the kernels of GPUs would have it, which a CPU does not choose by itself."""
    if kv in ("auto", "fp8"):
        return spec
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode

    asked = replace(spec, dtype=STR_DTYPE_TO_TORCH_DTYPE[kv], kv_quant_mode=get_kv_quant_mode(kv))
    if kv.endswith("_ds_mla"):
        return replace(asked, state_content_bytes=_ds_mla_bytes(kv))
    if kv == "nvfp4":  # its backend does not import without its kernels; this is what it does
        content = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(asked, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)
    backend = MLACommonBackend if isinstance(spec, MLAAttentionSpec) else TritonAttentionBackend
    return backend.customize_spec(asked)


def _ds_mla_bytes(kv: str) -> int:
    """Of a token, out of the method that makes the spec of a latent layer."""
    import inspect
    import re

    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    source = inspect.getsource(MLAAttention.get_kv_cache_spec)
    return int(re.findall(rf'"{kv}": (\d+)', source)[0])


def _bytes_of(spec: Any) -> int:
    """Of a token, or of a state, on one rank."""
    if hasattr(spec, "shapes"):
        import torch

        return sum(
            math.prod(shape) * torch.empty((), dtype=dtype).element_size()
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
    num_bytes, rest = divmod(spec.unpadded_page_size_bytes, spec.block_size)
    if rest:
        raise ValueError(f"a page of {spec} is no whole number of bytes a token")
    return num_bytes


def _answer() -> None:
    import torch.distributed as dist
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    configs = {**lab_configs(), **maker_configs()}
    questions = [Question(*each) for each in json.load(sys.stdin)]
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        for number, question in enumerate(questions):
            own = Path(folder) / str(number)
            own.mkdir()
            try:
                answers[question.name] = tell(question, configs[question.model], own)
            except Exception as exc:  # noqa: BLE001 - whatever vLLM does not run, it says so by
                lines = f"{type(exc).__name__}: {exc}".splitlines()
                answers[question.name] = {"error": " ".join(lines[:3])[:200]}
        dist.destroy_process_group()
    print(json.dumps(answers))


# --- in any -----------------------------------------------------------------------------------


def ask(questions: list[Question]) -> dict[str, Any]:
    """Of vLLM, in a process of its own, by `Question.name`; some seconds each."""
    from tests.engines.vllm.lab.engine import environment

    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.lab.specs", "--asked"],
        input=json.dumps([(each.model, each.tp, each.kv) for each in questions]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment(), "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """See the module."""
    if "--asked" in sys.argv:
        _answer()
        return
    answers = ask([*lab_questions(), *maker_questions()])
    lines = [f" {json.dumps(name)}: {json.dumps(told)}" for name, told in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
