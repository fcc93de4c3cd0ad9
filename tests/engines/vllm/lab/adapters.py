"""LoRA adapters for the tiny Llama, and requests that use them."""

import json
import time
from pathlib import Path
from typing import Any

_RANK = 8
_HIDDEN = 128
_OUTPUTS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
_LAYERS = 4


def make(folder: Path, seed: int) -> None:
    """Write (or overwrite in place) an adapter that changes what the model says."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name, outputs in _OUTPUTS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(size=(_RANK, _HIDDEN), scale=0.1)
            tensors[f"{stem}.lora_B.weight"] = rng.normal(size=(outputs, _RANK), scale=0.3)
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_OUTPUTS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: value.astype(np.float32) for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )


def ask(driver: Any, *, prompt: list[int], path: str, adapter_id: int) -> dict[str, Any]:
    """For `Engine.inside`: one request with an adapter of a fixed name; tokens and hits."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = driver.llm.llm_engine
    internal = engine.add_request(
        f"adapter-{time.monotonic_ns()}",
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        lora_request=LoRARequest("helpful", adapter_id, path),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for output in engine.step():
            if output.finished:
                return {
                    "tokens": list(output.outputs[0].token_ids),
                    "external_tokens": driver.probe.external_tokens.get(internal, 0),
                }
    raise TimeoutError("no answer")
