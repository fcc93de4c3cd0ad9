"""Resets that the directory does not take: nothing old is served, here, beside us, after a kill."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import TierUnavailable
from undercroft.tiers.disk import DiskTier, owed
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.owed import OwedResets

from .support import NAMESPACE, ManualClock, disk, key, put, right

CALLS = ("open", "pread", "preadv", "pwrite", "pwritev", "fdatasync", "lock", "stat", "list")


class Hanging(Files):
    """Every call hangs while `gate` is not set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_hung = 0
        for name in CALLS:
            setattr(self, name, self._behind_the_gate(getattr(super(), name)))

    def _behind_the_gate(self, call: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if not self.gate.is_set():
                self.num_hung += 1
            self.gate.wait()
            return call(*args, **kwargs)

        return wait


class Refusing(Files):
    """What writes fails with `number`."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def _check(self) -> None:
        if self.number:
            raise OSError(self.number, os.strerror(self.number), "injected")

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._check()
        return super().open(path, flags)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        self._check()
        super().pwrite(fd, data, offset)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Notes go to a folder of their own; at the end none may be left."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(OwedResets.__init__, "__kwdefaults__", {"directory": str(folder)})
    yield folder
    for empty in folder.glob("*/"):
        empty.rmdir()
    assert not list(folder.iterdir()), "a note was left behind"


def notes(folder: Path) -> int:
    return len([path for path in folder.rglob("*") if path.is_file()])


def served(tier: DiskTier, numbers: range = range(6)) -> int:
    """How many are served, right; a tier that cannot tell serves none."""
    found = 0
    for number in numbers:
        with suppress(TierUnavailable):
            found += tier.has(key(number)) and right(tier, number)
    return found


def filled(path: Path) -> None:
    with closing(disk(path)) as tier:
        for number in range(6):
            put(tier, number)
        assert served(tier) == 6


def reset_and_be_killed(path: Path, *, can_note: bool) -> None:
    """A process whose disk hangs is told to reset, cannot do so, and gets `kill -9`."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        files = Hanging()
        tier = disk(path, files=files)
        assert served(tier) == 6
        files.gate.clear()
        if not can_note:
            tier._keeper.ground.owed._path = "/proc/no/such/place"
        assert tier.owe_reset() is can_note
        threading.Thread(target=tier.raise_epoch, daemon=True).start()
        while not files.num_hung:
            time.sleep(0.001)
        os.write(tell, b"!" if not tier.has(key(1)) else b"?")
        signal.pause()
    os.close(tell)
    assert os.read(told, 1) == b"!", "it served something after the reset"
    os.close(told)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("can_note", [True, False], ids=["noted", "control: not noted"])
def test_killed_while_a_reset_hangs(tmp_path: Path, shared_memory: Path, can_note: bool) -> None:
    """The next start takes the reset first; without the note it would serve all of it again."""
    filled(tmp_path)
    reset_and_be_killed(tmp_path, can_note=can_note)
    assert notes(shared_memory) == can_note
    with closing(disk(tmp_path)) as heir:
        assert served(heir) == (0 if can_note else 6)
        assert notes(shared_memory) == 0
        put(heir, 7)
        assert right(heir, 7)
        assert heir.epoch() == (2 if can_note else 1)
    with closing(disk(tmp_path)) as later:
        assert later.epoch() == (2 if can_note else 1), "taken once"
        assert right(later, 7)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, shared_memory: Path, number: int
) -> None:
    """It serves nothing after a reset, nor does a start on it, until it can be written again."""
    filled(tmp_path)
    clock, refusing = ManualClock(), Refusing()
    tier = disk(tmp_path, files=refusing, clock=clock)
    assert served(tier) == 6
    refusing.number = number
    tier.owe_reset()
    with pytest.raises(Exception, match="injected"):
        tier.raise_epoch()
    assert served(tier) == 0
    tier.close()
    if number == errno.EROFS:
        again = disk(tmp_path, files=refusing, clock=clock)
        assert again.stats()["read_only"] == 1
        assert served(again) == 0
        assert notes(shared_memory) == 1
        with pytest.raises(TierUnavailable):
            again.raise_epoch()
        again.close()
    refusing.number = 0
    with closing(disk(tmp_path)) as heir:
        assert served(heir) == 0
        put(heir, 1)
        assert right(heir, 1)
    assert notes(shared_memory) == 0


