"""What the disk's traffic does to the scheduler thread: the same steps, the disk busy and idle.

A step is what an engine core does between two outputs of the model: looks up a few hundred chunks
that are there, plans a load and a store, books what the disk tier has done, does a millisecond of
its own work in the interpreter, then waits 4 ms for the model with the interpreter's lock free.
`busy`: requests come whose chunks are on disk only, and everything stored is copied there, so that
reads and writes are under way all the time. `idle`: the same steps, and a disk tier nobody asks.
What is compared is a step's wall time without the wait for the model, at its median and its 99th
percentile.

`asleep`: the steps of `busy`, over a tier that keeps its movers waiting as long as the disk did and
moves nothing: what the scheduler's own work for what is read and stored costs.
`elsewhere`: the idle tier's steps, while *another process* reads and writes as many bytes a second,
with as many threads. What that does to a step, the machine does: processors, memory and the disk
are shared whoever moves the bytes. What `busy` costs beyond the two is the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from cases.stack import hierarchy_over
from harness import AGAIN, Goal, Options, Row, Side
from undercroft.clock import SystemClock
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.wrapping import WrappingTier

CHUNK_BYTES = 1 << 20
NUM_SLOTS = 192
NUM_ON_DISK = 512
NUM_HITS = 256
OWN_WORK_S = 0.001
MODEL_S = 0.004
TRAFFIC = Path(__file__).parents[1] / "traffic.py"


def key_of(label: str, number: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(f"{label}{number}".encode()).digest() + bytes(4))


class Traffic(WrappingTier):
    """The disk tier, its verbs timed; or, `asleep`, only as slow as it was."""

    def __init__(self, inner: DiskTier) -> None:
        super().__init__(inner)
        self.asleep = False
        self._lock = threading.Lock()
        self._spent = [0.0, 0]

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        return self._timed(lambda: self.inner.read_into(key, out))

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        self.write(key, data, None)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        return self._timed(lambda: self.pass_on(key, data, epoch))

    def contains(self, key: ChunkKey) -> bool:
        return bool(self.inner.contains(key))

    def delete(self, key: ChunkKey) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()

    def _timed(self, verb: Callable[[], bool]) -> bool:
        seconds, number = self._spent
        if self.asleep:
            time.sleep(seconds / max(number, 1))
            return True
        begun = time.perf_counter()
        done = verb()
        with self._lock:
            self._spent[0] += time.perf_counter() - begun
            self._spent[1] += 1
        return done


class Engine:
    """The scheduler's half of an engine over a real hierarchy, real memory and a real disk tier."""

    def __init__(self, path: Path) -> None:
        self.buffer = mmap.mmap(-1, NUM_SLOTS * CHUNK_BYTES)
        disk = DiskTier(
            str(path),
            name="disk",
            namespace=Namespace({"bench": "step"}),
            capacity_bytes=2 * NUM_ON_DISK * CHUNK_BYTES,
            clock=SystemClock(),
            free_space_floor_bytes=0,
        )
        self.tier = Traffic(disk)
        self.hierarchy = hierarchy_over(
            self.tier,
            memoryview(self.buffer),
            CHUNK_BYTES,
            max_queued_write_bytes=NUM_SLOTS * CHUNK_BYTES // 4,
            limits=Limits(promote_deadline_s=10.0),
        )
        self.counters = self.hierarchy.counters
        data = memoryview(self.buffer)
        for number in range(NUM_ON_DISK):
            self.tier.write_from(key_of("disk", number), data[:CHUNK_BYTES])
        self.hot = [key_of("hot", number) for number in range(32)]
        self.number = 0
        self.busy_rate = 0.0
        """Bytes a second that were read and written when it was last busy."""
        self.reader: tuple[Request, list[ChunkKey]] | None = None
        self.stored: list[tuple[Request, list[ChunkKey]]] = []
        self._store("hot", self.hot)

    def _store(self, name: str, keys: list[ChunkKey]) -> None:
        request = Request(f"{name}-{self.number}")
        plan = self.hierarchy.prepare_store(keys, request)
        if plan.keys:
            self.stored.append((request, plan.keys))
        else:
            self.hierarchy.finish_request(request)

    def step(self, *, busy: bool) -> float:
        """One step; seconds of it without the wait for the model."""
        begun = time.perf_counter()
        hierarchy = self.hierarchy
        self.number += 1
        for request, keys in self.stored:  # what the workers copied meanwhile
            hierarchy.complete_store(set(keys), request)
            hierarchy.finish_request(request)
        self.stored.clear()
        asking = Request(f"hits-{self.number}")
        for number in range(NUM_HITS):
            hierarchy.lookup(self.hot[number % len(self.hot)], asking)
        slots = hierarchy.prepare_load(
            [key for key in self.hot if hierarchy.pool.find(key) >= 0], asking
        )
        if busy:
            self._read_on()
        end = time.perf_counter() + OWN_WORK_S
        while time.perf_counter() < end:
            pass
        hierarchy.end_step()
        hierarchy.complete_load(self.hot[: len(slots)], asking)
        hierarchy.finish_request(asking)
        if busy:
            self._store("new", [key_of(f"new{self.number}-", n) for n in range(4)])
        hierarchy.step_ended()
        taken = time.perf_counter() - begun
        time.sleep(MODEL_S)
        return taken

    def _read_on(self) -> None:
        """A request at a time waits for 16 chunks from disk, then is let go of."""
        if self.reader is None:
            first = (16 * self.number) % NUM_ON_DISK
            keys = [key_of("disk", (first + n) % NUM_ON_DISK) for n in range(16)]
            self.reader = Request(f"reader-{self.number}"), keys
        request, keys = self.reader
        answers = {self.hierarchy.lookup(key, request) for key in keys}
        if "pending" not in {answer.value for answer in answers}:
            self.hierarchy.finish_request(request)
            self.reader = None

    def measure(self, num_steps: int, *, busy: bool, asleep: bool = False) -> dict[str, float]:
        self.tier.asleep = asleep
        for _ in range(20):
            self.step(busy=busy)
        before = self.counters.promoted_bytes["disk"] + self.counters.cascaded_bytes["disk"]
        begun = time.perf_counter()
        taken = sorted(self.step(busy=busy) for _ in range(num_steps))
        seconds = time.perf_counter() - begun
        moved = self.counters.promoted_bytes["disk"] + self.counters.cascaded_bytes["disk"] - before
        if busy and not asleep:
            self.busy_rate = moved / seconds
        if self.reader is not None:
            self.hierarchy.finish_request(self.reader[0])
            self.reader = None
        return {
            "p50": statistics.median(taken),
            "p99": taken[int(0.99 * len(taken))],
            "seconds a GB": seconds / max(moved / 1e9, 1e-9),
        }

    def close(self) -> None:
        self.hierarchy.close()


