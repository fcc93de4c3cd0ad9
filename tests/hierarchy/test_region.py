"""The shared region: who sees what, who waits for whom, and what is refused."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from region_process import MIB, config, join, participants, shared_memory

from undercroft.errors import Bug, ConfigError, KvError, TierClosed
from undercroft.hierarchy import region_entry
from undercroft.hierarchy.region_control import RING_SLOTS, Control, RegionShape
from undercroft.hierarchy.region_entry import Entrance


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


def test_two_ranks_and_the_scheduler_share_bytes_and_leave_no_file(directory: Path) -> None:
    """Three processes see the same bytes; the file is private, and gone once all have joined."""
    wanted = config(directory, num_ranks=2, total_bytes=3 * MIB)
    with participants(3) as (first, second, scheduler):
        first.join(wanted, 0)
        (file,) = directory.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        second.join(wanted, 1)
        assert file.exists()
        scheduler.join(wanted, "scheduler")
        assert list(directory.iterdir()) == []
        for one in (scheduler, first, second):
            assert one.ask("wait", 60) == [[4096, 512], [8192, 512]]
            assert one.ask("ready") == 3 * MIB
        first.ask("write", 0, "from rank 0")
        second.ask("write", 3 * MIB - 11, "from rank 1")
        assert scheduler.ask("read", 0, 11) == "from rank 0"
        assert first.ask("read", 3 * MIB - 11, 11) == "from rank 1"
        assert scheduler.ask("wait", 0) is not None  # proven once, whatever was stored since


def test_one_process_may_hold_both_roles_engine_after_engine(directory: Path) -> None:
    """In-process engines with one engine_id follow each other, with failed starts in between."""
    wanted = config(directory)
    for text in (b"first", b"again"):
        rank = join(wanted, 0)
        scheduler = join(wanted, "scheduler")
        scheduler.wait_joined(60)
        rank.wait_joined(60)
        rank.buffer[:5] = text
        assert bytes(scheduler.buffer[:5]) == text
        rank.close()
        scheduler.close()

        failed = join(wanted, 0)
        failed.close()
        assert list(directory.iterdir()) == []

        lost: Any = join(wanted, 0)
        lost.cycle = lost  # only the collector finds it
        del lost
    rank = join(wanted, 0)
    rank.close()


def test_a_collected_region_gives_its_seat_and_file_back(directory: Path) -> None:
    """A region dropped without `close` keeps no lock and no file."""
    region = join(config(directory), 0)
    del region
    gc.collect()
    assert list(directory.iterdir()) == []


def test_the_buffer_is_page_aligned_writable_and_of_the_exact_length(directory: Path) -> None:
    """`buffer` is uint8, exactly `total_bytes` long, and starts on a page."""
    region = join(config(directory, total_bytes=10_001), 0)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    assert array.shape == (10_001,)
    assert array.flags.writeable
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert region.ready_bytes() == 10_001
    region.close()
    array[:] = 7  # views outlive the region
    assert int(array.sum()) == 7 * 10_001


def test_close_twice_and_use_after_close(directory: Path) -> None:
    """`close` is idempotent; afterwards nothing is ready and verbs say so."""
    region = join(config(directory), 0)
    region.close()
    region.close()
    assert region.ready_bytes() == 0
    with pytest.raises(TierClosed):
        region.report_failed_store(1)
    with pytest.raises(TierClosed):
        region.wait_joined(0)


def test_the_scheduler_names_the_ranks_that_are_missing(directory: Path) -> None:
    """A scheduler without its ranks gives up at the deadline, saying which."""
    wanted = config(directory, num_ranks=3)
    with pytest.raises(KvError, match="no rank has joined; ranks join before the scheduler"):
        join(wanted, "scheduler", 0.1)
    rank = join(wanted, 1)
    with pytest.raises(KvError, match="rank 0, rank 2 did not join"):
        join(wanted, "scheduler", 0.1)
    with pytest.raises(KvError, match="rank 0, rank 2, the scheduler did not join in time"):
        rank.wait_joined(0.1)
    rank.close()


def test_a_rank_that_died_while_others_wait_is_named(directory: Path) -> None:
    """Waiting for an engine that can never be complete ends at once."""
    wanted = config(directory, num_ranks=2)
    rank = join(wanted, 0)
    with participants(1) as (other,):
        other.join(wanted, 1)
        other.kill()
        with pytest.raises(KvError, match="rank 1 died before everybody had joined"):
            rank.wait_joined(60)
    rank.close()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"total_bytes": 2 * MIB}, f"total_bytes {MIB} there, {2 * MIB} here"),
        ({"identity": b"two"}, f"configuration {b'one'.hex()} there, {b'two'.hex()} here"),
        ({"num_ranks": 2}, "ranks 1 there, 2 here"),
        ({"version": "0.4.0"}, r"version 0\.3\.0 there, 0\.4\.0 here; .*version of undercroft"),
        ({"version": ""}, r"version 0\.3\.0 there, unknown here"),
    ],
)
def test_participants_that_disagree_are_told_both_sides(
    directory: Path, other: dict[str, Any], named: str
) -> None:
    """A different size, configuration or version refuses the start and names both values."""
    rank = join(config(directory), 0)
    with pytest.raises(ConfigError, match=named):
        join(config(directory, **other), "scheduler")
    scheduler = join(config(directory), "scheduler")  # the right one still can
    scheduler.wait_joined(60)
    scheduler.close()
    rank.close()


@pytest.mark.parametrize(
    ("wanted", "role", "named"),
    [
        ({"total_bytes": 0}, 0, "total_bytes is 0"),
        ({"num_ranks": 0}, "scheduler", "num_ranks is 0"),
        ({"identity": b""}, 0, "length of identity is 0"),
        ({"identity": b"x" * 65}, 0, "length of identity is 65"),
        ({"version": "x" * 65}, 0, "length of version is 65"),
        ({}, 1, "rank 1 of 1 ranks"),
    ],
)
def test_impossible_values_are_refused(
    directory: Path, wanted: dict[str, Any], role: Any, named: str
) -> None:
    """A value out of range is named with its limits, and no file appears."""
    with pytest.raises(ConfigError, match=named):
        join(config(directory, **wanted), role)


def test_a_size_beyond_the_directory_is_refused_with_both_numbers(directory: Path) -> None:
    """More bytes than shared memory has free are refused at start, leaving nothing."""
    free = shutil.disk_usage(directory).free
    with pytest.raises(ConfigError, match=r"needs \d+ bytes, but .* has \d+ free of \d+"):
        join(config(directory, total_bytes=free + MIB), 0)
    assert list(directory.iterdir()) == []


def test_a_missing_directory_and_a_strangers_file_are_refused(directory: Path) -> None:
    """What is not a private file of this user is neither used nor removed."""
    with pytest.raises(ConfigError, match="no directory"):
        join(config(directory / "none"), 0)
    rank = join(config(directory), 0)
    (file,) = directory.iterdir()
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="not a private file of this user"):
        join(config(directory), "scheduler")
    rank.close()
    file.symlink_to(directory / "elsewhere")
    with pytest.raises(ConfigError, match="cannot open"):
        join(config(directory), 0)
    file.unlink()


def test_a_mapping_of_other_bytes_is_found_before_the_first_store(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A participant whose mapping is not the file's bytes is refused (a private copy of them)."""
    rank = join(config(directory), 0)

    class Private:
        MADV_HUGEPAGE = mmap.MADV_HUGEPAGE

        @staticmethod
        def mmap(fd: int, length: int) -> mmap.mmap:
            return mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE)

    monkeypatch.setattr(region_entry, "mmap", Private)
    scheduler = join(config(directory), "scheduler")
    with pytest.raises(KvError, match=r"the scheduler and .* do not see the same bytes"):
        scheduler.wait_joined(60)
    scheduler.close()
    rank.close()


