"""A storm of requests with salts and adapters, whose loads fail at random in every group."""

import random
import time
from collections.abc import Iterator
from typing import Any

from tests.engines.vllm.lab.driver import Driver
from tests.engines.vllm.lab.storm import _reset, census


class ShakyLoads:
    """Patches both copy functions of the CPU worker: copies into the engine fail at random."""

    def __init__(self, seed: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from undercroft.engines.vllm import worker

        outer = get_kv_transfer_group().connector_worker.worker
        while hasattr(outer, "_worker"):
            outer = outer._worker
        self._engine = outer._engine
        self.dice = random.Random(seed)
        self.odds = {"copy_pages": 0.0, "copy_pages_singly": 0.0}
        self.delay_s = 0.0
        self.num_failures = 0
        for name in self.odds:
            setattr(worker, name, self._shaky(name, getattr(worker, name)))

    def _shaky(self, name: str, good: Any) -> Any:
        def copy(to: Any, to_at: Any, source: Any, at: Any, page_bytes: int) -> Iterator[int]:
            if to is self._engine and self.delay_s:
                time.sleep(self.dice.random() * self.delay_s)
            if to is not self._engine or self.dice.random() >= self.odds[name]:
                yield from good(to, to_at, source, at, page_bytes)
                return
            self.num_failures += 1
            if len(at) > 1:
                yield from good(to, to_at[:1], source, at[:1], page_bytes)
            raise OSError("the way to the engine is shaky")

        return copy


def shake(driver: Driver, *, fast: float, plain: float, seed: int = 0, delay_s: float = 0.0) -> int:
    """From now on copies into engine blocks fail so often; how many failed so far."""
    there: dict[str, ShakyLoads] = vars(driver)
    if "shaky" not in there:
        there["shaky"] = ShakyLoads(seed)
    shaky = there["shaky"]
    shaky.odds = {"copy_pages": fast, "copy_pages_singly": plain}
    shaky.delay_s = delay_s
    return shaky.num_failures


def gale(
    driver: Driver,
    *,
    questions: list[dict[str, Any]],
    order: list[int],
    seed: int,
    arrivals: float = 0.3,
    aborts: float = 0.0,
    resets: float = 0.0,
    forced: float = 0.0,
    wipes: float = 0.0,
    most_running: int = 16,
    timeout_s: float = 150.0,
) -> list[dict[str, Any]]:
    """As `storm.storm`, for requests that differ in more than their prompts.

    Args:
        questions: Each with `prompt` and `max_tokens`, perhaps `salt` and `lora`, the arguments of
            a `LoRARequest`.
        order: Indices of the questions, as they arrive.
        seed: Of everything random.
        arrivals: Chance per step that the next question arrives.
        aborts: Chance per step that some request is aborted.
        resets: Chance per step that the engine's own prefix cache is reset.
        forced: Chance that such a reset preempts all that runs.
        wipes: Chance per step that the connector is reset too.
        most_running: Requests at a time.
        timeout_s: For all of it.

    Returns:
        What each request that was not aborted gave, with its `question`'s index.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    dice = random.Random(seed)
    todo = list(order)
    running: dict[str, int] = {}
    answers: list[dict[str, Any]] = []
    engine = driver.llm.llm_engine
    deadline = time.perf_counter() + timeout_s
    while todo or running:
        while todo and len(running) < most_running and dice.random() < arrivals:
            index = todo.pop(0)
            q = questions[index]
            name = f"g{driver._num_requests}"
            driver._num_requests += 1
            prompt: dict[str, Any] = {"prompt_token_ids": q["prompt"]}
            if q.get("salt"):
                prompt["cache_salt"] = q["salt"]
            params = SamplingParams(temperature=0.0, max_tokens=q["max_tokens"], ignore_eos=True)
            lora = LoRARequest(*q["lora"]) if q.get("lora") else None
            engine.add_request(name, prompt, params, lora_request=lora)
            running[name] = index
        if running and dice.random() < aborts:
            victim = dice.choice(list(running))
            engine.abort_request([victim])
            del running[victim]
        if dice.random() < resets:
            _reset(driver, preempt=dice.random() < forced, connector=False)
        if dice.random() < wipes:
            _reset(driver, preempt=dice.random() < 0.5, connector=True)
        outputs = engine.step()
        answers += [
            {
                "question": running.pop(output.request_id),
                "tokens": list(output.outputs[0].token_ids),
            }
            for output in outputs
            if output.request_id in running and output.finished
        ]
        if not outputs:
            time.sleep(0.001)
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{len(running)} running, {len(todo)} not yet: {census(driver)}")
    return answers
