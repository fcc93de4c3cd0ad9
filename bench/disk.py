"""The disk tier beside vLLM's `fs` tier and a raw slab: the same bytes, threads and buffer.

    python bench/disk.py [--path DIR] [--mib 192] [--reps 7] [--threads 4 ...] [--json FILE]

Each number of `--threads` is one comparison among equals: ours, stock, raw; in the same repetition
stock runs with the 32 threads it ships with, see `ours/shipped`; ours ships with 4.
Every repetition runs all contenders one after the other, in an order that alternates; what is
compared are medians of ratios within a repetition, with their quartiles. GB = 1e9 payload bytes.
`fill` stores into new segments, `steady` into slots that were used before. Stock stores a job on
one thread and verifies nothing; ours verifies every load. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vllm.v1.kv_offload.tiering.fs import io as stock_io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from undercroft.clock import SystemClock
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk import DiskTier

OUR_THREADS = 4
STOCK_THREADS = 32
SIZES = (256 << 10, 1 << 20, 4 << 20)


def split(items: Sequence[int], job: int) -> list[list[int]]:
    return [list(items[at : at + job]) for at in range(0, len(items), job)]


class Buffer:
    """The host slots: one page-aligned region, filled once with bytes that do not compress."""

    def __init__(self, num_bytes: int) -> None:
        self.map = mmap.mmap(-1, num_bytes)
        block = os.urandom(1 << 20)
        for at in range(0, num_bytes, 1 << 20):
            self.map[at : at + (1 << 20)] = block
        self.view = memoryview(self.map)


def in_threads(work: Callable[[int], None], items: Iterable[int], num_threads: int) -> None:
    """Each item once, over that many threads; the first failure is raised."""
    todo, lock, errors = iter(list(items)), threading.Lock(), []

    def run() -> None:
        while True:
            with lock:
                item = next(todo, None)
            if item is None or errors:
                return
            try:
                work(item)
            except Exception as exc:  # noqa: BLE001 - raised by the caller
                errors.append(exc)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Stock:
    """vLLM's job functions on its own pool."""

    def __init__(self, path: Path, buffer: Buffer, size: int, count: int, num_threads: int) -> None:
        self.path, self.buffer, self.size, self.count = path / "stock", buffer, size, count
        self.direct = stock_io.probe_o_direct(str(path))
        self.num_threads = num_threads

    def names(self, items: Sequence[int]) -> list[str]:
        return [f"{self.path}/{i % 4096:03x}/{i % 256:02x}_g0/{i:064x}.bin" for i in items]

    def jobs(self, verb: Callable[..., None], job: int, *, store: bool) -> float:
        readers = self.num_threads // 2
        pool = DualQueueThreadPool(readers, self.num_threads - readers)
        queue = pool.enqueue_store if store else pool.enqueue_load
        tasks = [
            functools.partial(
                verb,
                self.names(items),
                self.buffer.view,
                [i * self.size for i in items],
                self.size,
                self.direct,
            )
            for items in split(range(self.count), job)
        ]
        begun = time.perf_counter()
        for number, task in enumerate(tasks):
            queue(number, 1, [task])
        pool.wait_idle()
        taken = time.perf_counter() - begun
        done = pool.get_finished()
        pool.shutdown()
        if len(done) != len(tasks) or not all(ok for _, ok, _ in done):
            raise SystemExit("stock's jobs failed")
        return taken

    def run(self, job: int) -> dict[str, float]:
        out = {
            "store": self.jobs(stock_io.batch_store_block, job, store=True),
            "load": self.jobs(stock_io.batch_load_block, job, store=False),
        }
        shutil.rmtree(self.path)
        return out


class Ours:
    """`DiskTier`; every chunk of a job is one task, as the hierarchy's movers take them."""

    def __init__(self, path: Path, buffer: Buffer, size: int, count: int, num_threads: int) -> None:
        self.path, self.buffer, self.size, self.count = path / "ours", buffer, size, count
        self.num_threads = num_threads

    def piece(self, number: int) -> memoryview:
        return self.buffer.view[number * self.size : (number + 1) * self.size]

    def run(self, job: int) -> dict[str, float]:
        del job
        tier = DiskTier(
            str(self.path),
            name="disk",
            namespace=Namespace({"bench": "disk"}),
            capacity_bytes=20 << 30,
            clock=SystemClock(),
            free_space_floor_bytes=0,
        )
        keys = [ChunkKey(i.to_bytes(32, "little") + bytes(4)) for i in range(self.count)]

        def store(number: int) -> None:
            tier.write_from(keys[number], self.piece(number))

        def load(number: int) -> None:
            if not tier.read_into(keys[number], self.piece(number)):
                raise SystemExit("a chunk is missing")

        out = {"fill": timed(store, self.count, self.num_threads)}
        out["load"] = timed(load, self.count, self.num_threads)
        for key in keys:
            tier.delete(key)
        out["store"] = timed(store, self.count, self.num_threads)
        tier.close()
        shutil.rmtree(self.path)
        return out


