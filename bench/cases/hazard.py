"""What `hazard` costs the scheduler thread, beside our LRU: the policy alone, and all there is.

The policy alone is called as the hierarchy calls it: a request is told as a whole when it ends,
then what was stored is inserted, deepest first; room is made before it is stored. LRU is not told
of requests, but of each chunk that they hit. Around it, the manager that vLLM's scheduler calls:
whole requests of a trace, their hits loaded, the rest stored, at the trace's own times.

Every measurement is a process of its own; times are the thread's own. Ratios above 1: `hazard` is
the cheaper one. To cost twice what LRU costs is a ratio of 0.5.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from cases.policies import make_keys
from harness import AGAIN, Goal, Options, Row, Side, apart

LENGTHS = (8, 64, 512)
TRACES = Path(__file__).parents[2] / "examples" / "data" / "traces"
MIXES = {
    "agents": ("weka_claude_code_A.jsonl.gz", 0.02, 600),
    "chat": ("mooncake_conversation_first60pct.jsonl.gz", 0.02, 3000),
}
"""A trace, the share of its blocks there is room for, and requests to measure after as many."""
GAP_S = 0.5


class Alone:
    """A policy, called as the pool calls it."""

    def __init__(self, name: str, num_chunks: int) -> None:
        from undercroft.policies.hazard import Hazard
        from undercroft.policies.lru import Lru

        self.policy: Any = Hazard(num_chunks) if name == "hazard" else Lru(num_chunks)
        self.learns = name == "hazard"
        self.now_s = 0.0

    def hit(self, keys: Sequence[bytes]) -> None:
        """A request that ended and found all it asked for."""
        self.now_s += GAP_S
        if self.learns:
            self.policy.on_request(keys, self.now_s)
            return
        on_hit = self.policy.on_hit
        for key in reversed(keys):
            on_hit(key)

    def store(self, keys: Sequence[bytes]) -> None:
        """A request that ended and found nothing, told of after it was stored."""
        self.now_s += GAP_S
        if self.learns:
            self.policy.on_request(keys, self.now_s)
            self.policy.on_insert_all(keys[::-1])
            return
        on_insert = self.policy.on_insert
        for key in reversed(keys):
            on_insert(key)

    def evict(self, num_keys: int) -> None:
        """Room for so many."""
        if self.learns:
            self.policy.evict(num_keys, lambda _key: False)
            return
        chosen = []
        for key in self.policy.victims():
            chosen.append(key)
            if len(chosen) == num_keys:
                break
        for key in chosen:
            self.policy.on_evict(key)


def measure_alone(name: str, num_chunks: int, length: int) -> dict[str, float]:
    """Seconds a key, and the longest call."""
    keys = make_keys(0, num_chunks + num_chunks // 2)
    paths = [keys[at : at + length] for at in range(0, len(keys) - length + 1, length)]
    num_first = num_chunks // length
    side = Alone(name, num_chunks)
    for path in paths[:num_first]:
        side.store(path)
    gc.collect()
    gc.disable()
    clock, new, hits, worst = time.thread_time_ns, [], [], 0
    for path in paths[num_first:]:
        start = clock()
        side.evict(length)
        middle = clock()
        side.store(path)
        end = clock()
        worst = max(worst, middle - start, end - middle)
        new.append(end - start)
    resident = [path for path in paths if path[0] in side.policy and path[-1] in side.policy]
    random = Random(length)
    for path in random.choices(resident, k=len(paths) - num_first):
        start = clock()
        side.hit(path)
        hits.append(clock() - start)
    gc.enable()
    worst = max(worst, *hits)
    # Means of groups, so that what is due once in 256 requests counts.
    return {
        f"new {length}": _typical(new) / length / 1e9,
        f"hit {length}": _typical(hits) / length / 1e9,
        f"worst {length}": worst / 1e9,
    }


def _typical(calls_ns: Sequence[int]) -> float:
    """The median of the means of up to nine stretches."""
    size = max(1, len(calls_ns) // 9)
    return median(
        sum(calls_ns[at : at + size]) / size for at in range(0, len(calls_ns) - size + 1, size)
    )


def measure_mix(name: str, trace_name: str) -> dict[str, float]:
    """Seconds a key of whole requests, everything that vLLM's scheduler calls taken together."""
    from cases.scheduler import Ours
    from undercroft.sim.moment import Moment
    from undercroft.traces import load

    file, share, num_requests = MIXES[trace_name]
    trace = load(TRACES / file)
    num_chunks = int(trace.num_blocks * share)
    keys = make_keys(0, trace.num_blocks)
    moment = Moment()
    side = Ours(num_chunks, name, moment)
    gc.collect()
    gc.freeze()
    num_keys, total_s, worst_s = 0, 0.0, 0.0
    for number, (path, time_ms) in enumerate(
        zip(trace.iter_blocks(), trace.times_ms.tolist(), strict=True)
    ):
        if number == 2 * num_requests:
            break
        moment.set(time_ms / 1000)
        spent = _run_request(side, f"r{number}", [keys[block] for block in path])
        if number >= num_requests:
            num_keys += len(path)
            total_s += sum(spent)
            worst_s = max(worst_s, *spent)
    return {f"mix {trace_name}": total_s / num_keys, f"mix worst {trace_name}": worst_s}


