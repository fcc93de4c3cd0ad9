"""Replays of request traces through a policy, and what the best possible one would have got.

Prefix semantics, as an engine has them: a request hits its longest resident prefix, and afterwards
all its chunks are used or inserted, deepest first ("leaf-first").
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from undercroft.keys import ChunkKey
from undercroft.policies.base import EvictionPolicy

__all__ = ["generate_trace", "replay", "replay_belady"]


def generate_trace(num_requests: int, seed: int) -> list[list[ChunkKey]]:
    """Chats that grow turn by turn on a few shared prompts, some abandoned, some one-offs.

    Returns:
        One list a request: the keys of its chunks, root first.
    """
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    num_keys = 0

    def grow(length: int) -> list[ChunkKey]:
        nonlocal num_keys
        first, num_keys = num_keys, num_keys + length
        return [ChunkKey(index.to_bytes(8, "big")) for index in range(first, num_keys)]

    prompts = [grow(random.randrange(2, 12)) for _ in range(6)]
    chats: list[list[ChunkKey]] = []
    requests = []
    for _ in range(num_requests):
        kind = random.choice(("new chat", "new chat", "one-off", *["next turn"] * 7))
        if kind == "new chat" or not chats:
            chats.append(prompts[random.randrange(len(prompts))] + grow(random.randrange(1, 8)))
            chat = chats[-1]
        elif kind == "one-off":
            chat = grow(random.randrange(1, 30))
        else:
            newest = len(chats) - 1
            chat = chats[max(0, newest - int(random.expovariate(0.1)))]
            chat += grow(random.randrange(1, 6))
        requests.append(list(chat))
    return requests


def replay(
    policy: EvictionPolicy, requests: Sequence[Sequence[ChunkKey]], capacity_chunks: int
) -> int:
    """Number of chunks missed, from a cold start, with room for `capacity_chunks`."""
    resident: set[ChunkKey] = set()
    num_misses = 0
    for request in requests:
        num_hits = next((i for i, key in enumerate(request) if key not in resident), len(request))
        num_misses += len(request) - num_hits
        for key in reversed(request):
            if key in resident:
                policy.on_hit(key)
                continue
            if len(resident) >= capacity_chunks:
                victim = next(policy.victims())
                policy.on_evict(victim)
                resident.remove(victim)
            policy.on_insert(key)
            resident.add(key)
    return num_misses


def replay_belady(requests: Sequence[Sequence[ChunkKey]], capacity_chunks: int) -> int:
    """The fewest chunks that any policy could have missed.

    After each request it keeps the `capacity_chunks` chunks that are needed again soonest, the
    shallower first where equal, and refuses the others (Belady 1966, with bypass). Under prefix
    semantics that is the optimum: an ancestor is needed no later than its descendant.
    """
    uses: dict[ChunkKey, list[int]] = {}
    for now, request in enumerate(requests):
        for key in request:
            uses.setdefault(key, []).append(now)
    for times in uses.values():
        times.reverse()
    resident: dict[ChunkKey, tuple[int, int]] = {}  # key -> (next use, depth)
    num_misses = 0
    for request in requests:
        num_hits = next((i for i, key in enumerate(request) if key not in resident), len(request))
        num_misses += len(request) - num_hits
        for depth, key in enumerate(request):
            uses[key].pop()
            resident.pop(key, None)
            if uses[key]:
                resident[key] = (uses[key][-1], depth)
        for key in sorted(resident, key=resident.__getitem__)[capacity_chunks:]:
            del resident[key]
    return num_misses
