"""A small trace, and studies of it with the real simulator."""

from __future__ import annotations

import random
from typing import Any

from undercroft.plan.kinds import Kind
from undercroft.plan.shape import Layers, Shape
from undercroft.plan.study import Study, block_bytes, replay
from undercroft.plan.terms import Drive, parse_endurance
from undercroft.sim import hit_curve
from undercroft.traces import Trace, TraceBuilder

BLOCK_TOKENS = 16
TOKEN_BYTES = 64
BLOCK = BLOCK_TOKENS * TOKEN_BYTES
SHAPE = Shape((Layers(Kind.ATTENTION, 1, TOKEN_BYTES),), "bfloat16")


def sessions(num_sessions: int = 12, num_turns: int = 8, seed: int = 1) -> Trace:
    """Sessions that share their first two blocks and grow by two blocks a turn, interleaved."""
    rng = random.Random(seed)
    turns = [session for session in range(num_sessions) for _ in range(num_turns)]
    rng.shuffle(turns)
    builder = TraceBuilder("small", BLOCK_TOKENS)
    lengths = dict.fromkeys(range(num_sessions), 2)
    for number, session in enumerate(turns):
        lengths[session] += 2
        own = [f"{session}-{n}" for n in range(lengths[session] - 2)]
        builder.add(["system", "tools", *own], time_ms=number * 10_000)
    return builder.build()


def drive(endurance: str | None = None, write_bytes_per_s: float = 1e12) -> Drive:
    rated = parse_endurance(endurance, 5.0, None) if endurance else None
    return Drive(1e12, write_bytes_per_s, rated)


def study_of(
    trace: Trace,
    hosts: list[int],
    disks: list[int],
    *,
    policies: tuple[str, ...] = ("lru",),
    **more: Any,
) -> Study:
    each = block_bytes(trace, SHAPE)
    sizes = sorted({*hosts, *disks} - {0})
    curves = [replay(trace, name, sizes, each, lambda: None) for name in (*policies, "belady")]
    told = {"prefill_tokens_per_s": 1000.0, "disk_bytes_per_s": 1e6, **more}
    return Study(
        trace=trace,
        block_bytes=each,
        policies=tuple(curves[:-1]),
        optimum=curves[-1],
        limit=hit_curve(trace, "unbounded", [1])[0],
        hosts=tuple(hosts),
        disks=tuple(disks),
        **told,
    )
