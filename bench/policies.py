"""What an eviction policy costs the scheduler thread, ours beside stock vLLM's.

    python bench/policies.py [--sizes 100000 1000000] [--reps 3] [--json OUT]

Each policy runs in a process of its own, in alternating order; the table shows medians over the
repetitions, and the least of their worst calls (a stall of the policy's own is in every one).
Times are the thread's own, so that what else runs on the machine counts for less.
Ours steps over at most `MAX_SKIPPED` pinned keys in one call, as a level has to; a call that finds
no other evicts nothing, and the next one goes on from there. Stock's policies also hold each
chunk's status; ours do not, so the memory of the two is not quite the same thing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

Key = bytes
RUN_KEYS = 64  # a prefix that is used in one go
MAX_SKIPPED = 512
NUM_PINNED_EVICTIONS = 100
PINNED_SHARE = 10  # one in so many of the oldest


class Subject(Protocol):
    """One policy under one set of verbs."""

    def insert(self, key: Key) -> None: ...
    def hit(self, keys: list[Key]) -> None: ...
    def evict(self, num_keys: int) -> int: ...
    def pin(self, keys: list[Key]) -> None: ...


class Ours:
    """The protocol of `EvictionPolicy.victims`: step over what is pinned, then touch it."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.insert = policy.on_insert
        self.pinned: set[Key] = set()

    def hit(self, keys: list[Key]) -> None:
        on_hit = self.policy.on_hit
        for key in keys:
            on_hit(key)

    def evict(self, num_keys: int) -> int:
        policy, pinned = self.policy, self.pinned
        if not pinned:
            chosen = (
                [next(policy.victims())]
                if num_keys == 1
                else list(islice(policy.victims(), num_keys))
            )
            for key in chosen:
                policy.on_evict(key)
            return len(chosen)
        chosen, skipped = [], []
        for key in policy.victims():
            (skipped if key in pinned else chosen).append(key)
            if len(chosen) == num_keys or len(skipped) == MAX_SKIPPED:
                break
        for key in chosen:
            policy.on_evict(key)
        for key in skipped:
            policy.on_hit(key)
        return len(chosen)

    def pin(self, keys: list[Key]) -> None:
        self.pinned.update(keys)


class Stock:
    """vLLM's policies, called as its manager calls them for chunks that are ready."""

    def __init__(self, policy: Any, status: Any) -> None:
        self.policy, self.status = policy, status
        self.num_inserted = 0

    def insert(self, key: Key) -> None:
        self.num_inserted += 1
        status = self.status(self.num_inserted)
        self.policy.insert(key, status)
        status.ref_cnt = 0
        self.policy.mark_evictable(key)

    def hit(self, keys: list[Key]) -> None:
        self.policy.touch(keys, None)

    def evict(self, num_keys: int) -> int:
        if self.policy.evict(num_keys, set()) is None:
            return 0
        return num_keys

    def pin(self, keys: list[Key]) -> None:
        for key in keys:
            self.policy.get(key).ref_cnt += 1
            self.policy.mark_non_evictable(key)


def make_subject(name: str, num_keys: int) -> Subject:
    source, policy = name.split(".")
    if source == "ours":
        from undercroft.policies.arc import Arc
        from undercroft.policies.lru import Lru

        return Ours({"lru": Lru, "arc": Arc}[policy](num_keys))
    from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    return Stock({"lru": LRUCachePolicy, "arc": ARCCachePolicy}[policy](num_keys), ChunkStatus)


def make_keys(start: int, stop: int) -> list[Key]:
    """As vLLM's: a SHA-256 and a group id."""
    return [hashlib.sha256(b"%d" % i).digest() + b"\0\0\0\0" for i in range(start, stop)]


