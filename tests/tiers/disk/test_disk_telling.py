"""How others are told of changes: together where stores overlap, never lost, never late."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.buffers import AlignedPool, is_aligned
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.records import RecordIo
from undercroft.tiers.disk.table import ENTRY_BYTES, RING_AT

from .support import ManualClock, content, disk, key, put, right


class Watched(Files):
    """Counts, and while `broken` fails, writes to rings; holds records back at a shut gate."""

    def __init__(self) -> None:
        self.num_told = 0
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        if RING_AT <= offset < 4096:
            if self.broken:
                raise OSError(errno.EIO, "injected")
            self.num_told += 1
        super().pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.arrived.release()
        self.gate.wait()
        super().pwritev(fd, buffers, offset)


def start(tier: DiskTier, injected: Watched, numbers: Sequence[int]) -> list[threading.Thread]:
    """Stores that are all under way, and go on when the gate is opened."""
    injected.gate.clear()
    threads = [threading.Thread(target=put, args=(tier, number)) for number in numbers]
    for thread in threads:
        thread.start()
        assert injected.arrived.acquire(timeout=60)
    return threads


def finish(injected: Watched, threads: Sequence[threading.Thread]) -> None:
    injected.gate.set()
    for thread in threads:
        thread.join()


def seen(reader: DiskTier, numbers: Sequence[int]) -> list[int]:
    reader.refresh()
    return [number for number in numbers if reader.has(key(number)) and right(reader, number)]


def test_stores_that_overlap_are_told_together(tmp_path: Path) -> None:
    """Once they have returned others know of all, from fewer writes than there were stores."""
    injected = Watched()
    writer, reader = disk(tmp_path, files=injected), disk(tmp_path)
    put(writer, 0)
    assert injected.arrived.acquire()
    assert seen(reader, [0]) == [0]
    told = injected.num_told
    finish(injected, start(writer, injected, range(1, 9)))
    assert 1 <= injected.num_told - told < 8
    assert seen(reader, range(9)) == list(range(9))
    writer.delete(key(3))
    assert seen(reader, range(9)) == [0, 1, 2, 4, 5, 6, 7, 8]
    writer.close()
    reader.close()


def test_a_store_that_hangs_keeps_no_news_back(tmp_path: Path) -> None:
    """What others stored meanwhile is told by the next upkeep, or when it has become much."""
    injected, clock = Watched(), ManualClock()
    writer = disk(tmp_path, files=injected, clock=clock, capacity_bytes=16 << 20)
    reader = disk(tmp_path, clock=clock, capacity_bytes=16 << 20)
    put(writer, 0)
    assert injected.arrived.acquire()
    assert seen(reader, [0]) == [0]
    hanging = start(writer, injected, [1])
    # The hanging store waits at the gate that was; those to come find an open one.
    shut, injected.gate = injected.gate, threading.Event()
    injected.gate.set()
    try:
        put(writer, 2)
        assert seen(reader, range(3)) == [0], "not told yet, or this test proves nothing"
        clock.t += 0.11
        writer.contains(key(0))
        assert seen(reader, range(3)) == [0, 2]
        for number in range(3, 19):
            put(writer, number)
        assert seen(reader, range(3, 19)) == list(range(3, 19))
    finally:
        shut.set()
        finish(injected, hanging)
    assert seen(reader, [1]) == [1]
    writer.close()
    reader.close()


class Tables(Files):
    """Counts tables that are read whole."""

    def __init__(self) -> None:
        self.num_read = 0

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self.num_read += offset == 4096 and num_bytes > ENTRY_BYTES
        return super().pread(fd, num_bytes, offset)


def test_what_the_ring_left_out_is_found_after_a_second_of_quiet(tmp_path: Path) -> None:
    """An owner may die between entries and ring: its last stores and deletes are seen.

    From one more reading of the table, however long it is quiet then; and what a reader found to be
    bad stays so.
    """
    injected, tables, clock = Watched(), Tables(), ManualClock()
    writer = disk(tmp_path, files=injected)
    for number in range(4):
        put(writer, number)
    reader = disk(tmp_path, files=tables, clock=clock)
    segment, slot, _ = reader._holdings.pin(key(3)) or pytest.fail("not followed")
    reader._holdings.forget(key(3), segment, slot)
    reader._chunks._leave(segment, slot)
    for _ in range(4):
        clock.t += 1.01
        assert seen(reader, range(4)) == [0, 1, 2]
    injected.broken = True
    writer.delete(key(0))
    for number in (10, 11, 12):
        put(writer, number)
    before = tables.num_read
    for _ in range(9):
        clock.t += 0.11
        assert seen(reader, [10, 11, 12]) == [], "told already, or looked at too often"
    assert tables.num_read == before
    clock.t += 0.11
    assert seen(reader, [0, 1, 2, 3, 10, 11, 12]) == [1, 2, 10, 11, 12]
    for _ in range(5):
        clock.t += 1.01
        assert seen(reader, [0, 1, 2, 3, 10, 11, 12]) == [1, 2, 10, 11, 12]
    assert tables.num_read == before + 1
    injected.broken = False
    put(writer, 13)
    assert seen(reader, [1, 10, 13]) == [1, 10, 13]
    writer.close()
    reader.close()


def test_news_that_cannot_be_told_are_told_later(tmp_path: Path) -> None:
    """The store itself has succeeded, and is here; others learn of it with the next change."""
    injected = Watched()
    writer, reader = disk(tmp_path, files=injected), disk(tmp_path)
    put(writer, 0)
    assert seen(reader, [0]) == [0]
    injected.broken = True
    put(writer, 1)
    writer.delete(key(0))
    assert right(writer, 1)
    assert not right(writer, 0)
    assert seen(reader, [1]) == []
    injected.broken = False
    put(writer, 2)
    assert seen(reader, [0, 1, 2]) == [1, 2]
    writer.close()
    reader.close()


class TornOnce(Files):
    """Shows a page that was written while it was read: one new item of the ring is missing."""

    def __init__(self) -> None:
        self.last: dict[int, bytes] = {}
        self.num_torn = 0

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        page = super().pread(fd, num_bytes, offset)
        if (num_bytes, offset) != (4096, 0):
            return page
        before = self.last.setdefault(fd, page)
        new = [at for at in range(RING_AT, 4096, 8) if page[at : at + 8] != before[at : at + 8]]
        if len(new) < 3 or self.num_torn:
            self.last[fd] = page
            return page
        self.num_torn += 1
        return page[: new[1]] + before[new[1] : new[1] + 8] + page[new[1] + 8 :]


def test_a_ring_read_while_it_is_written_loses_no_change(tmp_path: Path) -> None:
    """An item that shows up after later ones must still be seen."""
    injected, torn = Watched(), TornOnce()
    writer = disk(tmp_path, files=injected)
    put(writer, 0)
    assert injected.arrived.acquire()
    reader = disk(tmp_path, files=torn)
    assert seen(reader, [0]) == [0]
    finish(injected, start(writer, injected, range(1, 7)))
    reader.refresh()
    assert torn.num_torn == 1
    assert seen(reader, range(7)) == list(range(7))
    writer.close()
    reader.close()


class Strict(Files):
    """Direct I/O that takes whole pages at page addresses only."""

    def check(self, buffers: Sequence[memoryview]) -> None:
        if not all(is_aligned(buffer) for buffer in buffers):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.check(buffers)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.check(buffers)
        super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 5000, 8192])
@pytest.mark.parametrize("shift", [0, 8])
def test_any_address_will_do(tmp_path: Path, num_bytes: int, shift: int) -> None:
    """What direct I/O refuses goes through a buffer that it takes, and comes back the same."""
    pool = AlignedPool()
    records = RecordIo(Strict(), bytes(32), pool, direct=True)
    buffer = pool.take(1 << 14)[shift : shift + num_bytes]
    buffer[:] = content(key(1), num_bytes)
    fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    try:
        records.write(fd, 4096, key(1), (1, 1), buffer)
        buffer[:] = bytes(num_bytes)
        records.read(fd, 4096, key(1), 1, buffer)
    finally:
        os.close(fd)
    assert buffer == content(key(1), num_bytes)


def test_what_is_not_about_the_address_is_an_error(tmp_path: Path) -> None:
    """EINVAL for an aligned buffer has another reason, and must not be tried again for ever."""
    records = RecordIo(Files(), bytes(32), AlignedPool(), direct=True)
    buffer = AlignedPool().take(4096)
    fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            records.read(fd, -4096, key(1), 1, buffer)
    finally:
        os.close(fd)
