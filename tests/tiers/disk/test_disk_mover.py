"""The mover process: it moves the same chunks as threads, and its death or silence does no harm."""

import gc
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import CorruptChunk, TierFull, TierUnavailable
from undercroft.tiers.base import Ends, SharedMemory
from undercroft.tiers.disk import DiskTier, wire
from undercroft.tiers.disk.files import Files

from .support import content, disk, du, files, key, put, right

OFFSET = 2 << 20
SIZE = 4096
NUM_SLOTS = 256


class Level0:
    """Slots of one size in a file, as the host region has them."""

    def __init__(self, num_slots: int = NUM_SLOTS, size: int = SIZE) -> None:
        self._fd = os.memfd_create("level 0")
        os.ftruncate(self._fd, OFFSET + num_slots * size)
        self._mapping = mmap.mmap(self._fd, 0)
        self.size = size
        self.buffer = memoryview(self._mapping)[OFFSET:]
        self.memory = SharedMemory(self._fd, OFFSET, self.buffer)

    def slot(self, number: int) -> memoryview:
        return self.buffer[number * self.size : (number + 1) * self.size]

    def close(self) -> None:
        self.buffer.release()
        gc.collect()  # exceptions that a test looked at keep frames, and those keep views
        self._mapping.close()
        os.close(self._fd)


@contextmanager
def moved(path: Path, level_0: Level0, **settings: Any) -> Iterator[DiskTier]:
    """A tier whose mover process is ready."""
    tier = disk(path, mover_process=True, memory=level_0.memory, **settings)
    try:
        wait_for_process(tier)
        yield tier
    finally:
        tier.close()


@pytest.fixture
def level_0() -> Iterator[Level0]:
    made = Level0()
    yield made
    made.close()


def wait_for_process(tier: DiskTier) -> int:
    assert tier._mover is not None
    deadline_s = time.monotonic() + 60
    while (pid := tier._mover.pid) is None:
        tier._mover._find_child()
        assert time.monotonic() < deadline_s, "no process"
        time.sleep(0.005)
    return pid


def all_of(ends: Iterator[Ends]) -> list[Any]:
    """Each chunk's end, in the order asked for; every chunk has exactly one."""
    told = [end for some in ends for end in some]
    by_number = dict(told)
    assert len(by_number) == len(told)
    assert sorted(by_number) == list(range(len(told)))
    return [by_number[number] for number in range(len(told))]


def write(tier: DiskTier, level_0: Level0, numbers: Sequence[int]) -> list[Any]:
    given = []
    for place, number in enumerate(numbers):
        level_0.slot(place)[:] = content(key(number), level_0.size)
        given.append((key(number), level_0.slot(place), None))
    return all_of(tier.write_many(given))


def read(tier: DiskTier, level_0: Level0, numbers: Sequence[int]) -> list[Any]:
    """Each chunk's end; whatever is said to be there is right."""
    for place in range(len(numbers)):
        level_0.slot(place)[:] = bytes(level_0.size)
    wanted = [(key(n), level_0.slot(place)) for place, n in enumerate(numbers)]
    ends = all_of(tier.read_many(wanted))
    for place, (number, end) in enumerate(zip(numbers, ends, strict=True)):
        if end is True:
            assert level_0.slot(place) == content(key(number), level_0.size), "wrong bytes served"
    return ends


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def open_in(pid: int) -> list[str]:
    """Besides its standard streams."""
    fds = Path(f"/proc/{pid}/fd").iterdir()
    return [str(fd.readlink()) for fd in fds if int(fd.name) > 2]


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline_s = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.01)