def test_who_can_write_takes_the_reset_of_who_cannot(tmp_path: Path, shared_memory: Path) -> None:
    """Another process on the directory sees the note, forgets, and raises the epoch; then both go
    on with what is stored from then on."""
    filled(tmp_path)
    clock, refusing = ManualClock(), Refusing()
    stuck = disk(tmp_path, files=refusing, clock=clock)
    other = disk(tmp_path, clock=clock)
    assert (served(stuck), served(other)) == (6, 6)
    refusing.number = errno.EROFS
    stuck.owe_reset()
    with pytest.raises(TierUnavailable):
        stuck.raise_epoch()
    before = other.epoch()
    clock.t += 0.1
    assert other.epoch() == before, "left to who asked for it, for a moment"
    clock.t += 1.1 * owed._OVERDUE_S
    assert other.epoch() > before, "everything has to be forgotten, host memory too"
    assert served(other) == 0
    clock.t += 1.1
    other.refresh()
    assert notes(shared_memory) == 0
    put(other, 9)
    assert right(other, 9)
    for _ in range(10):  # others' chunks are looked for now and then
        clock.t += 1.1
        stuck.refresh()
    assert served(stuck, range(10)) == 1, "the new one, which it may read"
    other.close()
    stuck.close()


def test_a_reset_that_ends_at_once_is_nobody_elses(tmp_path: Path) -> None:
    """The other sees the epoch move once, and does not raise it another time."""
    clock = ManualClock()
    one, other = disk(tmp_path, clock=clock), disk(tmp_path, clock=clock)
    put(one, 1)
    for _ in range(3):
        one.owe_reset()
        clock.t += 0.05
        other.epoch()
        raised = one.raise_epoch()
        for _ in range(4):
            clock.t += 0.3
            assert other.epoch() == raised
            other.refresh()
            one.refresh()
    assert raised == 4
    one.close()
    other.close()


def test_many_resets_leave_one_note(tmp_path: Path, shared_memory: Path) -> None:
    """However long the disk hangs; and one raise settles them all."""
    refusing = Refusing()
    tier = disk(tmp_path, files=refusing)
    refusing.number = errno.EIO
    for _ in range(100):
        assert tier.owe_reset()
    assert notes(shared_memory) == 1
    refusing.number = 0
    assert tier.raise_epoch() == 2
    assert notes(shared_memory) == 0
    tier.close()


def test_a_reset_during_another_is_not_settled_with_it(tmp_path: Path, shared_memory: Path) -> None:
    """What is noted after the raise began needs another one, if the process ends in between."""
    refusing = Refusing()
    tier = disk(tmp_path, files=refusing)
    put(tier, 1)
    tier.owe_reset()
    write = refusing.pwrite

    def interrupt(fd: int, data: bytes, offset: int) -> None:
        del refusing.pwrite  # type: ignore[method-assign]
        tier.owe_reset()
        write(fd, data, offset)

    refusing.pwrite = interrupt  # type: ignore[method-assign]
    assert tier.raise_epoch() == 2
    assert notes(shared_memory) == 1
    assert served(tier) == 0
    tier.close()
    with closing(disk(tmp_path)) as heir:
        assert heir.epoch() == 3
    assert notes(shared_memory) == 0


@pytest.mark.parametrize("what", ["file", "open folder", "somebody's"])
def test_what_lies_in_the_notes_place(tmp_path: Path, shared_memory: Path, what: str) -> None:
    """A file, or a folder that others can write: no note, and nothing is believed of it."""
    record = OwedResets(str(tmp_path), NAMESPACE.id, ManualClock())
    place = Path(record._path)
    if what == "file":
        place.write_text("")
    else:
        place.mkdir(mode=0o700)
        (place / ("0" * 16)).write_text("")
        place.chmod(0o777 if what == "open folder" else 0o700)
        if what == "somebody's":
            record._files.user_id = lambda: os.geteuid() + 1  # type: ignore[method-assign]
    assert not record.pending()
    assert not record.inherit(1)
    assert not record.note(1)
    assert record, "this process knows"
    record.settle(record.debts())
    assert not record
    for path in sorted(shared_memory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_the_notes_of_other_paths_and_key_spaces_are_others(tmp_path: Path) -> None:
    """One directory's reset says nothing of another's; a link to the same path is the same."""
    (tmp_path / "link").symlink_to(tmp_path)
    clock = ManualClock()
    one = OwedResets(str(tmp_path), NAMESPACE.id, clock)
    assert one.note(1)
    assert OwedResets(f"{tmp_path}/link", NAMESPACE.id, clock).pending() == one.pending()
    assert not OwedResets(f"{tmp_path}/shm", NAMESPACE.id, clock).pending()
    assert not OwedResets(str(tmp_path), "0" * 32, clock).pending()
    one.settle(one.debts())
