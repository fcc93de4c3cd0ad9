"""What the scheduler thread pays: ours beside stock vLLM's CPU offloading manager.

For both: fill, look up, load, evict and store again, with the oldest 10 % pinned by loads that do
not end, in batches of 1, 64 and 1024 keys; processor time of the thread. Every measurement is a
process of its own over the very same calls (fixed hash seed), so that the smallest worst call of
all rounds is the calls' own, and not what other processes took. Ours does part of the work of a
store or load later, or ahead: rows that say `all` contain `begin`, `finish`, `end_step` and
`stats`, which vLLM calls once a request or step.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import AGAIN, Goal, Options, Row, Side, apart

BATCHES = (1, 64, 1024)


def keys_from(start: int, count: int) -> list[bytes]:
    return [
        hashlib.sha256(i.to_bytes(8, "big")).digest() + bytes(4)
        for i in range(start, start + count)
    ]


class Managed:
    """What both managers are asked in the same way."""

    manager: Any

    def __init__(self) -> None:
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

        self.context = ReqContext
        self.end = ScheduleEndContext([], [])

    def new(self, name: str, keys: list[bytes]) -> Any:
        """A request of these keys, as vLLM describes it."""
        request = self.context(req_id=name)
        for index, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (index + 1))
        return request

    def begin(self, request: Any) -> None:
        self.manager.on_new_request(request)

    def lookup(self, keys: list[bytes], request: Any) -> None:
        lookup = self.manager.lookup
        for key in keys:
            lookup(key, request)

    def prepare_load(self, keys: list[bytes], request: Any) -> None:
        self.manager.prepare_load(keys, request)

    def complete_load(self, keys: set[bytes], request: Any) -> None:
        self.manager.complete_load(keys, request)

    def prepare_store(self, keys: list[bytes], request: Any) -> list[bytes]:
        output = self.manager.prepare_store(keys, request)
        return output.keys_to_store if output else []

    def complete_store(self, keys: set[bytes], request: Any) -> None:
        self.manager.complete_store(keys, request)

    def finish(self, request: Any) -> None:
        self.manager.on_request_finished(request)

    def end_step(self) -> None:
        self.manager.on_schedule_end(self.end)

    def stats(self) -> None:
        self.manager.get_stats()


class Ours(Managed):
    """The manager that `UndercroftConnector` makes."""

    def __init__(self, chunks: int, policy: str, clock: Any = None) -> None:
        from undercroft.clock import SystemClock
        from undercroft.engines.vllm.connected import ConnectedManager
        from undercroft.engines.vllm.tally import Tally
        from undercroft.hierarchy.counters import Counters
        from undercroft.hierarchy.events import LevelEvents
        from undercroft.hierarchy.hierarchy import Hierarchy, Limits
        from undercroft.hierarchy.pool import Pool
        from undercroft.hierarchy.slots import Slots
        from undercroft.plugins import find

        super().__init__()
        total = chunks * 4096
        slots = Slots(total, [4096])
        slots.set_ready_bytes(total)
        counters, clock = Counters(), clock or SystemClock()
        hierarchy = Hierarchy(
            lambda on_evict: Pool(
                slots, make_policy=find("policies", policy), class_of=lambda _: 0, on_evict=on_evict
            ),
            (),
            buffer=memoryview(b""),
            clock=clock,
            counters=counters,
            events=LevelEvents(enabled=False),
            limits=Limits(),
        )
        self.manager = ConnectedManager(
            hierarchy,
            group_ids=[0],
            close=lambda: None,
            refresh=lambda: None,
            tally=Tally(counters, clock, [16]),
        )


class Stock(Managed):
    def __init__(self, chunks: int, policy: str) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        super().__init__()
        self.manager = CPUOffloadingManager(num_chunks=chunks, cache_policy=policy)


class Timer:
    def __init__(self) -> None:
        self.calls_s: dict[str, list[float]] = defaultdict(list)
        self.num_keys: dict[str, int] = defaultdict(int)

    def __call__(self, name: str, count: int, call: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        self.calls_s[name].append(time.thread_time() - start)
        self.num_keys[name] += count
        return result

    def median_s(self, name: str) -> float:
        """Seconds a key."""
        calls = self.calls_s[name]
        return statistics.median(calls) * len(calls) / self.num_keys[name]

    def mean_s(self, name: str) -> float:
        """Seconds a key."""
        return sum(self.calls_s[name]) / self.num_keys[name]

    def worst_s(self) -> dict[str, float]:
        """The longest of each kind of call; a batch of lookups is many calls."""
        return {name: max(calls) for name, calls in self.calls_s.items() if _is_one_call(name)}


def _is_one_call(name: str) -> bool:
    return "lookup" not in name or name.startswith("b1 ")


def rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def full_gc_s() -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        gc.collect()
        times.append(time.perf_counter() - start)
    return min(times)


def store(side: Any, timer: Timer, label: str, keys: list[bytes], batch: int) -> None:
    for i in range(0, len(keys), batch):
        part = keys[i : i + batch]
        request = side.new(f"{label}{i}", part)
        timer(f"{label} begin", len(part), side.begin, request)
        accepted = set(timer(f"{label} prepare", len(part), side.prepare_store, part, request))
        timer(f"{label} complete", len(part), side.complete_store, accepted, request)
        finish(side, timer, label, request, len(part))


def load(side: Any, timer: Timer, label: str, keys: list[bytes], batch: int) -> None:
    for i in range(0, len(keys), batch):
        part = keys[i : i + batch]
        request = side.new(f"{label}{i}", part)
        timer(f"{label} begin", len(part), side.begin, request)
        timer(f"{label} lookup hit", len(part), side.lookup, part, request)
        timer(f"{label} prepare", len(part), side.prepare_load, part, request)
        timer(f"{label} complete", len(part), side.complete_load, set(part), request)
        finish(side, timer, label, request, len(part))


def finish(side: Any, timer: Timer, label: str, request: Any, count: int) -> None:
    timer(f"{label} finish", count, side.finish, request)
    timer(f"{label} end_step", count, side.end_step)
    timer(f"{label} stats", count, side.stats)


def measure(kind: str, policy: str, chunks: int) -> dict[str, float]:
    make = Ours if kind == "ours" else Stock
    warm = make(64, policy)  # imports and first calls are not what is measured
    store(warm, Timer(), "warm", keys_from(0, 32), 8)
    keys = keys_from(0, chunks)
    fresh = keys_from(chunks, chunks // 2)
    absent = keys_from(4 * chunks, 65536)
    batches = {
        b: (
            keys[chunks // 2 + i * chunks // 32 :][: chunks // 32 if b > 1 else chunks // 300],
            fresh[i * (chunks // 6) :][: chunks // 6 if b > 1 else chunks // 200],
        )
        for i, b in enumerate(BATCHES)
    }
    gc.collect()
    gc.freeze()  # what the driver itself keeps is not for the collector to walk through
    gc_before_s, rss_before = full_gc_s(), rss_bytes()
    side, timer = make(chunks, policy), Timer()
    store(side, timer, "fill", keys, 1024)
    memory_per_chunk = (rss_bytes() - rss_before) / chunks
    gc_after_s = full_gc_s()
    for i in range(0, chunks // 10, 1024):
        holder = side.new(f"holder{i}", keys[i : i + 1024])
        side.begin(holder)
        side.lookup(keys[i : i + 1024], holder)
        timer("pin prepare_load", 1024, side.prepare_load, keys[i : i + 1024], holder)
    for batch, (some, _) in batches.items():
        load(side, timer, f"b{batch} load", some, batch)
        request = side.new("absent", absent)
        side.begin(request)
        for j in range(0, 16384, batch):
            timer(f"b{batch} lookup miss", batch, side.lookup, absent[j : j + batch], request)
        side.finish(request)
    for batch, (_, new) in batches.items():
        store(side, timer, f"b{batch} store", new, batch)
    worst = timer.worst_s()
    return {
        **per_key(timer),
        "worst call": max(worst.values()),
        **{f"worst {name}": seconds for name, seconds in worst.items()},
        "bytes a chunk": memory_per_chunk,
        "full gc": gc_after_s - min(gc_before_s, gc_after_s),
    }


def per_key(timer: Timer) -> dict[str, float]:
    """Seconds a key: medians of what is one call, means of what is spread over several."""
    found: dict[str, float] = {}
    for b in BATCHES:
        found[f"b{b} lookup hit"] = timer.median_s(f"b{b} load lookup hit")
        found[f"b{b} lookup miss"] = timer.median_s(f"b{b} lookup miss")
        for what in ("load", "store"):
            calls = [f"b{b} {what} prepare", f"b{b} {what} complete"]
            around = [f"b{b} {what} {call}" for call in ("begin", "finish", "end_step", "stats")]
            found[f"b{b} {what}"] = sum(map(timer.median_s, calls))
            found[f"b{b} {what} all"] = sum(map(timer.mean_s, calls + around))
    return found


class Scheduler:
    """The case."""

    name = "scheduler"
    about = "the scheduler thread's calls at many chunks, beside stock vLLM's manager"
    rounds = 6
    policy = "lru"

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        rows = []
        for b in BATCHES:
            for what, label in (
                ("lookup hit", "lookup, hit"),
                ("lookup miss", "lookup, miss"),
                ("load", "load + complete"),
                ("load all", "load, all of it"),
                ("store", "store + complete, evicting"),
                ("store all", "store, evicting, all of it"),
            ):
                cost = f"b{b} {what}"
                goals = [] if "all" in what or "miss" in what else [Goal(least=2.0)]
                rows.append(
                    Row(
                        f"{label}, {b} a batch",
                        ("ours", cost),
                        ("stock", cost),
                        unit="us/key",
                        scale=1e6,
                        goals=goals,
                    )
                )
        worst = [Goal(most=2.0)]
        return [
            *rows,
            Row(
                "worst single call (up to 1,024 keys)",
                ("ours", "worst call"),
                ("stock", "worst call"),
                unit="ms",
                scale=1e3,
                best=True,
                goals=worst,
            ),
            Row(
                "memory beyond the key",
                ("ours", "bytes a chunk"),
                ("stock", "bytes a chunk"),
                unit="B",
                goals=[Goal(most=200)],
            ),
            Row(
                "what a full garbage collection takes longer",
                ("ours", "full gc"),
                unit="ms",
                scale=1e3,
                best=True,
                goals=[Goal(most=1.0)],
            ),
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        chunks = min(options.chunks, 20_000) if options.quick else options.chunks
        yield {
            name: partial(apart, __file__, name.removesuffix(AGAIN), self.policy, str(chunks))
            for name in ("ours", "stock", "ours" + AGAIN)
        }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
