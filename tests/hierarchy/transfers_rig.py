"""A `Transfers` over a faulty tier, with a manual clock and everything counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from undercroft.hierarchy.outcome import Done, Op, Outcome
from undercroft.hierarchy.transfers import TransferLimits, Transfers
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import FaultyTier, Injector
from undercroft.testing.tier_suite import chunk_of
from undercroft.tiers.base import Tier
from undercroft.tiers.memory import MemoryTier
from undercroft.tiers.wrapping import WrappingTier

N = 512
SOON_S, FOREVER_S = 1.0, 1e9


class Recorder(WrappingTier):
    """Notes the calls in the order in which they reach the inner tier, and which overlap."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, ChunkKey]] = []
        self._lock = threading.Lock()
        self._inside: set[ChunkKey] = set()
        self.num_overlaps = 0

    @contextmanager
    def _noted(self, verb: str, key: ChunkKey) -> Iterator[None]:
        with self._lock:
            self.calls.append((verb, key))
            self.num_overlaps += key in self._inside
            self._inside.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._inside.discard(key)

    def contains(self, key: ChunkKey) -> bool:
        return bool(self.inner.contains(key))

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        with self._noted("read", key):
            return bool(self.inner.read_into(key, out))

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        self.write(key, data, None)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        with self._noted("write", key):
            return self.pass_on(key, data, epoch)

    def delete(self, key: ChunkKey) -> None:
        with self._noted("delete", key):
            self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()


class Rig:
    """What the tests need; `close` lets every hung call go."""

    def __init__(
        self,
        *injectors: Injector,
        num_threads: int = 2,
        retries: int = 0,
        max_queued_write_bytes: int = 1 << 20,
        tier: Tier | None = None,
        **limits: Any,
    ) -> None:
        self.clock = ManualClock()
        self.memory = MemoryTier(1 << 20)
        self.faulty = FaultyTier(tier or self.memory, *injectors, clock=self.clock)
        self.recorder = Recorder(self.faulty)
        self.transfers = Transfers(
            self.recorder,
            clock=self.clock,
            num_threads=num_threads,
            retries=retries,
            max_queued_write_bytes=max_queued_write_bytes,
            limits=TransferLimits(**limits),
        )

    def read(self, key: ChunkKey, seconds: float = FOREVER_S, out: bytearray | None = None) -> int:
        buffer = bytearray(N) if out is None else out
        return self.transfers.read(key, memoryview(buffer), self.clock.now_s() + seconds)

    def write(self, key: ChunkKey, seconds: float = FOREVER_S) -> int | None:
        return self.transfers.write(key, chunk_of(key, N), self.clock.now_s() + seconds)

    def finish(self) -> dict[int, Outcome]:
        """Wait until nothing is queued or runs; the outcomes by ticket."""
        assert self.transfers.drain(self.clock.now_s() + FOREVER_S)
        return {done.ticket: done.outcome for done in self.transfers.poll()}

    def one(self) -> Done:
        """Wait for the one outcome there is."""
        assert self.transfers.drain(self.clock.now_s() + FOREVER_S)
        (done,) = self.transfers.poll()
        return done

    def store(self, *keys: ChunkKey) -> None:
        for key in keys:
            self.memory.write_from(key, chunk_of(key, N))

    def expired(self, seconds: float) -> list[Done]:
        """Move the clock on, then poll."""
        self.clock.advance(seconds)
        return self.transfers.poll()

    def close(self) -> None:
        self.faulty.release()
        assert self.transfers.close(self.clock.now_s() + FOREVER_S)


def our_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("undercroft-")]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what other threads do."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.002)


def kinds(dones: list[Done]) -> list[tuple[Op, str, bool]]:
    return [(d.op, type(d.outcome.error).__name__, d.buffer_free) for d in dones]


MakeRig = Callable[..., Rig]


def made_rigs() -> Iterator[MakeRig]:
    """A fixture: makes rigs; afterwards no thread of ours may be left."""
    rigs: list[Rig] = []

    def make(*injectors: Injector, **more: Any) -> Rig:
        rigs.append(Rig(*injectors, **more))
        return rigs[-1]

    until(lambda: our_threads() == [])  # those of an earlier test may be leaving
    yield make
    for each in rigs:
        each.close()
    until(lambda: our_threads() == [])
