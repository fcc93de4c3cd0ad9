"""What an eviction policy costs the scheduler thread: ours beside stock vLLM's, or beside our LRU.

Each policy runs in a process of its own every time; of worst calls the least of all rounds counts
(a stall of the policy's own is in every one). Times are the thread's own, so that what else runs on
the machine counts for less. `--chunks` says how many keys.

Ours steps over at most `MAX_SKIPPED` pinned keys in one call, as a level has to; a call that finds
no other evicts nothing, and the next one goes on from there. Stock's policies also hold each
chunk's status; ours do not, so the memory of the two is not quite the same thing.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

from harness import AGAIN, Options, Row, Side, apart

Key = bytes
RUN_KEYS = 64  # a prefix that is used in one go
MAX_SKIPPED = 512
NUM_PINNED_EVICTIONS = 100
PINNED_SHARE = 10  # one in so many of the oldest
OURS = {  # not through the entry points: a bench runs what lies here, not what is installed
    "lru": ("lru", "Lru"),
    "arc": ("arc", "Arc"),
    "fifo": ("fifo", "Fifo"),
    "2q": ("two_q", "TwoQ"),
    "s3fifo": ("s3fifo", "S3Fifo"),
    "sieve": ("sieve", "Sieve"),
    "wtinylfu": ("wtinylfu", "WTinyLfu"),
}
STOCK = ("lru", "arc")


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
    source, policy = name.split()
    if source == "ours":
        module, make = OURS[policy]
        found = importlib.import_module(f"undercroft.policies.{module}")
        return Ours(getattr(found, make)(num_keys))
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


def collect_s() -> float:
    """The fastest of three full collections."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        gc.collect()
        times.append(time.thread_time() - start)
    return min(times)


def per_key_s(call: Callable[[Any], None], batches: list[Any], keys_per_batch: int) -> float:
    """Median over groups of about a thousand keys."""
    group = max(1, 1_000 // keys_per_batch)
    times = []
    for first in range(0, len(batches) - group + 1, group):
        some = batches[first : first + group]
        start_ns = time.thread_time_ns()
        for batch in some:
            call(batch)
        times.append((time.thread_time_ns() - start_ns) / (group * keys_per_batch))
    return median(times) / 1e9


def worst_call_s(call: Callable[[Any], None], arguments: Iterator[Any]) -> float:
    clock, worst = time.thread_time_ns, 0
    for argument in arguments:
        start = clock()
        call(argument)
        worst = max(worst, clock() - start)
    return worst / 1e9


def measure(name: str, num_keys: int) -> dict[str, float]:
    """All numbers of one policy at one size; the policy is full throughout."""
    keys = make_keys(0, num_keys)
    newcomers = iter(make_keys(num_keys, num_keys + num_keys // 2 + 20_000))
    subject = make_subject(name, num_keys)
    gc_empty_s = collect_s()
    result: dict[str, float] = {}
    gc.disable()
    rss_before = rss_bytes()
    result["insert_s"] = per_key_s(subject.insert, keys, 1)
    result["bytes_per_key"] = (rss_bytes() - rss_before) / num_keys
    result["gc_s"] = max(0.0, collect_s() - gc_empty_s)

    singles = [[key] for run in make_runs(keys, num_keys // 256, seed=1) for key in run]
    result["hit_s"] = per_key_s(subject.hit, singles, 1)
    runs = list(make_runs(keys, num_keys // 256, seed=2))
    result["hit_by_64_s"] = per_key_s(subject.hit, runs, RUN_KEYS)

    def cycle(batch: list[Key]) -> None:
        subject.evict(len(batch))
        for key in batch:
            subject.insert(key)

    few = num_keys // 10
    result["evict_cycle_s"] = per_key_s(cycle, [[k] for k in islice(newcomers, few)], 1)
    fresh = list(islice(newcomers, few))
    runs = [fresh[i : i + RUN_KEYS] for i in range(0, few - RUN_KEYS, RUN_KEYS)]
    result["evict_cycle_by_64_s"] = per_key_s(cycle, runs, RUN_KEYS)
    result |= measure_worst(name, num_keys)
    return result


def measure_worst(name: str, num_keys: int) -> dict[str, float]:
    """The longest call of each kind on a policy that fills, is used, and turns over."""
    keys = make_keys(0, num_keys)
    subject = make_subject(name, num_keys)
    result = {"worst_insert_s": worst_call_s(subject.insert, iter(keys))}
    num_runs = num_keys * 5 // 4 // RUN_KEYS
    result["worst_hit_64_s"] = worst_call_s(subject.hit, make_runs(keys, num_runs, seed=3))
    for key in reversed(keys):
        subject.hit([key])  # so that the last keys are the oldest
    subject.pin(keys[-(num_keys // PINNED_SHARE) :])

    evicted = [0]

    def evict(_: int) -> None:
        evicted[0] += subject.evict(1)

    num_calls = 0
    while not evicted[0]:
        num_calls += 1
        seconds = worst_call_s(evict, iter([1]))
        result["first_evict_pinned_s"] = max(seconds, result.get("first_evict_pinned_s", 0.0))
    result["first_evict_num_calls"] = float(num_calls)
    result["worst_evict_pinned_s"] = worst_call_s(evict, iter(range(NUM_PINNED_EVICTIONS)))
    return result


ROWS = (
    # what, cost, unit, scale, whether the least of all rounds counts
    ("insert", "insert_s", "us/key", 1e6, False),
    ("hit", "hit_s", "us/key", 1e6, False),
    ("hit, 64 at once", "hit_by_64_s", "us/key", 1e6, False),
    ("evict and insert", "evict_cycle_s", "us/key", 1e6, False),
    ("evict and insert, 64 at once", "evict_cycle_by_64_s", "us/key", 1e6, False),
    ("memory", "bytes_per_key", "B/key", 1.0, False),
    ("worst insert", "worst_insert_s", "ms", 1e3, True),
    ("worst hit of 64", "worst_hit_64_s", "ms", 1e3, True),
    ("first eviction, 10 % pinned, worst call", "first_evict_pinned_s", "ms", 1e3, True),
    ("later evictions, worst call", "worst_evict_pinned_s", "ms", 1e3, True),
)
ALONE = (
    ("calls until the first eviction, 10 % pinned", "first_evict_num_calls", "calls", 1.0, False),
    ("what a full garbage collection takes longer", "gc_s", "ms", 1e3, True),
)


class Policies:
    """The case."""

    name = "policies"
    about = "eviction policies at many keys, beside stock vLLM's or, where it has none, our LRU"
    rounds = 6

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        return [
            Row(
                f"{policy}: {what}" if policy in STOCK else f"{policy} beside lru: {what}",
                (f"ours {policy}", cost),
                (f"stock {policy}" if policy in STOCK else "ours lru", cost) if is_paired else None,
                unit=unit,
                scale=scale,
                best=best,
            )
            for policy in OURS
            for rows, is_paired in ((ROWS, True), (ALONE, False))
            for what, cost, unit, scale, best in rows
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        num_keys = min(options.chunks, 20_000) if options.quick else options.chunks
        names = [f"ours {policy}" for policy in OURS] + [f"stock {policy}" for policy in STOCK]
        sides = {name: partial(apart, __file__, name, str(num_keys)) for name in names}
        yield {**sides, "ours lru" + AGAIN: sides["ours lru"]}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
