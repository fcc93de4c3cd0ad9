"""The disk tier beside its peers and a raw slab: the same bytes, the same buffer, one process.

Peers: stock vLLM's `fs` tier, with the 32 threads it ships with (`stock`) and with as few as ours
(`stock-few`), and LMCache's `fs_native` adapter (its native client, O_DIRECT, 4 workers as
shipped). `raw` is a preallocated slab under O_DIRECT with as many threads as ours: what the device
gives. `fill` stores into new segments, `steady` into slots that were used before; the peers write a
new file for each chunk always. Stock stores a job on one thread. Ours verifies every load, nobody
else does. GB = 1e9 payload bytes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import AGAIN, Goal, Options, Row, Side
from undercroft.clock import SystemClock
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk import DiskTier

PEERS = Path(sys.prefix) / "peers"
STOCK_THREADS = 32
LMCACHE_WORKERS = 4
SIZES = (256 << 10, 1 << 20, 4 << 20)
JOBS = (16, 0)
CONTROL = (1 << 20, 16)


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
        from vllm.v1.kv_offload.tiering.fs import io as stock_io
        from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

        self.path, self.buffer, self.size, self.count = path / "stock", buffer, size, count
        self.io, self.new_pool = stock_io, DualQueueThreadPool
        self.direct = stock_io.probe_o_direct(str(path))
        self.num_threads = num_threads

    def names(self, items: Sequence[int]) -> list[str]:
        return [f"{self.path}/{i % 4096:03x}/{i % 256:02x}_g0/{i:064x}.bin" for i in items]

    def jobs(self, verb: Callable[..., None], job: int, *, store: bool) -> float:
        readers = self.num_threads // 2
        pool = self.new_pool(readers, self.num_threads - readers)
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
            "store": self.jobs(self.io.batch_store_block, job, store=True),
            "load": self.jobs(self.io.batch_load_block, job, store=False),
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


def lmcache_client() -> Any:
    """LMCache's native file client; None if the peer is not installed.

    The module is loaded by itself: the package around it wants an accelerator's libraries.
    """
    for path in (PEERS / "lmcache").glob("lmcache_fs*.so"):
        import torch  # noqa: F401 - the client is linked against it

        spec = importlib.util.spec_from_file_location("lmcache_fs", path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.LMCacheFSClient
    return None


class Lmcache:
    """`fs_native`: batches are split over its own workers."""

    def __init__(self, path: Path, buffer: Buffer, size: int, count: int, num_threads: int) -> None:
        self.path, self.buffer, self.size, self.count = path / "lmcache", buffer, size, count
        self.num_threads = num_threads

    def jobs(self, submit: Callable[..., int], client: Any, job: int) -> float:
        poller = select.poll()
        poller.register(client.event_fd(), select.POLLIN)
        batches = [
            (
                [f"bench@1@0@{i:064x}" for i in items],
                [self.buffer.view[i * self.size : (i + 1) * self.size] for i in items],
            )
            for items in split(range(self.count), job)
        ]
        begun = time.perf_counter()
        for keys, views in batches:
            submit(keys, views)
        done: list[Any] = []
        while len(done) < len(batches):
            if not poller.poll(60_000):
                raise SystemExit("LMCache does not answer")
            done += client.drain_completions()
        taken = time.perf_counter() - begun
        failed = [one for one in done if not one[1]]
        if failed:
            raise SystemExit(f"LMCache failed: {failed[0]}")
        return taken

    def run(self, job: int) -> dict[str, float]:
        client = lmcache_client()(str(self.path), self.num_threads, "", True, 0)
        try:
            return {
                "store": self.jobs(client.submit_batch_set, client, job),
                "load": self.jobs(client.submit_batch_get, client, job),
            }
        finally:
            client.close()
            shutil.rmtree(self.path, ignore_errors=True)


def our_threads(size: int) -> int:
    return 8 if size < 1 << 20 else 4


class Disk:
    """The case."""

    name = "disk"
    about = "stores and verified loads of the disk tier, beside peers and a raw slab"
    rounds = 7

    def rows(self, options: Options) -> Sequence[Row]:
        rows: list[Row] = []
        for size, job in self._cases(options):
            rows += self._rows(options, size, job)
        return rows

    def _rows(self, options: Options, size: int, job: int) -> list[Row]:
        label = self._label(size, job)
        amount = self._bytes(options) / 1e9
        small, big_job = size == SIZES[0], not job
        least = 2.0 if small else 1.3 if big_job else 1.05
        peers = ["stock", "stock-few", *(["lmcache"] if lmcache_client() else [])]
        rows: list[Row] = []
        for verb, theirs in (("fill", "store"), ("store", "store"), ("load", "load")):
            said = {"fill": "store, first fill", "store": "store, steady", "load": "load"}[verb]
            of_raw = Goal(0.85 if verb != "load" else 0.90 if small else 0.95, of_ceiling=True)
            for peer in peers:
                goal = 0.97 if verb == "load" else 1.0 if peer == "lmcache" else least
                rows.append(
                    Row(
                        f"{said}, {label}",
                        (f"ours {label}", verb),
                        (f"{peer} {label}", theirs),
                        (f"raw {label}", verb),
                        amount=amount,
                        goals=[Goal(goal), *([of_raw] if peer == "stock" else [])],
                    )
                )
        return rows

    def _label(self, size: int, job: int) -> str:
        return f"{size >> 10} KiB, {f'jobs of {job}' if job else 'one job'}"

    def _bytes(self, options: Options) -> int:
        return (16 if options.quick else 192) << 20

    def _cases(self, options: Options) -> list[tuple[int, int]]:
        return [CONTROL] if options.quick else [(s, j) for s in SIZES for j in JOBS]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        buffer = Buffer(self._bytes(options))
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as path:
            sides: dict[str, Side] = {}
            for size, job in self._cases(options):
                count, threads = len(buffer.view) // size, our_threads(size)
                label = self._label(size, job)
                contenders: dict[str, tuple[Any, int]] = {
                    "stock": (Stock, STOCK_THREADS),
                    "stock-few": (Stock, threads),
                    "ours": (Ours, threads),
                    "raw": (Raw, threads),
                }
                if lmcache_client():
                    contenders["lmcache"] = (Lmcache, LMCACHE_WORKERS)
                for name, (kind, num_threads) in contenders.items():
                    contender = kind(Path(path), buffer, size, count, num_threads)
                    sides[f"{name} {label}"] = partial(contender.run, job or count)
                if (size, job) == CONTROL:
                    sides[f"ours {label}{AGAIN}"] = sides[f"ours {label}"]
            yield sides
