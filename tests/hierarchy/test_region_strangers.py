"""What others put into shared memory: files that are not ours, and lengths that are not true."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from region_process import MIB, config, join, shared_memory

from undercroft.errors import ConfigError, CorruptChunk
from undercroft.hierarchy.region_control import MAX_GROUPS, MAX_NOTE_BYTES, Header, RegionShape


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


def _name(directory: Path) -> Path:
    rank = join(config(directory), 0)
    (file,) = directory.iterdir()
    rank.close()
    assert not file.exists()
    return file


@pytest.mark.parametrize("kind", ["hard link", "pipe", "directory", "link"])
def test_what_lies_in_the_regions_place_is_refused_and_left(directory: Path, kind: str) -> None:
    """Neither used, nor waited for, nor removed, nor changed."""
    file, other = _name(directory), directory / "other"
    other.write_bytes(b"not ours")
    other.chmod(0o600)
    if kind == "hard link":
        os.link(other, file)
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(other)
    with pytest.raises(ConfigError, match=r"cannot open|not a private file"):
        join(config(directory), 0)
    assert other.read_bytes() == b"not ours"
    file.rmdir() if kind == "directory" else file.unlink()
    other.unlink()


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_the_regions_mode_does_not_depend_on_the_umask(directory: Path, umask: int) -> None:
    """Every process of the engine can open it, nobody else can."""
    old = os.umask(umask)
    try:
        rank = join(config(directory), 0)
    finally:
        os.umask(old)
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    rank.close()


def test_lengths_in_the_control_area_are_judged(directory: Path) -> None:
    """A rank that says more than there is room for is named; nothing of that size is copied."""
    rank = join(config(directory, total_bytes=64 * MIB), 0, note=b"a note")
    (file,) = directory.iterdir()
    scheduler = join(config(directory, total_bytes=64 * MIB), "scheduler")
    assert not file.exists()
    scheduler.wait_joined(10)
    assert scheduler.notes() == (b"a note",)
    shape = RegionShape(1, 64 * MIB)
    words = scheduler._control._words
    tracemalloc.start()
    for length in (MAX_NOTE_BYTES + 1, 1 << 25, 1 << 60, (1 << 64) - 1):
        words[shape.notes_offset // 8] = length
        with pytest.raises(CorruptChunk, match=f"rank 0 says {length} bytes"):
            scheduler.notes()
    for count in (MAX_GROUPS + 1, 1 << 60):
        words[shape.records_offset // 8 + 5] = count
        with pytest.raises(CorruptChunk, match=f"rank 0 says {count} groups"):
            scheduler.chunk_bytes()
    words[4] = 1 << 60
    assert scheduler.ready_bytes() == 64 * MIB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB
    rank.close()
    scheduler.close()


def test_a_header_longer_than_a_page_is_read_as_one() -> None:
    """Whatever a read brings beyond the header is not looked at."""
    magic = int.from_bytes(b"ucroft\x00\x03", "little")
    page = struct.pack("<QQQQ", magic, 2, 1 << 60, 4).ljust(64, b"\0") + b"same"
    header = Header.parse(page.ljust(4096, b"\0") + b"odd")
    assert header is not None
    said = header.difference(RegionShape(2, 8), b"same", header.version)
    assert said == f"total_bytes {1 << 60} there, 8 here"
