"""Asking a disk that may hang."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from undercroft.tiers.disk import files as files_module
from undercroft.tiers.disk import upkeep
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.watch import Watch

from .support import ManualClock, disk, key, put


@pytest.fixture(autouse=True)
def wait_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long `has` waits for the epoch here: longer than a busy machine needs for an answer."""
    monkeypatch.setattr(upkeep, "_EPOCH_WAIT_S", 1.0)
    return 1.0


class Hanging(Files):
    """Reads hang while `gate` is not set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def pread(self, *args: Any) -> bytes:
        self.gate.wait()
        return super().pread(*args)

    def pread_now(self, *args: Any) -> bytes | None:
        return super().pread_now(*args) if self.gate.is_set() else None


def test_a_hanging_epoch_keeps_the_asker_once_and_shortly(tmp_path: Path, wait_s: float) -> None:
    """`has` says no while the epoch cannot be read, at once after the first time."""
    files = Hanging()
    tier = disk(tmp_path, files=files)
    put(tier, 1)
    assert tier.has(key(1))
    time.sleep(0.03)
    files.gate.clear()
    assert not tier.has(key(1))
    began = time.monotonic()
    for _ in range(5):
        assert not tier.has(key(1))
        assert tier.epoch() >= 1
        time.sleep(0.03)
    assert time.monotonic() - began < 4 * wait_s
    files.gate.set()
    until = time.monotonic() + 30
    while not tier.has(key(1)):
        assert time.monotonic() < until
        time.sleep(0.03)
    tier.close()


def test_a_read_that_raises_is_no_answer_and_the_next_one_counts() -> None:
    """The thread outlives whatever it calls."""
    answers: list[Any] = [7, OSError("no"), 8]

    def read() -> int | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    watch = Watch(read, "watch")
    assert [watch.read(5.0) for _ in range(3)] == [7, None, 8]
    watch.close()
    watch.close()
    assert watch.read(5.0) is None


def test_after_a_hang_answers_are_fresh() -> None:
    """What a late read found is not handed to a later asker."""
    gate = threading.Event()
    counter = iter(range(1, 9))

    def read() -> int | None:
        number = next(counter)
        if number == 1:
            gate.wait()
        return number

    watch = Watch(read, "watch")
    assert watch.read(0.01) is None
    assert watch.read(5.0) is None, "nobody waits twice"
    gate.set()
    while (answer := watch.read(5.0)) is None:
        time.sleep(0.001)
    assert answer == 2
    watch.close()


def test_an_epoch_that_was_seen_stays_seen(tmp_path: Path) -> None:
    """One that cannot be read for a while does not go back: all would be forgotten once more."""
    files, clock = Hanging(), ManualClock()
    tier, other = disk(tmp_path, files=files, clock=clock), disk(tmp_path)
    before = tier.epoch()
    raised = other.raise_epoch()
    clock.t += 1.0
    assert tier.epoch() == raised == before + 1
    files.gate.clear()
    clock.t += 1.0
    assert tier.epoch() == raised
    files.gate.set()
    tier.close()
    other.close()


def watchers() -> int:
    """Threads that read an epoch for others."""
    return sum(thread.name.endswith("-watch") for thread in threading.enumerate())


class Counting(Files):
    """Counts reads that waited for nothing, and answers them or not."""

    def __init__(self, *, is_cold: bool = False, refusal: int = 0) -> None:
        self.is_cold, self.refusal = is_cold, refusal
        self.num_now = 0

    def open(self, path: str, flags: int) -> int:
        if self.refusal and flags & os.O_NOATIME:
            raise OSError(self.refusal, "not with O_NOATIME", path)
        return super().open(path, flags)

    def pread_now(self, *args: Any) -> bytes | None:
        self.num_now += 1
        return None if self.is_cold else super().pread_now(*args)


def test_an_epoch_in_the_page_cache_needs_no_other_thread(tmp_path: Path) -> None:
    """Two switches of threads in every step would be the price, much more on a busy machine."""
    before, files, clock = watchers(), Counting(), ManualClock()
    with (tmp_path / "probe").open("wb+", buffering=0) as probe:
        probe.write(bytes(24))
        if files.pread_now(probe.fileno(), 24, 0) is None:
            pytest.skip("this file system reads nothing without waiting")
    tier, other = disk(tmp_path, files=files, clock=clock), disk(tmp_path)
    put(tier, 1)
    assert tier.has(key(1))
    clock.t += 1.0
    other.raise_epoch()
    assert not tier.has(key(1)), "what another raised is seen"
    assert files.num_now > 2
    assert watchers() == before
    tier.close()
    other.close()


@pytest.mark.parametrize("refusal", [0, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP])
def test_an_epoch_that_is_not_at_hand_is_read_by_another_thread(
    tmp_path: Path, refusal: int
) -> None:
    """The page was dropped, or the file is another user's: the answer is right all the same."""
    before, clock = watchers(), ManualClock()
    files = Counting(is_cold=not refusal, refusal=refusal)
    tier, other = disk(tmp_path, files=files, clock=clock), disk(tmp_path)
    put(tier, 1)
    assert tier.has(key(1))
    assert watchers() == before + 1
    other.raise_epoch()
    clock.t += 1.0
    assert not tier.has(key(1))
    assert (files.num_now == 0) == bool(refusal)
    tier.close()
    other.close()


def test_reads_without_waiting_know_what_they_cannot(tmp_path: Path) -> None:
    """Short at the end of the file; nothing for a descriptor that is not open."""
    files = Files()
    fd = files.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    files.pwrite(fd, b"abc", 0)
    assert files.pread_now(fd, 8, 1) in (b"bc", None)
    files.close(fd)
    assert files.pread_now(fd, 8, 0) is None


def test_a_python_that_cannot_ask_for_it_reads_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was built for an older C library has no `RWF_NOWAIT`, and its tier works."""
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    monkeypatch.setattr(files_module, "_NOWAIT", getattr(os, "RWF_NOWAIT", 0))
    before, clock = watchers(), ManualClock()
    tier, other = disk(tmp_path, clock=clock), disk(tmp_path)
    put(tier, 1)
    assert tier.has(key(1))
    assert watchers() == before + 1
    other.raise_epoch()
    clock.t += 1.0
    assert not tier.has(key(1))
    tier.close()
    other.close()
