"""How many block references a second the simulator replays, on one core.

The trace is the agentic one that lies in `examples/`. `lru` is computed for all capacities in one
pass over the whole of it, and has to reach a million references a second, reading the file aside.
Everything else is replayed over its beginning, at one capacity, so that a round takes seconds: each
policy by itself, and the production hierarchy with host memory alone and above a disk. A pass that
does not count what a replay counts ends the case: then its speed means nothing.

Times are the process's own, so that what else runs on the machine counts for less.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from harness import AGAIN, Goal, Options, Row, Side

FILE = Path(__file__).parents[2] / "examples/data/traces/weka_claude_code_A.jsonl.gz"
NUM_REQUESTS = 1_500
CURVE = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of the trace's blocks: the capacities of a curve."""
SHARE = 0.05
"""The same of what is replayed at one capacity."""
DISK_SHARE = 0.5
LEAST_LRU = 1.0
"""Million references a second that the one pass has to reach."""
POLICIES = ("lru", "arc", "s3fifo", "2q", "wtinylfu", "sieve", "fifo", "hazard")
M = 1e-6


def beginning(trace: Any, num_requests: int) -> Any:
    """The first requests of a trace, as a trace."""
    from undercroft.traces import TraceBuilder

    builder = TraceBuilder(f"{trace.name}, its beginning", trace.block_tokens)
    rows = zip(
        trace.deepest.tolist(),
        trace.num_new.tolist(),
        trace.times_ms.tolist(),
        trace.input_tokens.tolist(),
        trace.sessions.tolist(),
        trace.kinds.tolist(),
        strict=True,
    )
    for deepest, num_new, time_ms, tokens, session, kind in islice(rows, num_requests):
        builder.add_path(
            deepest, num_new, time_ms=time_ms, input_tokens=tokens, session=session, kind=kind
        )
    return builder.build()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and processor seconds."""
    gc.collect()
    begun = time.process_time()
    found = call()
    return found, time.process_time() - begun


def read(path: Path) -> dict[str, float]:
    """Seconds a reference to read the file."""
    from undercroft.traces import load

    trace, seconds = timed(partial(load, path))
    return {"a reference": seconds / trace.num_references}


def curve(trace: Any, policy: str, shares: Sequence[float]) -> dict[str, float]:
    """Seconds a reference, of all capacities together."""
    from undercroft.sim import hit_curve

    capacities = [max(1, int(share * trace.num_blocks)) for share in shares]
    _, seconds = timed(partial(hit_curve, trace, policy, capacities))
    return {"a reference": seconds / trace.num_references}


def replayed(trace: Any, policy: str) -> dict[str, float]:
    """Seconds a reference of a replay at one capacity; that of `lru` is what its curve says."""
    from undercroft.sim import hit_curve
    from undercroft.sim.moment import Moment
    from undercroft.sim.replay import make_policy, replay

    moment, capacity = Moment(), max(1, int(SHARE * trace.num_blocks))
    made = make_policy(policy, capacity, moment)
    found, seconds = timed(partial(replay, trace, made, capacity, moment=moment))
    if policy == "lru" and [found] != hit_curve(trace, "lru", [capacity]):
        raise SystemExit(f"a replay of lru counts {found}, but its curve says something else")
    return {"a reference": seconds / trace.num_references}


def hierarchy(trace: Any, shares: Sequence[float], policy: str) -> dict[str, float]:
    """Seconds a reference of the production hierarchy, with a disk for each share but the first."""
    from undercroft.sim import LevelPlan, Service, simulate

    nvme = Service(100e-6, 7e9, 4e9)
    plans = [
        LevelPlan(
            f"level{number}",
            max(1, int(share * trace.num_blocks)),
            policy,
            service=nvme if number else Service(),
        )
        for number, share in enumerate(shares)
    ]
    _, seconds = timed(partial(simulate, trace, plans))
    return {"a reference": seconds / trace.num_references}


class Simulator:
    """The case."""

    name = "simulator"
    about = "block references replayed in a second of one core, of an agentic trace"
    rounds = 6

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        whole, cost = "curve", "a reference"

        def row(what: str, side: str, base: str = "", *goals: Goal) -> Row:
            return Row(
                what,
                (side, cost),
                (base, cost) if base else None,
                amount=M,
                unit="M/s",
                goals=goals,
            )

        return [
            row("the file is read", "read"),
            row("lru: curve of 7 sizes, one pass", whole, "", Goal(least_value=LEAST_LRU)),
            row("belady: the same", "optimum", whole),
            row("lru: its beginning, one pass, beside a replay", "pass", "lru"),
            *(
                row(f"{name}: replay at one size", name, "lru")
                for name in POLICIES
                if name != "lru"
            ),
            row("hierarchy, lru: host memory", "host", "lru"),
            row("hierarchy, lru: host memory and disk", "host+disk", "host"),
            row("hierarchy, hazard: host memory and disk", "hazard+disk", "host+disk"),
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        from undercroft.traces import load

        trace = load(FILE)
        part = beginning(trace, NUM_REQUESTS // (10 if options.quick else 1))
        trace = part if options.quick else trace
        sides: dict[str, Side] = {
            "read": partial(read, FILE),
            "curve": partial(curve, trace, "lru", CURVE),
            "optimum": partial(curve, trace, "belady", CURVE),
            "pass": partial(curve, part, "lru", (SHARE,)),
            **{policy: partial(replayed, part, policy) for policy in POLICIES},
            "host": partial(hierarchy, part, (SHARE,), "lru"),
            "host+disk": partial(hierarchy, part, (SHARE, DISK_SHARE), "lru"),
            "hazard+disk": partial(hierarchy, part, (SHARE, DISK_SHARE), "hazard"),
        }
        yield {**sides, "host" + AGAIN: sides["host"], "arc" + AGAIN: sides["arc"]}
