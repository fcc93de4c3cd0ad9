"""What the scheduler thread pays: ours beside stock vLLM's CPU offloading manager.

    python bench/scheduler.py [--chunks 1000000] [--runs 3] [--json FILE]

For both: fill, look up, load, evict and store again, with the oldest 10 % pinned by loads that do
not end, in batches of 1, 64 and 1024 keys. Prints microseconds a key (median over batches), the
worst single call in milliseconds, bytes of memory a chunk beyond its key, and a full garbage
collection with and without the manager. Ours and stock run in turn, in processes of their own,
`--runs` times each over the very same calls. What other processes and the hypervisor take from a
call differs from run to run, what is the call's own comes back: a call counts with the shortest of
its times, and the worst call is the longest of those. The worst of all single times stands beside.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = (1, 64, 1024)


def keys_from(start: int, count: int) -> list[bytes]:
    return [
        hashlib.sha256(i.to_bytes(8, "big")).digest() + bytes(4)
        for i in range(start, start + count)
    ]


class Ours:
    def __init__(self, chunks: int, policy: str) -> None:
        from undercroft.clock import SystemClock
        from undercroft.hierarchy.counters import Counters
        from undercroft.hierarchy.events import LevelEvents
        from undercroft.hierarchy.hierarchy import Hierarchy, Limits
        from undercroft.hierarchy.pool import Pool
        from undercroft.hierarchy.request import Request
        from undercroft.hierarchy.slots import Slots
        from undercroft.plugins import find

        total = chunks * 4096
        slots = Slots(total, [4096])
        slots.set_ready_bytes(total)
        self.new_request = Request
        self.hierarchy = Hierarchy(
            lambda on_evict: Pool(
                slots, make_policy=find("policies", policy), class_of=lambda _: 0, on_evict=on_evict
            ),
            (),
            buffer=memoryview(b""),
            clock=SystemClock(),
            counters=Counters(),
            events=LevelEvents(enabled=False),
            limits=Limits(),
        )

    def begin(self, name: str) -> Any:
        return self.new_request(name)

    def lookup(self, keys: list[bytes], request: Any) -> None:
        lookup = self.hierarchy.lookup
        for key in keys:
            lookup(key, request)

    def prepare_load(self, keys: list[bytes], request: Any) -> None:
        self.hierarchy.prepare_load(keys, request)

    def complete_load(self, keys: list[bytes], request: Any) -> None:
        self.hierarchy.complete_load(keys, request)

    def prepare_store(self, keys: list[bytes], request: Any) -> list[bytes]:
        return self.hierarchy.prepare_store(keys, request).keys

    def complete_store(self, keys: list[bytes], request: Any) -> None:
        self.hierarchy.complete_store(keys, request)

    def finish(self, request: Any) -> None:
        self.hierarchy.finish_request(request)

    def end_step(self) -> None:
        self.hierarchy.end_step()
        self.hierarchy.step_ended()


class Stock:
    def __init__(self, chunks: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.context = ReqContext
        self.end = ScheduleEndContext([], [])
        self.manager = CPUOffloadingManager(num_chunks=chunks, cache_policy=policy)

    def begin(self, name: str) -> Any:
        context = self.context(req_id=name)
        self.manager.on_new_request(context)
        return context

    def lookup(self, keys: list[bytes], request: Any) -> None:
        lookup = self.manager.lookup
        for key in keys:
            lookup(key, request)

    def prepare_load(self, keys: list[bytes], request: Any) -> None:
        self.manager.prepare_load(keys, request)

    def complete_load(self, keys: list[bytes], request: Any) -> None:
        self.manager.complete_load(keys, request)

    def prepare_store(self, keys: list[bytes], request: Any) -> list[bytes]:
        output = self.manager.prepare_store(keys, request)
        return output.keys_to_store if output else []

    def complete_store(self, keys: list[bytes], request: Any) -> None:
        self.manager.complete_store(keys, request)

    def finish(self, request: Any) -> None:
        self.manager.on_request_finished(request)

    def end_step(self) -> None:
        self.manager.on_schedule_end(self.end)


class Timer:
    def __init__(self) -> None:
        self.calls_us: dict[str, list[float]] = defaultdict(list)
        self.keys_a_call: dict[str, int] = {}

    def __call__(self, name: str, count: int, call: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        seconds = time.thread_time() - start
        self.calls_us[name].append(round(seconds * 1e6, 1))
        self.keys_a_call.setdefault(name, count)
        return result


def rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def full_gc_ms() -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        gc.collect()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def store(side: Any, timer: Timer, label: str, keys: list[bytes], batch: int) -> None:
    for i in range(0, len(keys), batch):
        part = keys[i : i + batch]
        request = side.begin(f"{label}{i}")
        accepted = timer(f"{label} prepare_store", len(part), side.prepare_store, part, request)
        if accepted:
            timer(f"{label} complete_store", len(part), side.complete_store, accepted, request)
        timer(f"{label} finish", len(part), side.finish, request)
        timer("end_step", 1, side.end_step)


def load(side: Any, timer: Timer, label: str, keys: list[bytes], batch: int) -> None:
    for i in range(0, len(keys), batch):
        part = keys[i : i + batch]
        request = side.begin(f"{label}{i}")
        timer(f"{label} lookup hit", len(part), side.lookup, part, request)
        timer(f"{label} prepare_load", len(part), side.prepare_load, part, request)
        timer(f"{label} complete_load", len(part), side.complete_load, part, request)
        timer(f"{label} finish", len(part), side.finish, request)
        timer("end_step", 1, side.end_step)


def measure(kind: str, policy: str, chunks: int) -> dict[str, Any]:
    make = Ours if kind == "ours" else Stock
    warm = make(64, policy)  # imports and first calls are not what is measured
    store(warm, Timer(), "warm", keys_from(0, 32), 8)
    keys = keys_from(0, chunks)
    fresh = keys_from(chunks, chunks // 2)
    absent = keys_from(4 * chunks, 65536)
    batches = {
        b: (
            keys[chunks // 2 + i * 30000 :][: 30000 if b > 1 else 3000],
            fresh[i * (chunks // 6) :][: chunks // 6 if b > 1 else 5000],
        )
        for i, b in enumerate(BATCHES)
    }
    gc.collect()
    gc.freeze()  # what the driver itself keeps is not for the collector to walk through
    gc_before_ms, rss_before = full_gc_ms(), rss_bytes()
    side, timer = make(chunks, policy), Timer()
    store(side, timer, "fill b1024", keys, 1024)
    memory_per_chunk = (rss_bytes() - rss_before) / chunks
    gc_after_ms = full_gc_ms()
    for i in range(0, chunks // 10, 1024):
        holder = side.begin(f"holder{i}")
        side.lookup(keys[i : i + 1024], holder)
        timer("pin prepare_load", 1024, side.prepare_load, keys[i : i + 1024], holder)
    for batch, (some, _) in batches.items():
        load(side, timer, f"b{batch}", some, batch)
        request = side.begin("absent")
        for j in range(0, 16384, batch):
            timer(f"b{batch} lookup miss", batch, side.lookup, absent[j : j + batch], request)
        side.finish(request)
    for batch, (_, new) in batches.items():
        store(side, timer, f"b{batch} evict", new, batch)
    return {
        "kind": kind,
        "policy": policy,
        "chunks": chunks,
        "calls_us": timer.calls_us,
        "keys_a_call": timer.keys_a_call,
        "bytes_per_chunk": memory_per_chunk,
        "full_gc_ms": [gc_before_ms, gc_after_ms],
    }


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs over the same calls as one."""
    us_per_key, worst_ms, worst_single_ms = {}, {}, {}
    for name, count in runs[0]["keys_a_call"].items():
        best = [min(times) for times in zip(*(r["calls_us"][name] for r in runs), strict=True)]
        us_per_key[name] = statistics.median(best) / count
        worst_ms[name] = max(best) / 1e3
        worst_single_ms[name] = max(max(r["calls_us"][name]) for r in runs) / 1e3
    return {
        "us_per_key": us_per_key,
        "worst_ms": worst_ms,
        "worst_single_ms": worst_single_ms,
        "bytes_per_chunk": statistics.median(r["bytes_per_chunk"] for r in runs),
        "full_gc_ms": [min(r["full_gc_ms"][i] for r in runs) for i in (0, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--policy", default="lru", choices=["lru", "arc"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["ours", "stock"], help="one run, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.policy, args.chunks)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "stock": []}
    environ = {**os.environ, "PYTHONHASHSEED": "0"}  # the same calls, to the last rehash
    for _ in range(args.runs):
        for kind, found in runs.items():
            command = [sys.executable, __file__, "--only", kind, "--policy", args.policy]
            command += ["--chunks", str(args.chunks)]
            run = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environ
            )
            found.append(json.loads(run.stdout.splitlines()[-1]))
    results = {kind: merged(found) for kind, found in runs.items()}
    ours, stock = results["ours"], results["stock"]
    print(f"{args.chunks} chunks, policy {args.policy}; us a key (worst call, ms)")
    print(f"{'call':32} {'ours':>20} {'stock':>20} {'ratio':>7}")
    for name, us in ours["us_per_key"].items():
        other = stock["us_per_key"].get(name, float("nan"))
        print(
            f"{name:32} {us:10.2f} ({ours['worst_ms'][name]:7.2f}) {other:10.2f} "
            f"({stock['worst_ms'].get(name, float('nan')):7.2f}) {us / other:7.2f}"
        )
    for kind, result in results.items():
        before, after = result["full_gc_ms"]
        print(
            f"{kind}: worst call {max(result['worst_ms'].values()):.2f} ms "
            f"(single time {max(result['worst_single_ms'].values()):.2f}), "
            f"{result['bytes_per_chunk']:.0f} bytes a chunk, "
            f"full collection {before:.1f} ms without, {after:.1f} ms with"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
