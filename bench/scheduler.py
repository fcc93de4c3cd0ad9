"""What the scheduler thread pays: ours beside stock vLLM's CPU offloading manager.

    python bench/scheduler.py [--chunks 1000000] [--json FILE]

For both: fill, look up, load, evict and store again, with the oldest 10 % pinned by loads that do
not end, in batches of 1, 64 and 1024 keys. Prints microseconds a key (median over batches), the
worst single call in milliseconds, bytes of memory a chunk beyond its key, and a full garbage
collection with and without the manager. Ours and stock run in turn, in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
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
        self.per_key_us: dict[str, list[float]] = defaultdict(list)
        self.worst_ms: dict[str, float] = defaultdict(float)

    def __call__(self, name: str, count: int, call: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        seconds = time.thread_time() - start
        self.per_key_us[name].append(seconds / count * 1e6)
        self.worst_ms[name] = max(self.worst_ms[name], seconds * 1e3)
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
    gc.collect()
    gc.freeze()
    gc_before_ms, rss_before = full_gc_ms(), rss_bytes()
    side, timer = make(chunks, policy), Timer()
    store(side, timer, "fill b1024", keys, 1024)
    memory_per_chunk = (rss_bytes() - rss_before) / chunks
    gc_after_ms = full_gc_ms()
    pinned = keys[: chunks // 10]
    holder = side.begin("holder")
    for i in range(0, len(pinned), 1024):
        side.lookup(pinned[i : i + 1024], holder)
        timer("pin prepare_load", 1024, side.prepare_load, pinned[i : i + 1024], holder)
    for i, batch in enumerate(BATCHES):
        some = keys[chunks // 2 + i * 30000 :][: 30000 if batch > 1 else 3000]
        load(side, timer, f"b{batch}", some, batch)
        request = side.begin("absent")
        for j in range(0, 16384, batch):
            timer(f"b{batch} lookup miss", batch, side.lookup, absent[j : j + batch], request)
        side.finish(request)
    share = len(fresh) // len(BATCHES)
    for i, batch in enumerate(BATCHES):
        part = fresh[i * share : i * share + (share if batch > 1 else 5000)]
        store(side, timer, f"b{batch} evict", part, batch)
    return {
        "kind": kind,
        "policy": policy,
        "chunks": chunks,
        "us_per_key": {k: statistics.median(v) for k, v in timer.per_key_us.items()},
        "worst_ms": dict(timer.worst_ms),
        "bytes_per_chunk": memory_per_chunk,
        "full_gc_ms": [gc_before_ms, gc_after_ms],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--policy", default="lru", choices=["lru", "arc"])
    parser.add_argument("--only", choices=["ours", "stock"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.policy, args.chunks)))
        return
    results = {}
    for kind in ("ours", "stock"):
        command = [sys.executable, __file__, "--only", kind, "--policy", args.policy]
        command += ["--chunks", str(args.chunks)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[kind] = json.loads(run.stdout.splitlines()[-1])
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
            f"{kind}: worst call {max(result['worst_ms'].values()):.2f} ms, "
            f"{result['bytes_per_chunk']:.0f} bytes a chunk, "
            f"full collection {before:.1f} ms without, {after:.1f} ms with"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