def _run_request(side: Any, name: str, keys: list[bytes]) -> list[float]:
    """Seconds of each call."""
    request = side.new(name, keys)
    spent: list[float] = []

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time()
        result = call(*arguments)
        spent.append(time.thread_time() - start)
        return result

    timed(side.begin, request)
    num_hits = 0
    for key in keys:  # as vLLM asks: up to the first that is not there
        start = time.thread_time()
        found = side.manager.lookup(key, request)
        spent.append(time.thread_time() - start)
        if found.name != "HIT":
            break
        num_hits += 1
    if num_hits:
        timed(side.prepare_load, keys[:num_hits], request)
        timed(side.complete_load, set(keys[:num_hits]), request)
    if num_hits < len(keys):
        accepted = timed(side.prepare_store, keys[num_hits:], request)
        timed(side.complete_store, set(accepted), request)
    timed(side.finish, request)
    timed(side.end_step)
    timed(side.stats)
    return spent


class HazardCase:
    """The case."""

    name = "hazard"
    about = "the policy `hazard` beside `lru`: a key's cost to the scheduler"
    rounds = 6

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        goal = [Goal(least=0.5)]
        keys = (("hit", "used again"), ("new", "new, at a full level"))
        return [
            *(
                _row(f"policy alone: {label}, {length} a request", f"{what} {length}")
                for length in LENGTHS
                for what, label in keys
            ),
            *(_row(f"scheduler in all: {trace}", f"mix {trace}", goal) for trace in MIXES),
            *(_worst(f"policy alone: longest call, {n} keys", f"worst {n}") for n in LENGTHS),
            *(_worst(f"scheduler: longest call, {trace}", f"mix worst {trace}") for trace in MIXES),
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        chunks = 20_000 if options.quick else min(options.chunks, 100_000)
        yield {
            name: partial(apart, __file__, name.removesuffix(AGAIN), str(chunks))
            for name in ("hazard", "lru", "hazard" + AGAIN)
        }


def _row(what: str, cost: str, goals: Sequence[Goal] = ()) -> Row:
    return Row(what, ("hazard", cost), ("lru", cost), unit="us/key", scale=1e6, goals=goals)


def _worst(what: str, cost: str) -> Row:
    return Row(what, ("hazard", cost), ("lru", cost), unit="ms", scale=1e3, best=True)


def measure(name: str, num_chunks: int) -> dict[str, float]:
    """All numbers of one policy."""
    found: dict[str, float] = {}
    for length in LENGTHS:
        found |= measure_alone(name, num_chunks, length)
    for trace in MIXES:
        found |= measure_mix(name, trace)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
