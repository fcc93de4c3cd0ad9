"""A small engine that works as vLLM does, over a device that reorders whatever it may.

Every job's meaning is fixed when it is submitted: as if jobs and the engine's own work were done
one after the other. What the engine must not do, it does not: it writes no block that a store not
waited for reads, and neither reads nor writes a block that a load has not filled yet.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from undercroft.engines.accelerator.descriptors import Copies
from undercroft.engines.accelerator.device_mover import DeviceMover, DeviceWork
from undercroft.engines.jobs import Job
from undercroft.testing.fake_device import FakeDevice, StepClock

PAGE = 24
NUM_BLOCKS, NUM_SLOTS = 14, 10


@dataclass
class Flight:
    """A job under way, and what it is to leave behind."""

    job: Job[DeviceWork]
    pairs: list[tuple[int, int]]
    wanted: dict[int, bytes] = field(default_factory=dict)
    """By block for a load, by slot for a store."""


class Storm:
    """One history, decided by `seed`."""

    def __init__(self, seed: int, make: Callable[..., DeviceMover] = DeviceMover) -> None:
        self.random = random.Random(seed)
        self.device = FakeDevice(seed, max_steps=self.random.choice([1, 3, 10]))
        self.memory = np.zeros((NUM_BLOCKS, PAGE), np.uint8)
        self.slots = np.zeros((NUM_SLOTS, PAGE), np.uint8)
        tick_s = self.random.choice([0.0, 0.003])  # so that calls run out of time in some histories
        self.mover = make(
            self.device,
            StepClock(self.device, tick_s=tick_s),
            region_address=self.slots.ctypes.data,
        )
        self.block_truth = [bytes(PAGE)] * NUM_BLOCKS
        self.slot_truth = [bytes(PAGE)] * NUM_SLOTS
        self.flights: dict[int, Flight] = {}
        self.last_writer: dict[tuple[str, int], int] = {}
        self.faults: list[str] = []
        self.num_jobs = 0
        self.max_spare = 0

    def run(self, num_actions: int = 120) -> None:
        """Act, then wait for everything; every byte is compared."""
        actions = (
            (self.compute, 4),
            (self.read, 2),
            (self.store, 4),
            (self.load, 4),
            (self.host_write, 1),
            (self.collect, 3),
            (self.wait_for_some, 1),
        )
        picks = [action for action, weight in actions for _ in range(weight)]
        for _ in range(num_actions):
            self.random.choice(picks)()
            assert not self.faults, self.faults
        self.mover.wait(set(self.flights))
        self.collect()
        assert not self.flights, "a job was waited for and not reported"
        self.device.run()
        assert not self.faults, self.faults
        assert [bytes(row) for row in self.memory] == self.block_truth
        assert [bytes(row) for row in self.slots] == self.slot_truth
        assert self.mover.close(1.0)

    # --- the engine's own work, in its stream ---------------------------------------------------

    def _bytes(self) -> bytes:
        return self.random.randbytes(PAGE)

    def _used(self, *, by_stores: bool, by_loads: bool) -> set[int]:
        return {
            block
            for flight in self.flights.values()
            if (by_stores if flight.job.is_store else by_loads)
            for block, _ in flight.pairs
        }

    def _some(self, pool: set[int], most: int = 3) -> list[int]:
        return self.random.sample(sorted(pool), min(len(pool), self.random.randint(1, most)))

    def compute(self) -> None:
        """Write blocks that nobody reads."""
        free = set(range(NUM_BLOCKS)) - self._used(by_stores=True, by_loads=True)
        for block in self._some(free):
            self._write_later(block, self._bytes())

    def _write_later(self, block: int, data: bytes) -> None:
        self.block_truth[block] = data
        self.device.engine_stream.compute(
            lambda: self.memory[block].__setitem__(slice(None), list(data))
        )

    def read(self) -> None:
        """Attention over blocks that are filled."""
        filled = set(range(NUM_BLOCKS)) - self._used(by_stores=False, by_loads=True)
        for block in self._some(filled):
            wanted = self.block_truth[block]
            self.device.engine_stream.compute(
                lambda block=block, wanted=wanted: self._check_block(block, wanted)
            )

    def _check_block(self, block: int, wanted: bytes) -> None:
        if bytes(self.memory[block]) != wanted:
            self.faults.append(f"the engine read wrong bytes in block {block}")

    # --- jobs -----------------------------------------------------------------------------------

    def _submit(self, pairs: list[tuple[int, int]], *, is_store: bool) -> Flight:
        self.num_jobs += 1
        job: Job[DeviceWork] = Job(
            job_id=self.num_jobs,
            is_store=is_store,
            blocks=frozenset(block for block, _ in pairs),
            slots=frozenset(slot for _, slot in pairs),
            steps=lambda: self._steps(pairs, is_store=is_store),
            on_failure=lambda error: self.faults.append(str(error)),
        )
        flight = Flight(job, pairs)
        self.flights[job.job_id] = flight
        return flight

    def _steps(self, pairs: list[tuple[int, int]], *, is_store: bool) -> Iterator[DeviceWork]:
        step = self.random.randint(1, len(pairs))
        for first in range(0, len(pairs), step):
            blocks, slots = zip(*pairs[first : first + step], strict=True)
            yield Copies(
                self.memory.ctypes.data + np.array(blocks, np.int64) * PAGE,
                np.array(slots, np.int64) * PAGE,
                np.full(len(blocks), PAGE, np.int64),
            )
        if is_store and pairs[0][1] % 4 == 0:  # the first pages of such a chunk were not there
            slot = pairs[0][1]
            yield lambda: self.slots[slot].__setitem__(slice(0, 5), 0)

    def store(self) -> None:
        """Filled blocks into any slots, also such that a load still reads."""
        filled = set(range(NUM_BLOCKS)) - self._used(by_stores=False, by_loads=True)
        if self.random.random() < 0.3:  # the contract allows it: a block that a load still fills
            filled = set(range(NUM_BLOCKS))
        if not (blocks := self._some(filled)):
            return
        slots = self.random.sample(range(NUM_SLOTS), len(blocks))
        pairs = list(zip(blocks, slots, strict=True))
        flight = self._submit(pairs, is_store=True)
        for index, (block, slot) in enumerate(pairs):
            data = self.block_truth[block]
            if index == 0 and slot % 4 == 0:
                data = bytes(5) + data[5:]
            self.slot_truth[slot] = flight.wanted[slot] = data
            self.last_writer["slot", slot] = flight.job.job_id
        self.mover.submit(flight.job)

    def load(self) -> None:
        """Into fresh blocks, which are zeroed first, or which a store still reads."""
        blocks = self._some(set(range(NUM_BLOCKS)))
        slots = [self.random.randrange(NUM_SLOTS) for _ in blocks]
        busy = self._used(by_stores=True, by_loads=True)
        for block in blocks:
            if block not in busy and self.random.random() < 0.7:
                self._write_later(block, bytes(PAGE))
        flight = self._submit(list(zip(blocks, slots, strict=True)), is_store=False)
        for block, slot in flight.pairs:
            self.block_truth[block] = flight.wanted[block] = self.slot_truth[slot]
            self.last_writer["block", block] = flight.job.job_id
        self.mover.submit(flight.job)

    def host_write(self) -> None:
        """A promotion into a slot that no job uses."""
        used = {slot for flight in self.flights.values() for _, slot in flight.pairs}
        free = set(range(NUM_SLOTS)) - used
        for slot in self._some(free):
            data = self._bytes()
            self.slots[slot] = list(data)
            self.slot_truth[slot] = data

    def collect(self) -> None:
        """Take what has ended, and look at what it left at once."""
        for job in self.mover.take_finished():
            flight = self.flights.pop(job.job_id)  # twice is a KeyError
            assert job.error is None, job.error
            assert job.num_bytes == PAGE * len(flight.pairs)
            kind, memory = ("slot", self.slots) if job.is_store else ("block", self.memory)
            for index, wanted in flight.wanted.items():
                if self.last_writer[kind, index] == job.job_id:
                    assert bytes(memory[index]) == wanted, f"{kind} {index} of job {job.job_id}"
                    if kind == "block":
                        self.last_writer["block", index] = 0

    def wait_for_some(self) -> None:
        """A flush: afterwards the blocks of those stores are overwritten at once."""
        ids = set(self._some(set(self.flights))) if self.flights else set()
        self.mover.wait(ids | {10**6})
        waited = [self.flights[job_id] for job_id in ids]
        self.collect()
        assert not ids & set(self.flights), "waited for, and not reported"
        free = set(range(NUM_BLOCKS)) - self._used(by_stores=True, by_loads=True)
        for flight in waited:
            for block, _ in flight.pairs:
                if block in free and flight.job.is_store:
                    self._write_later(block, self._bytes())


def storms(num: int, make: Callable[..., Any] = DeviceMover) -> Iterator[tuple[int, str]]:
    """Run up to that many histories; the seeds that went wrong, and how."""
    for seed in range(num):
        try:
            Storm(seed, make).run()
        except (AssertionError, KeyError) as error:
            yield seed, repr(error)
