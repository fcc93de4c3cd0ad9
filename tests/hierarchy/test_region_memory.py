"""The region's memory: pages before touches, growth, a full file system, and the bound."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from region_process import MIB, config, join, participants, shared_memory

from undercroft.errors import ConfigError
from undercroft.hierarchy import region_entry
from undercroft.hierarchy.region_control import RegionShape


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


class Gate:
    """Stands in for `posix_fallocate`: lets body pieces through one by one, then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, body_offset: int) -> None:
        self._real = os.posix_fallocate
        self._body = range(body_offset, 1 << 62)
        self.permits = threading.Semaphore(0)
        self.error: int | None = None
        self.from_bytes = 0  # of the body, from where the gate works
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, fd: int, offset: int, length: int) -> None:
        is_tail = os.fstat(fd).st_size == offset + length and length <= 4096
        if offset in self._body and not is_tail and offset - self._body.start >= self.from_bytes:
            self.permits.acquire()
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
        self._real(fd, offset, length)


def _until(condition: object, limit_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_entry, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(region_entry, "_FIRST_BYTES", 2 * MIB)


@pytest.mark.usefixtures("small_pieces")
def test_ready_bytes_grow_piece_by_piece_for_everybody(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creator's part is there at once; the rest appears as its pages do, in all mappings."""
    wanted = config(directory, total_bytes=4 * MIB + 100)
    gate = Gate(monkeypatch, wanted.shape.body_offset)
    gate.from_bytes = 2 * MIB
    with participants(1) as (other,):
        rank = join(config(directory, num_ranks=2, total_bytes=4 * MIB + 100), 0)
        other.join(config(directory, num_ranks=2, total_bytes=4 * MIB + 100), 1)
        assert rank.ready_bytes() == 2 * MIB
        scheduler = join(config(directory, num_ranks=2, total_bytes=4 * MIB + 100), "scheduler")
        for expected in (3 * MIB, 4 * MIB, 4 * MIB + 100):
            assert scheduler.ready_bytes() < expected
            gate.permits.release()
            _until(lambda expected=expected: rank.ready_bytes() == expected)
            assert other.ask("ready") == scheduler.ready_bytes() == expected
        scheduler.close()
        rank.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_full_file_system_stops_the_growth_with_one_warning(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOSPC in the middle: what is ready stays usable, one line says how much."""
    wanted = config(directory, total_bytes=8 * MIB)
    gate = Gate(monkeypatch, wanted.shape.body_offset)
    gate.from_bytes = 3 * MIB
    gate.error = errno.ENOSPC
    gate.permits.release(100)
    rank, scheduler = join(wanted, 0), join(wanted, "scheduler")
    assert scheduler._growth is not None
    _until(lambda: not scheduler._growth._thread.is_alive())
    assert rank.ready_bytes() == scheduler.ready_bytes() == 3 * MIB
    scheduler.wait_joined(60)
    scheduler.buffer[: 3 * MIB] = b"x" * (3 * MIB)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"stays at {3 * MIB} of {8 * MIB} bytes: No space left" in record.getMessage()
    scheduler.close()
    rank.close()


@pytest.mark.usefixtures("small_pieces")
def test_no_memory_at_all_refuses_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the first piece: a configuration error, and no file."""
    wanted = config(directory, total_bytes=8 * MIB)
    gate = Gate(monkeypatch, wanted.shape.body_offset)
    gate.error = errno.ENOSPC
    gate.permits.release(100)
    with pytest.raises(ConfigError, match=r"no memory for .*No space left"):
        join(wanted, 0)
    assert list(directory.iterdir()) == []


@pytest.mark.usefixtures("small_pieces")
def test_close_stops_the_growth_within_a_second(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` ends the thread after its piece, and waits at most 1 s for a piece that hangs."""
    wanted = config(directory, total_bytes=64 * MIB)
    gate = Gate(monkeypatch, wanted.shape.body_offset)
    gate.from_bytes = 2 * MIB
    rank, scheduler = join(wanted, 0), join(wanted, "scheduler")
    assert scheduler._growth is not None
    thread = scheduler._growth._thread
    started = time.monotonic()
    scheduler.close()
    assert 0.9 < time.monotonic() - started < 10
    assert thread.is_alive()
    gate.permits.release()
    thread.join(60)
    assert not thread.is_alive()
    assert rank.ready_bytes() == 3 * MIB  # one piece, and no other after the close
    rank.close()


def test_without_growth_there_is_no_thread(directory: Path) -> None:
    """A region that is whole from the start, and every rank, runs no thread."""
    before = set(threading.enumerate())
    rank, scheduler = join(config(directory), 0), join(config(directory), "scheduler")
    assert set(threading.enumerate()) <= before
    scheduler.close()
    rank.close()


def test_memory_stays_within_five_percent_of_the_configured_bytes() -> None:
    """File system, shared and private memory of each process grow by <= 1.05x, all touched."""
    total_bytes = 320 * MIB  # more than the creator's first part
    with shared_memory() as directory, participants(2) as (rank, scheduler):
        wanted = config(directory, total_bytes=total_bytes)
        before = [one.ask("memory") for one in (rank, scheduler)]
        rank.join(wanted, 0)
        scheduler.join(wanted, "scheduler")
        _until(lambda: scheduler.ask("ready") == total_bytes, 60)
        assert total_bytes <= rank.ask("file_bytes") <= 1.05 * total_bytes
        scheduler.ask("fill")
        rank.ask("fill")
        assert rank.ask("file_bytes") <= 1.05 * total_bytes
        assert list(directory.iterdir()) == []
        for one, earlier in zip((rank, scheduler), before, strict=True):
            now = one.ask("memory")
            assert now["RssShmem"] - earlier["RssShmem"] >= total_bytes
            growth = sum(now.values()) - sum(earlier.values())
            assert growth <= 1.05 * total_bytes, growth


def test_the_control_area_is_small() -> None:
    """Control and nonces cost less than 5 % for any plausible size, and parts do not overlap."""
    for num_ranks, total_bytes in ((1, MIB), (8, 16 * MIB), (256, 256 * MIB)):
        shape = RegionShape(num_ranks, total_bytes)
        assert shape.needed_bytes <= 1.05 * total_bytes
        starts = [
            shape.counters_offset,
            shape.records_offset,
            shape.rings_offset,
            shape.control_bytes,
            shape.body_offset + 1,
            shape.proof_offset,
            shape.file_bytes,
        ]
        assert starts == sorted(starts)
        assert shape.body_offset % (2 * MIB) == 0


_ON_A_SMALL_FILE_SYSTEM = """
import logging, shutil, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from region_process import MIB, config, join
from undercroft.errors import ConfigError
from undercroft.hierarchy import region_entry

region_entry._PIECE_BYTES, region_entry._FIRST_BYTES = MIB, 4 * MIB
logging.basicConfig(stream=sys.stdout, format="%(message)s")
directory = Path(sys.argv[1])
try:
    join(config(directory, total_bytes=64 * MIB), 0)
    sys.exit("not refused")
except ConfigError as error:
    print(error)
wanted = config(directory, total_bytes=12 * MIB)
rank = join(wanted, 0)
(directory / "hog").write_bytes(bytes(6 * MIB))
scheduler = join(wanted, "scheduler")
scheduler.wait_joined(60)
scheduler._growth._thread.join(10)
ready = scheduler.ready_bytes()
scheduler.buffer[:ready] = b"x" * ready  # a page that does not exist would be SIGBUS
print("touched", ready // MIB)
rank.close(), scheduler.close()
"""


def test_on_a_real_full_file_system_nothing_is_touched_that_is_not_there(tmp_path: Path) -> None:
    """A 16 MiB tmpfs that somebody else fills: both numbers, then a shorter region, no SIGBUS."""
    unshare = shutil.which("unshare")
    namespaces = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    trial = [*namespaces, "true"]
    if unshare is None or subprocess.run(trial, check=False, capture_output=True).returncode:
        pytest.skip("this kernel lets this user mount no file system of its own")
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(_ON_A_SMALL_FILE_SYSTEM))
    place = tmp_path / "shm"
    place.mkdir()
    shell = 'mount -t tmpfs -o size=16m none "$1" && exec "$2" "$3" "$1" "$4"'
    command = [*namespaces, "sh", "-c", shell, "sh", place, sys.executable, script]
    done = subprocess.run(
        [*command, Path(__file__).parent],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "free of 16777216" in done.stdout
    assert "No space left" in done.stdout
    touched = int(done.stdout.rsplit("touched", 1)[1])
    assert 7 <= touched <= 10
