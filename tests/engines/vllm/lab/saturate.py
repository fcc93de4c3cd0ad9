"""Saturates the disk tier of this process's engine, and times the engine's steps meanwhile.

Requests that exist in our hierarchy only ask for chunks that are on disk, and store new ones, so
that reads and writes are under way all the time; what the engine itself decodes is not touched.
"""

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.engines.vllm.lab.driver import Driver
from tests.engines.vllm.lab.storm import core_of, manager_of
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.tiers.base import Ends

_CHUNKS_A_READER = 8


def _key(label: str, number: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(f"{label}{number}".encode()).digest() + bytes(4))


class _Sleepy:
    """Times a tier's verbs; or, `asleep`, takes as long as they did and moves nothing."""

    def __init__(self, tier: Any) -> None:
        self.asleep = False
        self._lock = threading.Lock()
        for name in ("read_into", "write_in_epoch"):
            setattr(tier, name, self._timed(getattr(tier, name)))
        for name in ("read_many", "write_many"):
            setattr(tier, name, self._timed_many(getattr(tier, name)))

    def _timed(self, verb: Callable[..., bool]) -> Callable[..., bool]:
        spent = [0.0, 0]

        def call(*arguments: Any) -> bool:
            if self.asleep:
                time.sleep(spent[0] / max(spent[1], 1))
                return True
            begun = time.perf_counter()
            done = verb(*arguments)
            self._note(spent, begun, 1)
            return done

        return call

    def _timed_many(self, verb: Callable[..., Iterator[Ends]]) -> Callable[..., Iterator[Ends]]:
        spent = [0.0, 0]

        def call(chunks: Sequence[Any]) -> Iterator[Ends]:
            if self.asleep:
                time.sleep(len(chunks) * spent[0] / max(spent[1], 1))
                yield [(number, True) for number in range(len(chunks))]
                return
            begun = time.perf_counter()
            yield from verb(chunks)
            self._note(spent, begun, len(chunks))

        return call

    def _note(self, spent: list[Any], begun: float, num_chunks: int) -> None:
        with self._lock:
            spent[0] += time.perf_counter() - begun
            spent[1] += num_chunks


class Saturation:
    """Keeps so many bytes of reads, and of writes, under way or waiting for a mover."""

    def __init__(self, driver: Driver, num_on_disk: int, ahead_bytes: int) -> None:
        self.hierarchy = manager_of(driver).hierarchy
        self.level = self.hierarchy.levels[0]
        self.chunk_bytes = self.hierarchy.pool.slots.slot_bytes[0]
        self._ahead_bytes = ahead_bytes
        self._on_disk = [_key("disk", n) for n in range(num_on_disk)]
        data = memoryview(bytearray(self.chunk_bytes))
        for key in self._on_disk:
            self.level.tier.write_from(key, data)
        self.sleepy = _Sleepy(self.level.tier)
        self._readers: dict[str, tuple[Request, list[ChunkKey]]] = {}
        self._stored: list[tuple[Request, list[ChunkKey]]] = []
        self._number = 0

    @property
    def moved_bytes(self) -> int:
        counters, name = self.hierarchy.counters, self.level.name
        return counters.promoted_bytes[name] + counters.cascaded_bytes[name]

    def step(self) -> None:
        """Before a step of the engine: whoever has all it waited for goes, others come."""
        self._number += 1
        for request, stored in self._stored:
            self.hierarchy.complete_store(set(stored), request)
            self.hierarchy.finish_request(request)
        self._stored.clear()
        for request, keys in list(self._readers.values()):
            self._look_up(request, keys)
        most = self._ahead_bytes // (self.chunk_bytes * _CHUNKS_A_READER)
        for n in range(max(1, most) - len(self._readers)):
            first = _CHUNKS_A_READER * (self._number * 64 + n) % len(self._on_disk)
            request = Request(f"saturation-r{self._number}-{n}")
            keys = self._on_disk[first : first + _CHUNKS_A_READER]
            self._readers[request.id] = request, keys
            self._look_up(request, keys)
        self._store()

    def _look_up(self, request: Request, keys: list[ChunkKey]) -> None:
        answers = [self.hierarchy.lookup(key, request) for key in keys]
        if Lookup.PENDING not in answers:
            self.hierarchy.finish_request(request)
            del self._readers[request.id]

    def _store(self) -> None:
        waiting = self.hierarchy.cascade.num_waiting(self.level.name)
        waiting += self.level.transfers.num_queued_writes
        missing = self._ahead_bytes // self.chunk_bytes - waiting
        if missing <= 0:
            return
        request = Request(f"saturation-w{self._number}")
        keys = [_key(f"new{self._number}-", n) for n in range(missing)]
        plan = self.hierarchy.prepare_store(keys, request)
        if plan.keys:
            self._stored.append((request, plan.keys))
        else:
            self.hierarchy.finish_request(request)

    def end(self) -> None:
        for request, stored in self._stored:
            self.hierarchy.complete_store(set(stored), request)
            self.hierarchy.finish_request(request)
        self._stored.clear()
        for request, _ in self._readers.values():
            self.hierarchy.finish_request(request)
        self._readers.clear()


