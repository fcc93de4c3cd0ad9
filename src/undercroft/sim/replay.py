"""Replay a trace through a policy, at one capacity.

Prefix semantics, as an engine has them: a request hits its longest prefix whose blocks are all
there. Afterwards all its blocks are used or stored, deepest first, at once. A full level evicts one
block for each that it stores, the policy's first victim, be it of the same request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature

import numpy as np

from undercroft import plugins
from undercroft.clock import Clock
from undercroft.keys import ChunkKey
from undercroft.policies.base import EvictionPolicy, Learning
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.sim.hits import Hits
from undercroft.sim.moment import Moment
from undercroft.traces import Trace

__all__ = ["block_keys", "make_policy", "replay"]

_KEY_BYTES = 8


def make_policy(
    name: str, capacity_chunks: int, clock: Clock, known: KnownPrefixes | None = None
) -> EvictionPolicy:
    """The production policy `name`, given of these what it takes.

    Args:
        name: Of the policy.
        capacity_chunks: Of its level.
        clock: The time.
        known: What all levels together know of prefixes; None: it makes its own.

    Raises:
        UnknownPlugin: There is none of that name.
        ConfigError: The policy refuses the capacity.
    """
    make: Callable[..., EvictionPolicy] = plugins.find("policies", name)
    offered = {"capacity_chunks": capacity_chunks, "clock": clock, "known": known}
    takes = signature(make).parameters
    return make(**{option: value for option, value in offered.items() if option in takes})


def block_keys(trace: Trace) -> list[ChunkKey]:
    """A key for every block of a trace, by id."""
    return [ChunkKey(block.to_bytes(_KEY_BYTES, "big")) for block in range(trace.num_blocks)]


def replay(
    trace: Trace, policy: EvictionPolicy, capacity: int, *, moment: Moment, num_warm: int = 0
) -> Hits:
    """What `policy` gets with room for `capacity` blocks, from a cold start.

    A policy that learns from requests is told of each one, at its time, and is offered full blocks
    only, as its protocol says: a partly filled one is then a reference that is never found.

    Args:
        trace: The requests.
        policy: Made for this replay.
        capacity: In blocks, > 0.
        moment: The clock that the policy was given; set to the time of each request.
        num_warm: Requests at the beginning that are replayed, not counted.

    Cost: one call of the policy a reference, three for one that is stored: 0.5 to 5 us.
    """
    level = _Level(policy, capacity, block_keys(trace))
    learning = policy if isinstance(policy, Learning) else None
    keys, block_tokens = level.keys, trace.block_tokens
    prefixes = np.zeros(trace.num_requests, np.int64)
    rows = (column.tolist() for column in (trace.times_ms, trace.kinds, trace.input_tokens))
    num_stored = num_evicted = 0
    for request, (path, time_ms, kind, tokens) in enumerate(
        zip(trace.iter_blocks(), *rows, strict=True)
    ):
        prefixes[request] = level.prefix(path)
        moment.set(time_ms / 1000)
        if learning is not None:
            del path[tokens // block_tokens :]
            learning.on_request([keys[block] for block in path], time_ms / 1000, kind)
        level.use(path)
        if request < num_warm:
            num_stored, num_evicted = level.num_stored, level.num_evicted
    return Hits(
        capacity_blocks=capacity,
        num_requests=trace.num_requests - num_warm,
        num_references=int(trace.lengths[num_warm:].sum(dtype=np.int64)),
        hit_blocks=int(prefixes[num_warm:].sum()),
        num_tokens=int(trace.input_tokens[num_warm:].sum()),
        hit_tokens=int(trace.tokens_in(prefixes)[num_warm:].sum()),
        num_stored=level.num_stored - num_stored,
        num_evicted=level.num_evicted - num_evicted,
    )


class _Level:
    """Which blocks are there."""

    def __init__(self, policy: EvictionPolicy, capacity: int, keys: list[ChunkKey]) -> None:
        self.keys = keys
        self.num_stored = self.num_evicted = 0
        self._policy = policy
        self._capacity = capacity
        self._is_there = bytearray(len(keys))

    def prefix(self, path: Sequence[int]) -> int:
        """How many of the first blocks of `path` are there."""
        is_there = self._is_there
        for number, block in enumerate(path):
            if not is_there[block]:
                return number
        return len(path)

    def use(self, path: Sequence[int]) -> None:
        """Touch what is there of `path` and store the rest, deepest first."""
        keys, is_there, policy = self.keys, self._is_there, self._policy
        on_hit, on_insert, on_evict = policy.on_hit, policy.on_insert, policy.on_evict
        num_free = self._capacity - (self.num_stored - self.num_evicted)
        num_stored = num_evicted = 0
        for block in reversed(path):
            if is_there[block]:
                on_hit(keys[block])
                continue
            if num_free:
                num_free -= 1
            else:
                victim = next(policy.victims())
                on_evict(victim)
                is_there[int.from_bytes(victim, "big")] = 0
                num_evicted += 1
            on_insert(keys[block])
            is_there[block] = 1
            num_stored += 1
        self.num_stored += num_stored
        self.num_evicted += num_evicted
