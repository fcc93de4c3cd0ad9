"""Recorded files: each a trace, all of them together bounded, and no disk can fail anybody."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.traces.plain import Plain, read

from undercroft.testing.clock import ManualClock
from undercroft.traces import parts as module
from undercroft.traces.parts import NUM_PARTS, Parts, Recorded

MIB = 1 << 20


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    """No file stays open."""
    yield
    while RECORDINGS:
        RECORDINGS.pop().parts.close()


RECORDINGS: list[Recording] = []


class Recording:
    """Parts, their clock and their counts."""

    def __init__(self, folder: Path, max_bytes: int = MIB) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.results = Counter(written=0, not_written=0)
        self.parts = Parts(
            folder,
            max_bytes=max_bytes,
            block_tokens=128,
            clock=self.clock,
            results=self.results,
            kinds="what it means",
        )
        self.number = 0
        self.rng = random.Random(5)
        RECORDINGS.append(self)

    def add(self, *path: int, output_tokens: int = 5, **more: Any) -> None:
        keys = [b"key" + bytes(path[: end + 1]) for end in range(len(path))]
        self.number += 1
        input_tokens = 128 * len(path) + 7
        self.parts.add(Recorded(self.clock.now_s(), input_tokens, output_tokens, keys, **more))

    def add_many(self, count: int) -> None:
        """Requests that compress badly."""
        for _ in range(count):
            path = [self.rng.randrange(9) for _ in range(self.rng.randrange(4))]
            self.add(*path, output_tokens=self.rng.randrange(10**40))

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("trace-*.jsonl.gz"), key=lambda p: p.stat().st_mtime_ns)

    def all_read(self) -> list[Plain]:
        return [read(path) for path in self.files()]

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())


def test_a_file_holds_what_was_added(tmp_path: Path) -> None:
    """Times from its first request on, prefixes by number, and who may read it."""
    it = Recording(tmp_path / "new" / "folder")
    it.add(1, 2, 3, session=b"anna", kind=1)
    it.clock.advance(1.5)
    it.add(1, 2, 4, session=b"bert")
    it.add(1, 2, 3, 5, session=b"anna", kind=2)
    assert not it.files() or not it.all_read()[0].lines
    it.parts.close()
    (found,) = it.all_read()
    assert found.lines == [
        {"t": 0, "in": 391, "out": 5, "p": -1, "n": 3, "s": 0, "k": 1},
        {"t": 1500, "in": 391, "out": 5, "p": 1, "n": 1, "s": 1},
        {"t": 1500, "in": 519, "out": 5, "p": 2, "n": 1, "s": 0, "k": 2},
    ]
    assert found.header["k"] == "what it means"
    assert found.header["requests"] == 3
    (path,) = it.files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(it.folder.stat().st_mode) == 0o700
    assert it.results == {"written": 3, "not_written": 0}


def test_lines_are_in_the_file_within_half_a_minute(tmp_path: Path) -> None:
    """Whoever kills the engine loses no more."""
    it = Recording(tmp_path)
    it.add(1)
    it.parts.tick()
    assert it.all_read()[0].lines == []
    it.clock.advance(30)
    it.parts.tick()
    assert len(it.all_read()[0].lines) == 1
    assert "requests" not in it.all_read()[0].header


def test_the_folder_is_bounded_and_each_file_is_a_trace(tmp_path: Path) -> None:
    """The oldest go; what one file knew is new in the next; strangers' files stay."""
    tmp_path.joinpath("trace-mine.jsonl.gz").write_bytes(b"x" * 5000)
    tmp_path.joinpath("notes.txt").write_bytes(b"y")
    it = Recording(tmp_path)
    seen: set[Path] = set()
    for _ in range(220):
        it.add_many(300)
        ours = set(it.files()) - {tmp_path / "trace-mine.jsonl.gz"}
        seen |= ours
        assert sum(path.stat().st_size for path in ours) <= MIB
        assert all(path.stat().st_size <= MIB // NUM_PARTS for path in ours)
    it.parts.close()
    tmp_path.joinpath("trace-mine.jsonl.gz").unlink()
    assert len(seen) > NUM_PARTS
    left = it.all_read()
    assert NUM_PARTS - 1 <= len(left) <= NUM_PARTS
    assert all(each.lines[0]["p"] == -1 and each.lines[0]["t"] == 0 for each in left)
    assert all("lost" not in line for each in left for line in each.lines)
    assert tmp_path.joinpath("notes.txt").exists()
    assert it.results["written"] == it.number == 66_000
    # After a restart the bound is the same, and old files count.
    again = Recording(tmp_path)
    again.add_many(3000)
    again.parts.close()
    assert again.num_bytes() <= MIB


def test_files_of_a_dead_engine_are_removed_and_a_living_ones_are_not(tmp_path: Path) -> None:
    """A part in the making is locked by who makes it."""
    mine, yours = Recording(tmp_path), Recording(tmp_path)
    yours.add(1)
    (held,) = yours.files()
    mine.add_many(66_000)
    assert held.exists()
    assert mine.results["not_written"] == 0
    yours.parts.close()
    mine.add_many(66_000)
    assert not held.exists()
    mine.parts.close()


def test_engines_that_fill_a_folder_leave_no_room_for_one_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound is for all: who comes too many writes nothing, and says so."""
    others = [Recording(tmp_path) for _ in range(NUM_PARTS)]
    for other in others:
        other.add(1)
    assert len(others[0].files()) == NUM_PARTS
    late = Recording(tmp_path)
    late.add(1)
    assert late.results == {"written": 0, "not_written": 1}
    assert "other engines write as much as record_max_bytes" in caplog.text
    others[0].parts.close()
    late.clock.advance(30)
    late.add(1)
    late.parts.close()
    assert late.results == {"written": 1, "not_written": 1}
    assert read(late.files()[-1]).lines[0]["lost"] == 1
    for other in others:
        other.parts.close()


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> Iterator[None]:
    """Files take so many bytes each, then none."""

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            room = num_bytes - self.tell()
            if room <= 0:
                raise OSError(28, "No space left on device")
            return super().write(data[:room])

    with monkeypatch.context() as patch:
        patch.setattr(module.io, "FileIO", Full)
        yield


def test_a_full_disk_costs_lines_and_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request is written or counted; what follows a gap says how many it lacks."""
    it = Recording(tmp_path)
    with full_disk(monkeypatch, 60_000):
        it.add_many(20_000)
    (half,) = it.all_read()
    assert 1000 < len(half.lines) < 20_000
    assert it.files()[0].stat().st_size < 60_000
    assert it.results["written"] == len(half.lines)
    assert it.results.total() == 20_000
    assert len(caplog.records) == 1
    it.clock.advance(30)
    it.add_many(100)
    it.parts.close()
    first, second = it.all_read()
    assert second.lines[0]["lost"] == 20_000 - len(first.lines)
    assert it.results == {"written": len(first.lines) + 100, "not_written": second.num_lost}


def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a header: no file is left behind, and one line is in the log."""
    it = Recording(tmp_path)
    with full_disk(monkeypatch, 10):
        for _ in range(100):
            it.add(1)
    assert it.files() == []
    assert it.results == {"written": 0, "not_written": 100}
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_folder_that_goes_away_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written into a file that nobody can find any more, and none is made elsewhere."""
    it = Recording(tmp_path / "t")
    it.add(1)
    shutil.rmtree(tmp_path / "t")
    it.clock.advance(30)
    it.parts.tick()
    assert it.results["not_written"] == 1
    assert "the file was removed" in caplog.text
    it.add(2)
    it.clock.advance(30)
    it.add(3)  # the folder is not ours to make again: it may be a mount that is gone
    assert not (tmp_path / "t").exists()
    assert it.results["not_written"] == 3
    (tmp_path / "t").mkdir()
    it.clock.advance(30)
    it.add(1)
    it.parts.close()
    (found,) = it.all_read()
    assert [line["lost"] for line in found.lines] == [3]


@pytest.mark.parametrize("what", ["a file", "no right"])
def test_a_place_that_cannot_be_written_to(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and the requests are counted."""
    folder = tmp_path / "t"
    if what == "a file":
        folder.write_text("x")
    else:
        folder.symlink_to("/proc/self/nowhere")
    it = Recording(folder)
    for _ in range(5):
        it.add(1)
    it.parts.tick()
    it.parts.close()
    assert it.results == {"written": 0, "not_written": 5}
    assert len(caplog.records) == 1


def test_a_gap_at_the_end_is_in_the_totals(tmp_path: Path) -> None:
    """No line follows that could say it."""
    it = Recording(tmp_path)
    it.add(1)
    it.parts.lose(4)
    it.add(1)
    it.parts.lose(3)
    it.parts.close()
    (found,) = it.all_read()
    assert [line.get("lost") for line in found.lines] == [None, 4]
    assert found.header["lost"] == 7


def test_a_part_ends_when_its_numbers_are_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one begins anew; what exceeds a whole part is left out."""
    monkeypatch.setattr(module, "_MAX_PREFIXES", 8)
    it = Recording(tmp_path)
    it.add(*range(5))
    it.add(1, 2, 3)
    it.add(1, 2, 4)  # the ninth
    it.add(*range(9))
    it.add(1, 2, 3)
    it.parts.close()
    found = it.all_read()
    assert [each.blocks for each in found] == [
        [[0, 1, 2, 3, 4], [5, 6, 7]],
        [[0, 1, 2]],
        [[0, 1, 2]],
    ]
    assert found[2].lines[0]["lost"] == 1
    assert it.results == {"written": 4, "not_written": 1}


def test_two_engines_that_open_at_once(tmp_path: Path) -> None:
    """One waits for the other for a moment; if that hangs, it tries again later."""
    it = Recording(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    it.clock.sleep = lambda seconds: os.close(fd)  # type: ignore[method-assign] # it is done
    it.add(1)
    assert len(it.files()) == 1
    it.parts.close()
