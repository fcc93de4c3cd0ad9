"""Clients in a closed loop: each asks, waits for its whole answer, thinks, and asks again."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.engines.vllm.lab.driver import Driver


@dataclass(slots=True)
class _Client:
    turns: deque[tuple[float, list[int]]]
    grows: bool
    history: list[int] = field(default_factory=list)
    asks_at: float = 0.0
    asked: list[int] | None = None
    """Indices of its results, and whether it waits for the last of them."""
    results: list[int] = field(default_factory=list)


def converse(
    driver: Driver,
    *,
    clients: list[list[tuple[float, list[int]]]],
    grows: bool,
    max_tokens: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Let all clients talk at once until each has asked all it has to ask.

    Args:
        clients: For each its turns: seconds to think beforehand, and the tokens to ask.
        grows: Whether a turn is appended to what was said before, answers included.

    Returns:
        `wall_s`, and for each client its `answers`: what the driver tells of a request, and
        `prompt_tokens`. Times to first token contain the wait in the engine's queue.
    """
    crowd = [_Client(deque(turns), grows) for turns in clients]
    running: dict[str, dict[str, Any]] = {}
    results: list[dict[str, Any]] = []
    began = time.perf_counter()
    for client in crowd:
        client.asks_at = began + client.turns[0][0]
    while running or any(client.turns for client in crowd):
        now = time.perf_counter()
        if now > began + timeout_s:
            raise TimeoutError(f"{len(running)} requests unfinished after {timeout_s} s")
        for client in crowd:
            if client.turns and client.asked is None and now >= client.asks_at:
                _ask(driver, client, running, results, max_tokens)
        outputs = driver.llm.llm_engine.step()
        for output in outputs:
            driver._take(output, running, results, 0)
        for client in crowd:
            if client.asked is not None and "cached_tokens" in results[client.results[-1]]:
                _hear(client, results[client.results[-1]]["tokens"])
        if not outputs:
            time.sleep(0.001)  # as vLLM's own loop does while a connector works
    return {
        "wall_s": time.perf_counter() - began,
        "answers": [[results[index] for index in client.results] for client in crowd],
    }


def _ask(
    driver: Driver,
    client: _Client,
    running: dict[str, dict[str, Any]],
    results: list[dict[str, Any]],
    max_tokens: int,
) -> None:
    _, said = client.turns.popleft()
    client.asked = client.history + said
    client.results.append(len(results))
    results.append({"prompt_tokens": len(client.asked)})
    request = {"prompt": client.asked, "max_tokens": max_tokens}
    driver._add(len(results) - 1, request, running, results, 0)


def _hear(client: _Client, answer: list[int]) -> None:
    if client.grows:
        client.history = (client.asked or []) + answer
    client.asked = None
    if client.turns:
        client.asks_at = time.perf_counter() + client.turns[0][0]
