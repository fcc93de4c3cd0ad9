"""What is written in a day: booked before it is written, shared, and remembered."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.disk.support import ManualClock, disk, key, put

from undercroft.errors import ConfigError
from undercroft.tiers.base import Budgeted
from undercroft.tiers.checked import Checked
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.ledger import HOURS, Ledger, pack_hours, parse_hours
from undercroft.tiers.memory import MemoryTier

MIB = 1 << 20
HOUR_S = 3600.0
CAPACITY = 64 * MIB


class Counted(Files):
    """Counts by itself what is written to slabs and indexes, in whole pages."""

    def __init__(self) -> None:
        self.seen = 0

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        self.seen += -(-len(data) // 4096) * 4096
        super().pwrite(fd, data, offset)

    def pwritev(self, fd, buffers, offset: int) -> None:
        self.seen += -(-sum(map(len, buffers)) // 4096) * 4096
        super().pwritev(fd, buffers, offset)


def store(tier: DiskTier, number: int, num_bytes: int = 65536) -> bool:
    """As the hierarchy does: ask, then write. One at a time, so nothing else is under way."""
    cost = tier.write_cost_bytes(num_bytes)
    tier.refresh()
    allowance = tier.allowance()
    assert allowance is not None
    if allowance.left_bytes < cost:
        assert allowance.is_spent, "there is more, but not even a chunk's worth was leased"
        return False
    if not tier.free_chunks(num_bytes):
        tier.delete(next(iter(tier.evictable()))[0])
    put(tier, number, num_bytes)
    return True


def fill(tier: DiskTier, first: int, most: int = 10_000) -> int:
    """Store until the budget says no; how many that were."""
    for n in range(most):
        if not store(tier, first + n):
            return n
    raise AssertionError("the budget never ends")


def test_a_day_is_never_exceeded_and_an_hour_comes_back(memory_path: Path) -> None:
    """What is written in any 24 hours is at most the budget, headers and index included."""
    clock, files, budget = ManualClock(), Counted(), 8 * MIB
    clock.t = 5000 * HOUR_S
    tier = disk(
        memory_path, clock=clock, files=files, capacity_bytes=CAPACITY, write_budget_bytes=budget
    )
    written: list[tuple[float, int]] = []
    stored = 0
    for _ in range(60):  # hours
        before = files.seen
        stored += (
            fill(tier, stored, 200)
            if stored > 100
            else sum(store(tier, stored + n) for n in range(3))
        )
        written.append((clock.t, files.seen - before))
        clock.t += HOUR_S
    for at, _ in written:
        in_a_day = sum(num for t, num in written if at <= t < at + 24 * HOUR_S)
        # Opening the tier made its directory; that was before there was a budget to ask.
        assert in_a_day <= budget
    assert sum(num for _, num in written) > 1.8 * budget, "the second day has its own budget"
    assert files.seen == tier.written_bytes()
    tier.close()


def test_the_budget_is_used_up(memory_path: Path) -> None:
    """Nearly all of it goes to chunks: leases and their booking cost little."""
    budget = 32 * MIB
    tier = disk(memory_path, capacity_bytes=CAPACITY, write_budget_bytes=budget)
    assert isinstance(tier, Budgeted)
    num = fill(tier, 0)
    assert budget * 0.95 <= tier.written_bytes() <= budget
    assert num * 65536 >= budget * 0.8
    tier.close()


def test_a_restart_remembers(memory_path: Path) -> None:
    """Closed and opened again, the tier may write what was left, and no more."""
    budget = 32 * MIB
    more = {"capacity_bytes": CAPACITY, "write_budget_bytes": budget}
    tier = disk(memory_path, **more)
    assert all(store(tier, n) for n in range(100))
    tier.close()
    first = tier.written_bytes()
    tier = disk(memory_path, **more)
    fill(tier, 1000)
    assert budget * 0.9 <= first + tier.written_bytes() <= budget
    tier.close()
    tier = disk(memory_path, **more)
    assert fill(tier, 5000) <= 2  # what was left of the lease
    tier.close()


def test_several_processes_share_one_budget(memory_path: Path) -> None:
    """Two tiers on a directory write the budget together, whoever is faster."""
    budget = 64 * MIB
    more = {"capacity_bytes": CAPACITY, "write_budget_bytes": budget, "num_replicas": 2}
    one, two = disk(memory_path, **more), disk(memory_path, **more)
    counts, draw = [0, 0], random.Random(7)
    is_open = [True, True]
    while any(is_open):
        who = draw.choice([0, 0, 0, 1])
        is_open[who] = store((one, two)[who], 10_000 * who + counts[who])
        counts[who] += is_open[who]
    total = one.written_bytes() + two.written_bytes()
    assert budget * 0.7 <= total <= budget + 64 * 1024, "a lease of one may be left over"
    left_over = one.allowance().left_bytes  # type: ignore[union-attr]
    one.close()
    before = two.written_bytes()
    fill(two, 50_000)
    assert two.written_bytes() - before <= left_over + 128 * 1024
    two.close()


KILLED = """
import sys
from pathlib import Path
from typing import Any
from tests.tiers.disk.test_disk_ledger import CAPACITY, MIB, store
from tests.tiers.disk.support import disk
tier = disk(Path(sys.argv[1]), capacity_bytes=CAPACITY, write_budget_bytes=64 * MIB)
n = 0
while True:
    if not store(tier, int(sys.argv[2]) + n):
        print("spent", flush=True)
        sys.stdin.read()
    n += 1
    if n == 150:
        print(tier.written_bytes(), flush=True)