@pytest.mark.parametrize("area", ["body_offset", "proof_offset", "records_offset"])
def test_each_proof_counts(directory: Path, area: str) -> None:
    """One changed byte of a nonce, in the body, past it or in the record, fails the proof."""
    wanted = config(directory)
    rank = join(wanted, 0)
    offset = getattr(wanted.shape, area)
    rank._mapping[offset] ^= 1
    scheduler = join(wanted, "scheduler")
    with pytest.raises(KvError, match="do not see the same bytes"):
        scheduler.wait_joined(60)
    rank._mapping[offset] ^= 1
    scheduler.wait_joined(60)
    rank.wait_joined(60)
    scheduler.close()
    rank.close()


def test_a_rank_proves_after_others_have_stored(directory: Path) -> None:
    """A rank that first waits when the body is already in use is not misled by stored bytes."""
    rank, scheduler = join(config(directory), 0), join(config(directory), "scheduler")
    scheduler.wait_joined(60)
    scheduler.buffer[:4096] = bytes(4096)
    rank.wait_joined(60)
    scheduler.close()
    rank.close()


def test_failed_stores_reach_the_scheduler_from_every_rank(directory: Path) -> None:
    """Reports of two processes arrive once each; nothing new is an empty set."""
    wanted = config(directory, num_ranks=2)
    with participants(2) as (first, second):
        first.join(wanted, 0)
        second.join(wanted, 1)
        scheduler = join(wanted, "scheduler")
        scheduler.wait_joined(60)
        assert scheduler.take_failed_stores() == frozenset()
        first.ask("report", [1, (1 << 64) - 1])
        second.ask("report", [0, 1])
        assert scheduler.take_failed_stores() == {0, 1, (1 << 64) - 1}
        assert scheduler.take_failed_stores() == frozenset()
        second.ask("report", [7])
        assert scheduler.take_failed_stores() == {7}
        scheduler.close()
        assert scheduler.take_failed_stores() == frozenset()