def only_by_process(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a record that this process reads or writes itself is a failure."""

    def here(*_: object, **__: object) -> None:
        raise AssertionError("moved by a thread")

    monkeypatch.setattr(tier._chunks, "_read_here", here)
    monkeypatch.setattr(tier._chunks, "_write_here", here)


def test_chunks_come_and_go_by_the_process(
    tmp_path: Path, level_0: Level0, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moved(tmp_path, level_0, capacity_bytes=4 << 20) as tier:
        only_by_process(tier, monkeypatch)
        numbers = list(range(150))  # more than a message holds
        assert write(tier, level_0, numbers) == [True] * 150
        assert read(tier, level_0, [*numbers, 999]) == [True] * 150 + [False]
        assert all_of(tier.delete_many([key(n) for n in range(50)])) == [True] * 50
        assert read(tier, level_0, numbers) == [False] * 50 + [True] * 100
        assert tier.stats()["mover_deaths"] == 0
        assert du(tmp_path) <= 4 << 20
    again = disk(tmp_path, capacity_bytes=4 << 20)  # by threads, from what the process wrote
    assert [right(again, n) for n in numbers] == [False] * 50 + [True] * 100
    again.close()


def test_single_verbs_take_the_process_too(
    tmp_path: Path, level_0: Level0, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moved(tmp_path, level_0) as tier:
        only_by_process(tier, monkeypatch)
        level_0.slot(3)[:] = content(key(3))
        tier.write_from(key(3), level_0.slot(3))
        assert tier.write_in_epoch(key(3), level_0.slot(3), tier.epoch())
        assert not tier.write_in_epoch(key(4), level_0.slot(3), tier.epoch() + 1)
        assert tier.read_into(key(3), level_0.slot(7))
        assert level_0.slot(7) == content(key(3))
        tier.delete(key(3))
        assert not tier.read_into(key(3), level_0.slot(7))


def test_buffers_elsewhere_and_odd_lengths_are_moved_here(tmp_path: Path, level_0: Level0) -> None:
    with moved(tmp_path, level_0) as tier:
        put(tier, 1)
        assert right(tier, 1)
        tier.write_from(key(2), level_0.slot(0)[:1000])
        out = level_0.slot(1)[:1000]
        assert tier.read_into(key(2), out)
        assert out == level_0.slot(0)[:1000]
        with pytest.raises(CorruptChunk, match="a record of"):
            tier.read_into(key(2), bytearray_view(3 * SIZE))


def bytearray_view(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def test_what_it_writes_counts(tmp_path: Path, level_0: Level0) -> None:
    """As bytes written to the medium: no less than the records and their entries."""
    with moved(tmp_path, level_0) as tier:
        before = tier.written_bytes()
        write(tier, level_0, range(8))
        assert tier.written_bytes() - before >= 8 * (SIZE + 4096 + 4096)


def test_damage_is_found_by_the_process(tmp_path: Path, level_0: Level0) -> None:
    with moved(tmp_path, level_0) as tier:
        write(tier, level_0, range(4))
        (slab,) = files(tmp_path, ".slab")
        whole = bytearray(slab.read_bytes())
        whole[whole.index(content(key(2)))] ^= 1
        slab.write_bytes(bytes(whole))
        ends = read(tier, level_0, range(4))
        assert [type(end) for end in ends] == [bool, bool, CorruptChunk, bool]
        assert ends[2].key == key(2)
        assert ends[2].tier == "disk"
        assert read(tier, level_0, [2]) == [False]
        assert write(tier, level_0, [2]) == read(tier, level_0, [2]) == [True]


def test_a_full_medium_is_full_also_there(tmp_path: Path, level_0: Level0) -> None:
    """The kernel's answer, its number included: files may not grow, for that process alone."""
    with moved(tmp_path, level_0) as tier:
        pid = wait_for_process(tier)
        write(tier, level_0, range(2))
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (SIZE, before[1]))
        ends = write(tier, level_0, range(10, 14))
        assert {type(end) for end in ends} == {TierFull}
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        assert write(tier, level_0, range(10, 14)) == [True] * 4
        assert read(tier, level_0, [0, 1, 10, 11, 12, 13]) == [True] * 6


def test_chunks_of_another_process_are_followed(tmp_path: Path, level_0: Level0) -> None:
    """And one that its owner has replaced meanwhile is absent, not wrong."""
    others = Level0()
    with moved(tmp_path, level_0) as tier, moved(tmp_path, others) as owner:
        write(owner, others, range(20))
        tier.refresh()
        assert read(tier, level_0, range(20)) == [True] * 20
        all_of(owner.delete_many([key(n) for n in range(20)]))
        write(owner, others, range(100, 120))  # into the same slots
        assert read(tier, level_0, range(20)) == [False] * 20
        tier.refresh()
        assert read(tier, level_0, range(100, 120)) == [True] * 20
    others.close()


