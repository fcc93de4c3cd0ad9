"""What is asked: prompts with shared beginnings, and how much of it there is."""

from __future__ import annotations

import random

from tests.engines.vllm.lab.engine import BLOCK_TOKENS, LLAMA_CHUNK_BYTES, prompt

__all__ = ["made_prompts", "working_set_bytes"]

_MOST_TOKENS = 640
_PROMPTS_PER_TEXT = 6


def made_prompts(count: int, seed: int) -> list[list[int]]:
    """Beginnings of some texts, each with its own end: before, at and after a block's edge."""
    dice = random.Random(f"soak {seed}")
    texts = [
        prompt(_MOST_TOKENS, seed=seed + 1000 + number)
        for number in range(max(1, count // _PROMPTS_PER_TEXT))
    ]
    prompts = []
    for number in range(count):
        kept = dice.randrange(4, _MOST_TOKENS // BLOCK_TOKENS - 4) * BLOCK_TOKENS
        end = dice.choice([1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1])
        tail = [dice.randrange(256) for _ in range(end + dice.randrange(5) * BLOCK_TOKENS)]
        prompts.append(texts[number % len(texts)][:kept] + tail)
    return prompts


def working_set_bytes(prompts: list[list[int]]) -> int:
    """Of the different chunks that the prompts have."""
    chunks = {
        tuple(tokens[:end])
        for tokens in prompts
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    }
    return len(chunks) * LLAMA_CHUNK_BYTES