class Elsewhere:
    """A process that reads, writes and checks chunks at the rate `engine` had when it was busy."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._path = folder / "traffic"
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 64 * CHUNK_BYTES)

    def measure(self, num_steps: int) -> dict[str, float]:
        rate = max(self._engine.busy_rate, 1e6)
        with traffic(self._path, rate, CHUNK_BYTES) as moved:
            costs = self._engine.measure(num_steps, busy=False)
        return costs | moved


@contextlib.contextmanager
def traffic(path: Path, rate: float, chunk_bytes: int) -> Iterator[dict[str, float]]:
    """Another process reads and writes at that rate meanwhile; what it came to, afterwards."""
    command = [sys.executable, str(TRAFFIC), str(path), str(rate), str(chunk_bytes)]
    moved: dict[str, float] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield moved
        process.stdin.close()
        num_bytes, seconds = map(float, process.stdout.readline().split())
    moved["seconds a GB"] = seconds / (num_bytes / 1e9)


def step_rows(
    what: str, bases: Mapping[str, str], *, bound: str, moving: Sequence[str]
) -> list[Row]:
    """A busy step's median and 99th percentile beside those of `bases`, and what was moved.

    The bound, 1.10 times the 99th percentile, is for the base that is called so.
    """
    rows = [
        Row(
            f"{what}, {which}, beside {doing}",
            ("busy", which),
            (base, which),
            unit="ms",
            scale=1e3,
            goals=[Goal(round(1 / 1.10, 2))] if (base, which) == (bound, "p99") else [],
        )
        for base, doing in bases.items()
        for which in ("p50", "p99")
    ]
    return rows + [
        Row(f"read and written meanwhile, {side}", (side, "seconds a GB"), amount=1.0)
        for side in moving
    ]


class Step:
    """The case."""

    name = "step"
    about = "a scheduler's step while the disk is read and written all the time"
    rounds = 9

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        bases = {
            "asleep": "the same work, nothing moved",
            "elsewhere": "the same traffic of another process",
            "idle": "nothing to do",
        }
        moving = ("busy", "elsewhere")
        return step_rows("step without the model", bases, bound="asleep", moving=moving)

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as path:
            engine = Engine(Path(path) / "kv")
            elsewhere = Elsewhere(engine, Path(path))
            num_steps = 100 if options.quick else 800
            try:
                yield {
                    "busy": partial(engine.measure, num_steps, busy=True),
                    "idle": partial(engine.measure, num_steps, busy=False),
                    "asleep": partial(engine.measure, num_steps, busy=True, asleep=True),
                    "elsewhere": partial(elsewhere.measure, num_steps),
                    "busy" + AGAIN: partial(engine.measure, num_steps, busy=True),
                }
            finally:
                engine.close()