def test_it_is_killed_and_nothing_is_lost(tmp_path: Path, level_0: Level0) -> None:
    with moved(tmp_path, level_0) as tier:
        pid = wait_for_process(tier)
        assert write(tier, level_0, range(8)) == [True] * 8
        os.kill(pid, signal.SIGSTOP)
        told: list[Any] = []
        reader = threading.Thread(target=lambda: told.extend(read(tier, level_0, range(8))))
        reader.start()
        time.sleep(0.1)
        assert reader.is_alive(), "the process is stopped, and nobody else has these orders"
        os.kill(pid, signal.SIGKILL)
        reader.join(10)
        assert [type(end) for end in told] == [TierUnavailable] * 8
        assert all(end.retryable for end in told)
        assert read(tier, level_0, range(8)) == [True] * 8, "by a thread, until there is another"
        assert tier.stats()["mover_deaths"] == 1
        assert wait_for_process(tier) != pid
        assert read(tier, level_0, range(8)) == [True] * 8
        assert write(tier, level_0, range(8, 16)) == [True] * 8


def test_closing_ends_a_process_that_hangs(tmp_path: Path, level_0: Level0) -> None:
    """Whoever waits for it comes back, and its buffers are let go for certain."""
    tier = disk(tmp_path, mover_process=True, memory=level_0.memory)
    pid = wait_for_process(tier)
    write(tier, level_0, range(4))
    os.kill(pid, signal.SIGSTOP)
    told: list[Any] = []
    reader = threading.Thread(target=lambda: told.extend(read(tier, level_0, range(4))))
    reader.start()
    time.sleep(0.1)
    begun_s = time.monotonic()
    tier.close()
    reader.join(10)
    assert time.monotonic() - begun_s < 5
    assert [type(end) for end in told] == [TierUnavailable] * 4
    assert not is_alive(pid)