@pytest.mark.parametrize("count", [RING_SLOTS - 1, RING_SLOTS, RING_SLOTS + 1, 3 * RING_SLOTS])
def test_a_ring_that_overflows_says_so_once(directory: Path, count: int) -> None:
    """Up to the ring's length all arrive; from there the answer is None, then it works again."""
    rank, scheduler = join(config(directory), 0), join(config(directory), "scheduler")
    rank.report_failed_store(5)
    assert scheduler.take_failed_stores() == {5}
    for store_id in range(count):
        rank.report_failed_store(store_id)
    expected = frozenset(range(count)) if count < RING_SLOTS else None
    assert scheduler.take_failed_stores() == expected
    assert scheduler.take_failed_stores() == frozenset()
    rank.report_failed_store(9)
    assert scheduler.take_failed_stores() == {9}
    scheduler.close()
    rank.close()


def test_reports_while_the_scheduler_takes_are_neither_lost_nor_invented(directory: Path) -> None:
    """Under a concurrent writer every report arrives exactly once, or an overflow is declared."""
    rank, scheduler = join(config(directory), 0), join(config(directory), "scheduler")
    total = 30_000
    writer = threading.Thread(
        target=lambda: [rank.report_failed_store(store_id) for store_id in range(total)]
    )
    writer.start()
    seen: set[int] = set()
    num_lost = 0
    while writer.is_alive() or rank._control.counters_image() != scheduler._seen_image:
        failed = scheduler.take_failed_stores()
        if failed is None:
            num_lost += 1
            continue
        assert not failed & seen
        seen |= failed
    writer.join()
    assert seen <= set(range(total))
    assert num_lost or len(seen) == total
    scheduler.close()
    rank.close()


def test_ranks_say_something_of_themselves_to_all(directory: Path) -> None:
    """Whole or not at all: a rank's note is read by everybody once all have joined."""
    wanted, longest = config(directory, num_ranks=2), bytes(range(256)) * 31
    with pytest.raises(ConfigError, match="length of a rank's note is 8185"):
        join(wanted, 0, note=bytes(8185))
    first, second = join(wanted, 0, note=longest), join(wanted, 1, note=b"")
    with pytest.raises(Bug, match="before wait_joined"):
        first.notes()
    scheduler = join(wanted, "scheduler")
    for region in (scheduler, first, second):
        region.wait_joined(60)
        assert region.notes() == (longest, b"")
        region.close()
        with pytest.raises(TierClosed):
            region.notes()


def test_an_entry_that_is_not_visible_yet_counts_as_unknown() -> None:
    """A counter seen before its entry (weakly ordered memory) never yields a wrong store."""
    shape = RegionShape(1, 4096)
    with mmap.mmap(-1, shape.file_bytes) as mapping:
        control = Control(mapping, shape)
        control.push_failure(0, 41)
        control._words[control._entry(0, 0)] = 42
        assert control.read_failures(0, 0) == (1, None)
        control.release()


def test_only_ranks_report_and_only_the_scheduler_takes(directory: Path) -> None:
    """Calls of the wrong role are bugs, not silence."""
    rank, scheduler = join(config(directory), 0), join(config(directory), "scheduler")
    for call in (
        lambda: scheduler.report_failed_store(1),
        lambda: rank.report_failed_store(-1),
        rank.take_failed_stores,
        scheduler.chunk_bytes,
    ):
        with pytest.raises(Bug):
            call()
    scheduler.close()
    rank.close()


def test_an_error_inside_leaves_no_lock_and_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails while the region is made, the next try succeeds."""
    for victim in ("_make", "_map"):
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> None:
                raise OSError(12, os.strerror(12))

            patch.setattr(Entrance, victim, fail)
            with pytest.raises(ConfigError, match="Cannot allocate memory"):
                join(config(directory), 0)
        assert list(directory.iterdir()) == []
        join(config(directory), 0).close()


def test_import_has_no_side_effect() -> None:
    """Importing starts no thread and opens no file."""
    code = (
        "import os, threading; before = sorted(os.listdir('/proc/self/fd'));"
        "import undercroft.hierarchy.region;"
        "assert threading.active_count() == 1;"
        "assert sorted(os.listdir('/proc/self/fd')) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