class Raw:
    """A preallocated slab, written once before: what the device gives to equal threads."""

    def __init__(self, path: Path, buffer: Buffer, size: int, count: int, num_threads: int) -> None:
        self.path, self.buffer, self.size, self.count = path / "raw", buffer, size, count
        self.num_threads = num_threads

    def run(self, job: int) -> dict[str, float]:
        del job
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, self.size * self.count)

        def store(number: int) -> None:
            at = number * self.size
            if os.pwrite(fd, self.buffer.view[at : at + self.size], at) != self.size:
                raise SystemExit("short write")

        def load(number: int) -> None:
            at = number * self.size
            if os.preadv(fd, [self.buffer.view[at : at + self.size]], at) != self.size:
                raise SystemExit("short read")

        out = {}
        for verb, work in (("fill", store), ("store", store), ("load", load)):
            out[verb] = timed(work, self.count, self.num_threads)
        os.close(fd)
        self.path.unlink()
        return out


def timed(work: Callable[[int], None], count: int, num_threads: int) -> float:
    begun = time.perf_counter()
    in_threads(work, range(count), num_threads)
    return time.perf_counter() - begun


def case(
    path: Path, buffer: Buffer, size: int, job: int, reps: int, num_threads: int
) -> dict[str, object]:
    count = len(buffer.view) // size
    contenders = {
        name: kind(path, buffer, size, count, threads)
        for name, kind, threads in (
            ("stock", Stock, num_threads),
            ("shipped", Stock, STOCK_THREADS),
            ("ours", Ours, num_threads),
            ("raw", Raw, num_threads),
        )
    }
    seconds: list[dict[str, dict[str, float]]] = []
    for rep in range(reps):
        order = list(contenders)
        if rep % 2:
            order.reverse()
        seconds.append({name: contenders[name].run(job or count) for name in order})
    return {
        "chunk_bytes": size,
        "job": job or count,
        "threads": num_threads,
        "GB/s": {
            f"{name} {verb}": round(
                len(buffer.view) / 1e9 / statistics.median(s[name][verb] for s in seconds), 3
            )
            for name in contenders
            for verb in seconds[0][name]
        },
        "ours/stock": {
            "store fill": ratio(seconds, ("stock", "store"), ("ours", "fill")),
            "store steady": ratio(seconds, ("stock", "store"), ("ours", "store")),
            "load": ratio(seconds, ("stock", "load"), ("ours", "load")),
        },
        "ours/shipped": {
            "store fill": ratio(seconds, ("shipped", "store"), ("ours", "fill")),
            "store steady": ratio(seconds, ("shipped", "store"), ("ours", "store")),
            "load": ratio(seconds, ("shipped", "load"), ("ours", "load")),
        },
        "ours/raw": {
            "store fill": ratio(seconds, ("raw", "fill"), ("ours", "fill")),
            "store steady": ratio(seconds, ("raw", "store"), ("ours", "store")),
            "load": ratio(seconds, ("raw", "load"), ("ours", "load")),
        },
    }


def ratio(
    seconds: list[dict[str, dict[str, float]]], base: tuple[str, str], ours: tuple[str, str]
) -> list[float]:
    """Lower quartile, median, upper quartile of the pairwise speed ratio."""
    found = sorted(s[base[0]][base[1]] / s[ours[0]][ours[1]] for s in seconds)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return [round(low, 2), round(middle, 2), round(high, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--threads", type=int, nargs="*", default=[OUR_THREADS])
    parser.add_argument("--jobs", type=int, nargs="*", default=[16, 0], help="0: all in one")
    parser.add_argument("--json")
    given = parser.parse_args()
    results = []
    buffer = Buffer(given.mib << 20)
    with tempfile.TemporaryDirectory(dir=given.path, prefix="undercroft-bench-") as path:
        for size, job, threads in itertools.product(given.sizes, given.jobs, given.threads):
            found = case(Path(path), buffer, size, job, given.reps, threads)
            results.append(found)
            print(f"{size >> 10:5d} KiB, jobs of {found['job']}, {threads} threads")
            for block in ("GB/s", "ours/stock", "ours/shipped", "ours/raw"):
                print(f"      {block}: {found[block]}", flush=True)
    if given.json:
        host = {"machine": platform.machine(), "kernel": platform.release(), "cpus": os.cpu_count()}
        Path(given.json).write_text(json.dumps({"host": host, "results": results}, indent=1))


if __name__ == "__main__":
    main()
