"""Several processes and namespaces on one root: seen by each other, never harmed by each other."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import CorruptChunk, KvError, TierFull
from undercroft.keys import Namespace
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files

from .support import ManualClock, content, disk, du, files, key, put, right

OTHER = Namespace({"model": "another"})


def serve(path: str, settings: dict[str, Any], pipe: Connection) -> None:
    """A tier in a process of its own: runs what it is sent, sends back what came of it."""
    tier = disk(path, **settings)
    pipe.send("ready")
    while True:
        work, args = pipe.recv()
        if work is None:
            tier.close()
            return
        pipe.send(work(tier, *args))


class Process:
    def __init__(self, path: Path, **settings: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(str(path), settings, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        self.pipe.send((work, args))
        assert self.pipe.poll(100), "the process does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send((None, ()))
        self.process.join(10)


@contextmanager
def process(path: Path, **settings: Any) -> Iterator[Process]:
    running = Process(path, **settings)
    try:
        yield running
    finally:
        running.stop()


def put_all(tier: DiskTier, numbers: list[int]) -> int:
    """How many were stored before `TierFull`."""
    for count, number in enumerate(numbers):
        try:
            put(tier, number)
        except TierFull:
            return count
    return len(numbers)


def hits(tier: DiskTier, numbers: list[int]) -> list[int]:
    tier.refresh()
    out = []
    for number in numbers:
        try:
            if right(tier, number):
                out.append(number)
        except CorruptChunk:
            continue
    return out


def own(tier: DiskTier) -> int:
    return len(list(tier.evictable()))


def drop(tier: DiskTier, numbers: list[int]) -> None:
    for number in numbers:
        tier.delete(key(number))


def test_one_reads_what_the_other_writes(tmp_path: Path) -> None:
    """A store, a delete and a rewrite by one process must be seen by the other."""
    with process(tmp_path) as writer:
        reader = disk(tmp_path)
        assert writer(put_all, list(range(20))) == 20
        assert hits(reader, list(range(20))) == list(range(20))
        assert own(reader) == 0
        put(reader, 3)
        assert own(reader) == 0, "present elsewhere: a no-op"
        writer(drop, [3, 4])
        assert hits(reader, list(range(20))) == [n for n in range(20) if n not in (3, 4)]
        put(reader, 3)
        assert own(reader) == 1
        assert 3 in writer(hits, [3])
        reader.close()


def test_more_changes_than_the_ring_holds_are_still_followed(tmp_path: Path) -> None:
    """A follower that fell behind must read the table again, and be right."""
    with process(tmp_path) as writer:
        reader = disk(tmp_path)
        writer(put_all, [1])
        assert hits(reader, [1]) == [1]
        for start in range(0, 700, 100):
            writer(put_all, list(range(start, start + 100)))
            writer(drop, list(range(start, start + 100)))
        writer(put_all, list(range(2000, 2050)))
        assert hits(reader, [1, *range(690, 700), *range(2000, 2050)]) == list(range(2000, 2050))
        reader.close()


def churn(tier: DiskTier, seconds: float, at_least: int) -> int:
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until or count < at_least:
        try:
            put(tier, count % 40)
        except TierFull:
            for held, _ in list(tier.evictable())[:4]:
                tier.delete(held)
        count += 1
    return count


def test_reads_that_race_overwrites_miss_or_are_right(tmp_path: Path) -> None:
    """A foreign slot may be overwritten under the reader: never a wrong byte, and many right."""
    with process(tmp_path, capacity_bytes=200 << 10) as writer:
        reader = disk(tmp_path, capacity_bytes=200 << 10)
        writer.pipe.send((churn, (1.0, 200)))
        good = 0
        while not writer.pipe.poll(0):
            good += len(hits(reader, list(range(40))))
        writer.pipe.recv()
        assert good > 50
        reader.close()


def test_segments_of_a_killed_owner_are_adopted(tmp_path: Path) -> None:
    """After kill -9 another process serves the chunks, and takes the segments over for room."""
    capacity = 400 << 10
    writer = Process(tmp_path, capacity_bytes=capacity)
    stored = writer(put_all, list(range(1000)))
    survivor = disk(tmp_path, capacity_bytes=capacity)
    with pytest.raises(TierFull):
        put(survivor, 5000)
    writer.kill()
    assert hits(survivor, list(range(stored))) == list(range(stored))
    time.sleep(0.15)
    while own(survivor) == 0:
        with pytest.raises(TierFull):
            put(survivor, 5000)
    for held, _ in list(survivor.evictable())[:3]:
        survivor.delete(held)
    put(survivor, 5000)
    assert right(survivor, 5000)
    assert du(tmp_path) <= capacity
    survivor.close()
    again = disk(tmp_path, capacity_bytes=capacity)
    assert own(again) == stored - 2
    again.close()


class HangsOnce(Files):
    """One record, once it is asked to, is never written."""

    def __init__(self) -> None:
        self.must_hang = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self.must_hang:
            self.must_hang = False
            threading.Event().wait()
        super().pwritev(fd, buffers, offset)


def put_beside_a_store_that_hangs(tier: DiskTier, numbers: list[int]) -> int:
    """Stores that are done, and whose news wait for one that is not, in the same segment."""
    injected = tier._files
    assert isinstance(injected, HangsOnce)
    injected.must_hang = True
    threading.Thread(target=put, args=(tier, 999), daemon=True).start()
    while injected.must_hang:
        time.sleep(0.001)
    return put_all(tier, numbers)


def test_the_last_stores_of_a_killed_process_are_found_by_those_that_live(tmp_path: Path) -> None:
    """Killed before it told anybody of fifteen finished stores: two seconds later all are there.

    Without taking the dead one's segments over.
    """
    room = {"capacity_bytes": 16 << 20}
    with process(tmp_path, files=HangsOnce(), clock=ManualClock(), **room) as writer:
        reader = disk(tmp_path, **room)
        assert writer(put_all, [100]) == 1
        assert hits(reader, [100]) == [100]
        numbers = list(range(15))
        assert writer(put_beside_a_store_that_hangs, numbers) == 15
        assert hits(reader, numbers) == [], "told already, or this test proves nothing"
        writer.kill()
        until = time.monotonic() + 60
        while hits(reader, numbers) != numbers and time.monotonic() < until:
            time.sleep(0.1)
        assert hits(reader, numbers) == numbers
        assert reader.stats()["adopted"] == 0
        assert own(reader) == 0
        reader.close()


def test_replicas_share_what_a_dead_run_left(tmp_path: Path) -> None:
    """With two replicas each adopts half, reads all, and may fill its half only."""
    capacity = 600 << 10
    first = disk(tmp_path, capacity_bytes=capacity)
    stored = put_all(first, list(range(1000)))
    first.close()
    one = disk(tmp_path, capacity_bytes=capacity, num_replicas=2)
    two = disk(tmp_path, capacity_bytes=capacity, num_replicas=2)
    assert own(one) + own(two) <= stored
    assert abs(own(one) - stored / 2) <= 32
    for tier in (one, two):
        assert hits(tier, list(range(stored))) == list(range(stored))
    assert du(tmp_path) <= capacity
    one.close()
    two.close()


@pytest.mark.parametrize("round_", range(3))
def test_the_quota_holds_while_several_create_segments(tmp_path: Path, round_: int) -> None:
    """Three processes filling at once must never exceed the capacity together, not for a moment."""
    capacity = 500 << 10
    settings = {"capacity_bytes": capacity, "num_replicas": 3}
    with (
        process(tmp_path, **settings) as one,
        process(tmp_path, **settings) as two,
        process(tmp_path, **settings) as three,
    ):
        running = (one, two, three)
        for number, each in enumerate(running):
            start = round_ * 10000 + number * 1000
            each.pipe.send((put_all, (list(range(start, start + 400)),)))
        answers: list[int] = []
        while len(answers) < 3:
            assert du(tmp_path) <= capacity
            answers += [each.pipe.recv() for each in running if each.pipe.poll(0)]
        assert min(answers) >= 8
        assert sum(answers) * 8192 > capacity // 2


def test_a_killed_namespace_yields_what_exceeds_its_share(tmp_path: Path) -> None:
    """A new model gets half from a dead one that held all; the dead keeps its own half."""
    capacity = 600 << 10
    old = disk(tmp_path, capacity_bytes=capacity)
    stored = put_all(old, list(range(1000)))
    old.close()
    new = disk(tmp_path, capacity_bytes=capacity, namespace=OTHER)
    got = put_all(new, list(range(1000)))
    assert got >= stored // 3
    assert du(tmp_path) <= capacity
    new.close()
    old = disk(tmp_path, capacity_bytes=capacity)
    assert len(hits(old, list(range(stored)))) >= stored // 3
    old.close()


def test_a_living_namespace_gives_up_what_exceeds_its_share(tmp_path: Path) -> None:
    """When a second model comes, the first shrinks to its share by itself, never below it."""
    capacity = 800 << 10
    first = disk(tmp_path, capacity_bytes=capacity)
    stored = put_all(first, list(range(1000)))
    try:
        second = disk(tmp_path, capacity_bytes=capacity, namespace=OTHER)
        until = time.monotonic() + 60
        while put_all(second, list(range(1000))) < stored // 4:
            assert time.monotonic() < until, "the first gives nothing up"
            time.sleep(0.11)
            first.refresh()
        assert own(first) >= stored // 4
        assert first.stats()["root_bytes"] <= capacity
        assert du(tmp_path) <= capacity
        second.close()
    finally:
        first.close()


def test_an_epoch_raised_while_another_writes(tmp_path: Path) -> None:
    """Whatever was stored before a raise by another process must be gone within its bound."""
    with process(tmp_path) as writer:
        other = disk(tmp_path)
        for _ in range(5):
            writer(put_all, list(range(20)))
            other.raise_epoch()
            time.sleep(0.025)
            assert hits(other, list(range(20))) == []
            assert writer(hits, list(range(20))) == []
        other.close()


def test_a_write_for_an_older_epoch_is_never_served(tmp_path: Path) -> None:
    """However soon it comes after another process raised the epoch, and however late."""
    with process(tmp_path) as other:
        tier = disk(tmp_path)

        def late(number: int, epoch: int) -> bool:
            return tier.write_in_epoch(key(number), memoryview(content(key(number))), epoch)

        for turn in range(20):
            numbers = list(range(20 * turn, 20 * turn + 20))
            before = tier.epoch()
            put(tier, numbers[0])
            other(DiskTier.raise_epoch)
            for number in numbers[1:]:
                late(number, before)
                time.sleep(0.0002)
            time.sleep(0.025)
            assert hits(tier, numbers) == []
            assert other(hits, numbers) == []
            assert late(turn, tier.epoch())
            assert hits(tier, [turn]) == [turn]
        tier.close()


def test_an_empty_dead_namespace_takes_no_share(tmp_path: Path) -> None:
    """A directory that nobody uses and that holds nothing must be swept."""
    disk(tmp_path, namespace=OTHER).close()
    tier = disk(tmp_path)
    assert len(list((tmp_path / "undercroft-v1").iterdir())) == 2
    tier.close()


def test_a_held_root_lock_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """A process that stands still with the root's lock must cost others two seconds, not more."""
    import fcntl

    tier = disk(tmp_path)
    with (tmp_path / "undercroft-v1" / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begun = time.monotonic()
        with pytest.raises(KvError):
            put(tier, 1)
        assert 1 < time.monotonic() - begun < 20
    put(tier, 1)
    assert right(tier, 1)
    assert len(files(tmp_path, ".slab")) == 1
    tier.close()