def test_there_is_none_to_be_had(
    tmp_path: Path,
    level_0: Level0,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Threads do all then, and one line says so."""
    for program in ("/bin/false", "/nowhere"):
        caplog.clear()
        monkeypatch.setattr(sys, "executable", program)
        tier = disk(
            tmp_path / program[1:].replace("/", "-"), mover_process=True, memory=level_0.memory
        )
        for _ in range(20):
            write(tier, level_0, range(4))
            assert read(tier, level_0, range(4)) == [True] * 4
            time.sleep(0.01)
        assert len([r for r in caplog.records if "mover process" in r.message]) == 1
        tier.close()


def test_it_has_no_descriptor_of_a_segment_that_is_gone(tmp_path: Path, level_0: Level0) -> None:
    """Or the room of removed files would not come back, nor the lock of given-up ones."""
    with moved(tmp_path, level_0) as tier:
        pid = wait_for_process(tier)
        write(tier, level_0, range(4))
        assert [name for name in open_in(pid) if name.endswith(".slab")]
        with tier._keeper.shape:
            tier._keeper.detach()
        assert not [name for name in open_in(pid) if ".slab" in name or ".index" in name]
        assert write(tier, level_0, range(4)) == [True] * 4, "attached anew, there too"
        assert read(tier, level_0, range(4)) == [True] * 4


_ENGINE = """
import sys, time
from tests.tiers.disk.test_disk_mover import Level0, wait_for_process, write
from tests.tiers.disk.support import disk
level_0 = Level0()
tier = disk(sys.argv[1], mover_process=True, memory=level_0.memory)
pid = wait_for_process(tier)
write(tier, level_0, range(16))
print(pid, flush=True)
while True:
    write(tier, level_0, range(16, 100))
    list(tier.delete_many([__import__("tests.tiers.disk.support").tiers.disk.support.key(n)
                           for n in range(16, 100)]))
"""


def test_it_ends_with_a_killed_engine_and_its_chunks_are_taken_over(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    with engine, engine.stdout:
        pid = int(engine.stdout.readline())
        assert is_alive(pid)
        engine.kill()
        engine.wait()
        wait_until_gone(pid)
    tier = disk(tmp_path)
    assert [right(tier, n) for n in range(16)] == [True] * 16
    assert all(right(tier, n) in {True, False} for n in range(16, 100))
    tier.close()


@pytest.mark.parametrize("num_questions", [0, 1, 3])
def test_it_ends_quietly_when_nobody_hears_its_answer(num_questions: int) -> None:
    """An engine that is killed between a question and its answer leaves nothing on the terminal."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = [str(theirs.fileno()), "2", str(os.getpid())]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "undercroft.tiers.disk.mover_main", *arguments],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
    for _ in range(num_questions):
        ours.send(wire.DETACH.pack(b"d", 7))
    ours.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")


def test_its_environment(tmp_path: Path, level_0: Level0) -> None:
    """Out of reach of Ctrl-C, and with no descriptor that it was not given."""
    with moved(tmp_path, level_0) as tier:
        pid = wait_for_process(tier)
        assert os.getsid(pid) == pid
        held = open_in(pid)
        ours = [name for name in held if name.startswith("/") and not name.startswith("/dev/")]
        assert not [name for name in ours if "level 0" not in name], ours
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert "undercroft.tiers.disk.mover_main" in arguments


def test_no_mover_process_where_system_calls_are_replaced(tmp_path: Path, level_0: Level0) -> None:
    """Faults that tests put there would not be seen by another process."""
    tier = disk(tmp_path, mover_process=True, memory=level_0.memory, files=Files())
    assert tier._mover is None
    assert tier.batch_bytes == 0
    tier.close()


class Model:
    """A small tier and what it must hold; every step is one that an engine may take."""

    capacity = 600 << 10
    universe = range(120)

    def __init__(self, path: Path, level_0: Level0, rng: random.Random) -> None:
        self.path, self.level_0, self.rng = path, level_0, rng
        self.tier = self.opened()
        self.there: set[int] = set()

    def opened(self) -> DiskTier:
        return disk(
            self.path, mover_process=True, memory=self.level_0.memory, capacity_bytes=self.capacity
        )

    def some(self) -> list[int]:
        return self.rng.sample(self.universe, self.rng.randint(1, 90))

    def write(self) -> None:
        numbers = self.some()
        for number, end in zip(numbers, write(self.tier, self.level_0, numbers), strict=True):
            assert end is True or isinstance(end, TierFull | TierUnavailable)
            if end is True:
                self.there.add(number)

    def read(self) -> None:
        numbers = self.some()
        for number, end in zip(numbers, read(self.tier, self.level_0, numbers), strict=True):
            if not isinstance(end, TierUnavailable):
                assert end is (number in self.there)

    def delete(self) -> None:
        numbers = self.some()
        for end in all_of(self.tier.delete_many([key(n) for n in numbers])):
            assert end is True or isinstance(end, TierUnavailable)
        self.there -= set(numbers)

    def reset(self) -> None:
        self.tier.raise_epoch()
        self.there.clear()

    def kill(self) -> None:
        pid = self.tier._mover.pid if self.tier._mover else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.opened()
        # What was forgotten while the process was dead may have stayed in the index.
        self.there |= self.held()
        if self.rng.random() < 0.7:
            wait_for_process(self.tier)

    def held(self) -> set[int]:
        return {number for number in self.universe if self.tier.has(key(number))}


@pytest.mark.parametrize("chance", range(4))
def test_whatever_happens_bytes_are_right_and_the_books_are_true(
    tmp_path: Path, level_0: Level0, chance: int, seed: int
) -> None:
    """Batches, evictions, resets, deaths of the process and restarts, compared with a model."""
    rng = random.Random(seed + chance)
    model = Model(tmp_path, level_0, rng)
    steps = [model.write, model.read, model.delete, model.reset, model.kill, model.reopen]
    for _ in range(120):
        rng.choices(steps, [8, 8, 4, 0.5, 0.7, 0.5])[0]()
        assert du(tmp_path) <= model.capacity
        assert model.held() == model.there
    model.tier.close()
