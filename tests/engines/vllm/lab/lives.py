"""What happens to an engine as a whole: it sleeps, wakes up, and is reset all the time."""

import random
import time
from typing import Any

from tests.engines.vllm.lab.driver import Driver
from tests.engines.vllm.lab.storm import _reset, core_of


def sleep(driver: Driver, *, level: int, mode: str = "abort") -> bool:
    """Let vLLM sleep; whether its scheduler is paused afterwards."""
    driver.llm.sleep(level=level, mode=mode)
    return bool(core_of(driver).is_scheduler_paused())


def wake_up(driver: Driver) -> bool:
    """Wake it up, of whichever level; whether it is fully awake."""
    return bool(driver.llm.wake_up())


def flood(
    driver: Driver,
    *,
    prompts: list[list[int]],
    order: list[int],
    seed: int,
    resets_a_step: float,
    max_tokens: int = 4,
    most_running: int = 8,
    timeout_s: float = 200.0,
) -> dict[str, Any]:
    """Send `prompts` in `order` while everything is dropped again and again, also between steps.

    Returns:
        `answers` with their `prompt` index, `resets`, `seconds`, and the `longest_s` of a reset.
    """
    dice = random.Random(seed)
    todo, running = list(order), dict[str, dict[str, Any]]()
    results: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    num_resets, longest_s, began = 0, 0.0, time.perf_counter()
    while todo or running:
        while todo and len(running) < most_running:
            index = todo.pop(0)
            results.append({"prompt": index})
            request = {"prompt": prompts[index], "max_tokens": max_tokens}
            driver._add(len(results) - 1, request, running, results, 0)
        due = resets_a_step
        while dice.random() < due:
            due -= 1
            at = time.perf_counter()
            _reset(driver, preempt=dice.random() < 0.2, connector=True)
            longest_s = max(longest_s, time.perf_counter() - at)
            num_resets += 1
        for output in driver.llm.llm_engine.step():
            index = running[output.request_id]["index"]
            driver._take(output, running, results, 0)
            if output.finished:
                answers.append(results[index])
        if time.perf_counter() - began > timeout_s:
            raise TimeoutError(f"{len(running)} running, {len(todo)} not yet")
    return {
        "answers": answers,
        "resets": num_resets,
        "seconds": time.perf_counter() - began,
        "longest_s": longest_s,
    }