"""


def test_killing_never_makes_it_forget(memory_path: Path) -> None:
    """Killed with the ninth signal, what was written counts; what was leased at most besides."""
    budget, counted = 64 * MIB, 0
    for turn in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(memory_path), str(1000 * turn)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
        )
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        counted += 0 if line == "spent" else int(line)
    tier = disk(memory_path, capacity_bytes=CAPACITY, write_budget_bytes=budget)
    fill(tier, 100_000)
    assert counted + tier.written_bytes() <= budget
    tier.close()


def test_a_damaged_file_counts_as_spent(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody guesses what a day's writes were; a file that is gone comes back as remembered."""
    more = {"capacity_bytes": CAPACITY, "write_budget_bytes": 32 * MIB}
    disk(memory_path, **more).close()
    ledger = memory_path / "undercroft-v1" / "writes"
    data = bytearray(ledger.read_bytes())
    assert len(data) == 512
    data[20] ^= 1
    ledger.write_bytes(data)
    tier = disk(memory_path, **more)
    assert not store(tier, 1)
    assert [r for r in caplog.records if "is damaged" in r.getMessage()]
    tier.close()
    ledger.unlink()
    tier = disk(memory_path, **more)
    assert all(store(tier, n) for n in range(200))
    ledger.unlink()
    fill(tier, 1000)
    assert tier.written_bytes() <= 32 * MIB
    assert parse_hours(ledger.read_bytes())
    tier.close()


def test_a_chunk_larger_than_a_lease_gets_one(memory_path: Path) -> None:
    """Leases grow with what is to be written."""
    tier = disk(memory_path, capacity_bytes=160 * MIB, write_budget_bytes=256 * MIB)
    assert store(tier, 1, 20 * MIB)
    tier.close()


def test_a_clock_that_is_set_back_frees_nothing(memory_path: Path) -> None:
    """Hours that have not come yet count as now."""
    clock, files = ManualClock(), Files()
    clock.t = 900 * HOUR_S
    memory_path.joinpath("r").mkdir()
    ledger = Ledger(
        files, str(memory_path / "r"), budget_bytes=10 * MIB, unix_s=clock.now_s, now_s=clock.now_s
    )
    ledger.sync(may_create=True)
    assert ledger.allowance().left_bytes == 10 * MIB - 4096
    files.written_bytes += 8 * MIB
    clock.t -= 500 * HOUR_S
    ledger.sync(may_create=True)
    assert ledger.allowance().left_bytes <= 2 * MIB
    clock.t += 23 * HOUR_S
    ledger.sync(may_create=True)
    assert ledger.allowance().left_bytes <= 2 * MIB
    clock.t += 3 * HOUR_S
    ledger.sync(may_create=True)
    assert ledger.allowance().left_bytes > 7 * MIB
    ledger.close()
    ledger.close()


def test_the_file_keeps_a_day() -> None:
    """It round-trips, keeps the latest hours, and refuses what is not its own."""
    hours = {n: n * 7 for n in range(1, 40)}
    data = pack_hours(hours)
    assert parse_hours(data) == {n: n * 7 for n in range(40 - HOURS, 40)}
    assert parse_hours(b"") == {}
    for at in range(0, 512, 11):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert parse_hours(bytes(damaged)) is None
    assert parse_hours(data[:-1]) is None


def test_without_a_budget_there_is_no_file(memory_path: Path) -> None:
    """What is not asked for is not kept; a budget below a chunk's worth is refused."""
    tier = disk(memory_path)
    put(tier, 1)
    tier.refresh()
    assert tier.allowance() is None
    assert tier.written_bytes() >= tier.write_cost_bytes(4096) - 4096
    tier.close()
    assert not (memory_path / "undercroft-v1" / "writes").exists()
    with pytest.raises(ConfigError, match="write_budget_bytes"):
        disk(memory_path, write_budget_bytes=1)
    assert key(1)


def test_a_wrapped_tier_keeps_its_budget(memory_path: Path) -> None:
    """What a wrapper adds to a chunk is in its cost; a tier without accounts stays without."""
    inner = disk(memory_path, capacity_bytes=CAPACITY, write_budget_bytes=32 * MIB)
    tier: Any = Checked(inner)
    assert isinstance(tier, Budgeted)
    assert tier.allowance() == inner.allowance()
    assert tier.written_bytes() == inner.written_bytes()
    assert tier.write_cost_bytes(4096) == inner.write_cost_bytes(4096 + tier.overhead_bytes)
    tier.close()
    assert not isinstance(Checked(MemoryTier(MIB)), Budgeted)