def make_runs(keys: list[Key], num_runs: int, seed: int) -> Iterator[list[Key]]:
    """Prefixes somewhere among the keys, deepest first."""
    random = Random(seed)
    for _ in range(num_runs):
        first = random.randrange(len(keys) - RUN_KEYS)
        yield keys[first : first + RUN_KEYS][::-1]


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def collect_ms() -> float:
    """The fastest of three full collections."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        gc.collect()
        times.append(time.thread_time() - start)
    return min(times) * 1e3


def per_key_us(call: Callable[[Any], None], batches: list[Any], keys_per_batch: int) -> float:
    """Median over groups of about a thousand keys."""
    group = max(1, 1_000 // keys_per_batch)
    times = []
    for first in range(0, len(batches) - group + 1, group):
        some = batches[first : first + group]
        start_ns = time.thread_time_ns()
        for batch in some:
            call(batch)
        times.append((time.thread_time_ns() - start_ns) / (group * keys_per_batch))
    return median(times) / 1e3


def worst_call_ms(call: Callable[[Any], None], arguments: Iterator[Any]) -> float:
    clock, worst = time.thread_time_ns, 0
    for argument in arguments:
        start = clock()
        call(argument)
        worst = max(worst, clock() - start)
    return worst / 1e6


def measure(name: str, num_keys: int) -> dict[str, float]:
    """All numbers of one policy at one size; the policy is full throughout."""
    keys = make_keys(0, num_keys)
    newcomers = iter(make_keys(num_keys, num_keys + num_keys // 2 + 20_000))
    subject = make_subject(name, num_keys)
    result = {"gc_empty_ms": collect_ms()}
    gc.disable()
    rss_before = rss_bytes()
    result["insert_us"] = per_key_us(subject.insert, keys, 1)
    result["bytes_per_key"] = (rss_bytes() - rss_before) / num_keys
    result["gc_full_ms"] = collect_ms()

    singles = [[key] for run in make_runs(keys, num_keys // 256, seed=1) for key in run]
    result["hit_us"] = per_key_us(subject.hit, singles, 1)
    runs = list(make_runs(keys, num_keys // 256, seed=2))
    result["hit_by_64_us"] = per_key_us(subject.hit, runs, RUN_KEYS)

    def cycle(batch: list[Key]) -> None:
        subject.evict(len(batch))
        for key in batch:
            subject.insert(key)

    few = num_keys // 10
    result["evict_cycle_us"] = per_key_us(cycle, [[k] for k in islice(newcomers, few)], 1)
    fresh = list(islice(newcomers, few))
    runs = [fresh[i : i + RUN_KEYS] for i in range(0, few - RUN_KEYS, RUN_KEYS)]
    result["evict_cycle_by_64_us"] = per_key_us(cycle, runs, RUN_KEYS)
    result |= measure_worst(name, num_keys)
    return result


def measure_worst(name: str, num_keys: int) -> dict[str, float]:
    """The longest call of each kind on a policy that fills, is used, and turns over."""
    keys = make_keys(0, num_keys)
    subject = make_subject(name, num_keys)
    result = {"worst_insert_ms": worst_call_ms(subject.insert, iter(keys))}
    num_runs = num_keys * 5 // 4 // RUN_KEYS
    result["worst_hit_64_ms"] = worst_call_ms(subject.hit, make_runs(keys, num_runs, seed=3))
    for key in reversed(keys):
        subject.hit([key])  # so that the last keys are the oldest
    subject.pin(keys[-(num_keys // PINNED_SHARE) :])

    evicted = [0]

    def evict(_: int) -> None:
        evicted[0] += subject.evict(1)

    num_calls = 0
    while not evicted[0]:
        num_calls += 1
        ms = worst_call_ms(evict, iter([1]))
        result["first_evict_pinned_ms"] = max(ms, result.get("first_evict_pinned_ms", 0.0))
    result["first_evict_num_calls"] = float(num_calls)
    result["worst_evict_pinned_ms"] = worst_call_ms(evict, iter(range(NUM_PINNED_EVICTIONS)))
    return result


def run_child(name: str, num_keys: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, str(num_keys)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def summarize(row: str, values: list[float]) -> float:
    """The median; of worst calls the least, because a stall of the policy's is in every run."""
    return min(values) if row.endswith("_pinned_ms") or row.startswith("worst") else median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--no-stock", action="store_true", help="where vLLM is not installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]))))
        return
    sources = ["ours"] if args.no_stock else ["ours", "stock"]
    names = [f"{source}.{policy}" for policy in ("lru", "arc") for source in sources]
    report: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for num_keys in args.sizes:
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for rep in range(args.reps):
            for name in names if rep % 2 == 0 else names[::-1]:
                samples[name].append(run_child(name, num_keys))
        rows = {
            row: {name: summarize(row, [s[row] for s in samples[name]]) for name in names}
            for row in samples[names[0]][0]
        }
        report[str(num_keys)] = rows
        print(f"\n{num_keys:,} keys, median of {args.reps}")
        print(f"{'':24}" + "".join(f"{name:>14}" for name in names))
        for row, values in rows.items():
            print(f"{row:24}" + "".join(f"{values[name]:14.2f}" for name in names), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
