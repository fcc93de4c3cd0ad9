"""Any history of verbs, restarts and damage, against a dictionary."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from undercroft.errors import CorruptChunk, TierFull

from .support import ManualClock, disk, du, files, key, put, right

CAPACITY = 200 << 10
NUMBERS = st.integers(0, 30)
SIZES = (4096, 9000)


def size_of(number: int) -> int:
    return SIZES[number % 5 == 0]


class DiskMachine(RuleBasedStateMachine):
    """`model` holds the numbers that must be found; `doubtful` those that damage may have hit."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix=f"undercroft-test-{os.getpid()}-"))
        self.clock = ManualClock()
        self.tier = self.opened()
        self.model: set[int] = set()
        self.doubtful: set[int] = set()

    def opened(self) -> object:
        return disk(self.path, capacity_bytes=CAPACITY, clock=self.clock, flush_interval_s=0.5)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.path)

    @rule(number=NUMBERS)
    def store(self, number: int) -> None:
        free = self.tier.free_chunks(size_of(number))
        present = self.tier.has(key(number))
        try:
            put(self.tier, number, size_of(number))
        except TierFull:
            assert free == 0
            assert not present
        else:
            self.model.add(number)
            if not present:
                self.doubtful.discard(number)
        # Room for one size may have cost a segment of another.
        gone = {n for n in self.model if not self.tier.has(key(n))}
        assert free == 0 or not gone - self.doubtful
        self.model -= gone

    @rule(number=NUMBERS)
    def load(self, number: int) -> None:
        try:
            there = right(self.tier, number, size_of(number))
        except CorruptChunk:
            assert number in self.doubtful
            there = False
        if number not in self.doubtful:
            assert there == (number in self.model)
        if not there:
            self.model.discard(number)
        self.doubtful.discard(number)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        self.tier.delete(key(number))
        assert not self.tier.has(key(number))
        self.model.discard(number)
        self.doubtful.discard(number)

    @rule(seconds=st.sampled_from([0.01, 0.15, 2.0]))
    def wait(self, seconds: float) -> None:
        self.clock.t += seconds

    @rule()
    def reset(self) -> None:
        before = self.tier.epoch()
        assert self.tier.raise_epoch() == before + 1
        self.model.clear()
        self.doubtful.clear()

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = self.opened()

    @rule(where=st.integers(0, CAPACITY), which=st.integers(0, 50))
    def damage(self, where: int, which: int) -> None:
        slabs = files(self.path, ".slab")
        if not slabs:
            return
        slab = slabs[which % len(slabs)]
        with slab.open("r+b") as file:
            file.seek(where % slab.stat().st_size)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        self.doubtful |= self.model

    @invariant()
    def accounted(self) -> None:
        assert du(self.path) <= CAPACITY
        held = {k for k, _ in self.tier.evictable()}
        assert held == {key(n) for n in range(31) if self.tier.has(key(n))}
        assert {key(n) for n in self.model - self.doubtful} <= held


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
