"""Single requests that carry more than tokens: a salt, an adapter."""

import time
from typing import Any


def ask(
    driver: Any,
    *,
    prompt: list[int],
    salt: str | None = None,
    adapter: list[Any] | None = None,
    max_tokens: int = 8,
) -> dict[str, Any]:
    """For `Engine.inside`: its tokens, and how many of the prompt's came from offloading.

    Args:
        adapter: Name, number and folder of a LoRA adapter.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = driver.llm.llm_engine
    asked: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt is not None:
        asked["cache_salt"] = salt
    internal = engine.add_request(
        f"asked-{time.monotonic_ns()}",
        asked,
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        lora_request=LoRARequest(*adapter) if adapter else None,
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
