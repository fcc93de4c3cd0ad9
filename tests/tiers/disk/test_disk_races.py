"""What other threads do in the middle of something: done here by the one thread, at that place."""

import errno
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import TierClosed
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.records import record_bytes
from undercroft.tiers.disk.watch import Watch

from .support import disk, get, key, open_files, put, right


class Meanwhile(Files):
    """After one call of `verb` something else happens, once; `skip` calls pass before."""

    def __init__(self) -> None:
        self._verb, self._skip = "", 0
        self._act: Callable[[], None] | None = None
        self.space: int | None = None

    def after(self, verb: str, act: Callable[[], None], *, skip: int = 0) -> None:
        self._verb, self._act, self._skip = verb, act, skip

    @property
    def has_happened(self) -> bool:
        return self._act is None

    def _then(self, verb: str) -> None:
        if verb == self._verb and self._act is not None:
            self._skip -= 1
            if self._skip < 0:
                act, self._act = self._act, None
                act()

    def pread(self, *args: Any) -> bytes:
        data = super().pread(*args)
        self._then("pread")
        return data

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        self._then("list")
        return names

    def close(self, fd: int) -> None:
        super().close(fd)
        self._then("close")

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self.space is None else self.space


def test_a_chunk_stored_while_all_is_let_go_leaves_no_trace(tmp_path: Path) -> None:
    """A key without its segment could neither be read nor written anew, ever."""
    files = Meanwhile()
    with closing(disk(tmp_path, capacity_bytes=8 << 20, files=files)) as tier:
        put(tier, 1)
        put(tier, 2, 8192)  # another size, so another segment, and it is let go later
        holdings = tier._holdings

        def store() -> None:
            _, taken = holdings.claim(key(3), record_bytes(8192))
            if taken is None:
                holdings.unclaim(key(3))
            else:
                holdings.settle(taken, key(3), 8192)

        files.after("close", store)
        with tier._keeper.shape:
            tier._keeper.detach()
        assert files.has_happened
        assert key(3) not in holdings
        assert get(tier, 3, 8192) is None
        put(tier, 3, 8192)
        assert all(right(tier, number, size) for number, size in ((1, 4096), (2, 8192), (3, 8192)))


def test_a_chunk_stored_into_a_segment_that_is_given_up_goes_with_it(tmp_path: Path) -> None:
    """It came after the segment's index had been looked at; it is absent, and told of as lost."""
    files = Meanwhile()
    with closing(disk(tmp_path, files=files)) as tier:
        put(tier, 1)
        keeper = tier._keeper
        (segment,) = tier._holdings.own.values()
        files.after("pread", lambda: put(tier, 2))
        with keeper.shape, keeper.ground.root.locked():
            keeper.room.release(segment)
        assert files.has_happened
        assert not tier.has(key(2))
        assert get(tier, 2) is None
        assert sorted(tier.take_lost()) == sorted((key(n), "given_up") for n in (1, 2))
        put(tier, 2)
        assert right(tier, 2)


class ClosedMeanwhile:
    """A tier's lock that somebody who closes the tier gets first."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier, self._lock = tier, tier._keeper.shape
        tier._keeper.shape = self  # type: ignore[assignment] # as far as `with` goes

    def __enter__(self) -> None:
        self._tier._keeper.shape = self._lock
        self._tier.close()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("verb", ["raise_epoch", "flush"])
def test_what_waited_while_the_tier_was_closed_opens_nothing(tmp_path: Path, verb: str) -> None:
    """A closed tier that held its segments again would keep them from the next engine."""
    before = open_files()
    tier = disk(tmp_path)
    put(tier, 1)
    ClosedMeanwhile(tier)
    with pytest.raises(TierClosed):
        getattr(tier, verb)()
    assert open_files() == before
    with closing(disk(tmp_path)) as heir:
        assert right(heir, 1) == (verb != "raise_epoch"), "the reset is owed, and the heir takes it"
        assert heir.stats()["adopted"] == 1


def test_room_that_was_asked_for_during_a_look_is_counted_anew(tmp_path: Path) -> None:
    """The answer of before the look must not stand until the next one, which may be far."""
    files = Meanwhile()
    files.space = 1 << 30
    with closing(disk(tmp_path, files=files)) as tier:
        put(tier, 1)
        during: list[int] = []
        files.space = 0
        files.after("list", lambda: during.append(tier.free_chunks(4096)))
        with tier._keeper.shape:
            tier._keeper.ground.look()
        (segment,) = tier._holdings.own.values()
        assert tier.free_chunks(4096) == segment.num_free < during[0]


def test_a_reset_during_a_look_at_anothers_chunks_is_not_missed(tmp_path: Path) -> None:
    """What the other stored after it is only shown by a look at the whole table."""
    files = Meanwhile()
    with closing(disk(tmp_path)) as writer, closing(disk(tmp_path, files=files)) as reader:
        put(writer, 1)
        reader.refresh()
        (segment,) = reader._holdings.foreign.values()
        assert not segment.stale
        put(writer, 2)
        files.after("pread", lambda: reader._holdings.void(reader._holdings.epoch + 1), skip=1)
        sighting = segment.disk_look(files, 0.0)
        assert files.has_happened
        assert sighting is not None
        assert segment.stale


@pytest.mark.parametrize("number", range(5))
def test_a_file_that_does_not_close_well_keeps_no_other_open(tmp_path: Path, number: int) -> None:
    """All five: the slab, the index, the epoch, the lock, the manifest."""
    before = open_files()
    files = Meanwhile()
    tier = disk(tmp_path, files=files)
    put(tier, 1)

    def fail() -> None:
        raise OSError(errno.EIO, "injected")

    files.after("close", fail, skip=number)
    tier.close()
    assert files.has_happened
    assert open_files() == before
    with closing(disk(tmp_path)) as heir:
        assert right(heir, 1)


def test_without_a_thread_there_is_no_answer_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine out of threads must not stop whoever asks, nor for ever."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watch = Watch(lambda: 7, "watch")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert watch.read(5.0) is None
    assert watch.read(5.0) == 7
    watch.close()