def by_threads(saturation: Saturation, *, yes: bool) -> None:
    """Whether the tier's chunks are moved by threads here, one at a time, or by its process."""
    tier, crew = saturation.level.tier, saturation.level.transfers._crew
    crew._batch_bytes = 0 if yes else tier.batch_bytes
    tier._chunks._mover = None if yes else tier._mover


def _cpu_s(saturation: Saturation) -> float:
    """Processor time of the mover threads: most of it they hold the interpreter's lock."""
    threads = list(saturation.level.transfers._crew.threads)
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threads if t.ident)


def steps(
    driver: Driver,
    *,
    num_steps: int,
    num_requests: int,
    saturated: bool,
    asleep: bool = False,
    threads: bool = False,
    num_on_disk: int = 256,
    ahead_bytes: int = 32 << 20,
) -> dict[str, float]:
    """Decode `num_requests` prompts for `num_steps` steps; what a step of the engine core took.

    `threads`: the disk tier does without its mover process.

    Returns:
        `p50` and `p99` in seconds, `moved_bytes` in `seconds`, and the processor time that mover
        threads took of them, `mover_seconds`, all of the steady part.
    """
    core = core_of(driver)
    if "saturation" not in vars(driver):
        vars(driver)["saturation"] = Saturation(driver, num_on_disk, ahead_bytes)
    saturation: Saturation = vars(driver)["saturation"]
    saturation.sleepy.asleep = asleep
    by_threads(saturation, yes=threads)
    warm = num_steps // 10 + 5
    taken: list[float] = []
    moved = begun_s = cpu_s = 0.0
    results: list[dict[str, Any]] = [{} for _ in range(num_requests)]
    running: dict[str, dict[str, Any]] = {}
    for index in range(num_requests):
        prompt = [(7 * index + n) % 256 for n in range(16)]
        request = {"prompt": prompt, "max_tokens": warm + num_steps + 5}
        driver._add(index, request, running, results, 0)
    plain = core.step_fn

    def timed() -> Any:
        nonlocal moved, begun_s, cpu_s
        if len(taken) == warm:
            moved, begun_s = saturation.moved_bytes, time.perf_counter()
            cpu_s = _cpu_s(saturation)
        begun = time.perf_counter()
        if saturated:
            saturation.step()
        done = plain()
        taken.append(time.perf_counter() - begun)
        return done

    core.step_fn = timed
    try:
        while len(taken) < warm + num_steps:
            driver.llm.llm_engine.step()
    finally:
        core.step_fn = plain
    mover_seconds = _cpu_s(saturation) - cpu_s
    seconds, moved = time.perf_counter() - begun_s, saturation.moved_bytes - moved
    driver.llm.llm_engine.abort_request(list(running))
    saturation.end()
    driver.settle(timeout_s=60)
    steady = sorted(taken[warm:])
    return {
        "p50": statistics.median(steady),
        "p99": steady[int(0.99 * len(steady))],
        "moved_bytes": moved,
        "seconds": seconds,
        "mover_seconds": mover_seconds,
    }
