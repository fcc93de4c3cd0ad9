"""Sizes, counts and numbers on disk are judged before memory is taken or arithmetic is done."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.fuzz.patches import sealed_epoch, sealed_index, sealed_rows

from undercroft.clock import SystemClock
from undercroft.errors import ConfigError, CorruptChunk
from undercroft.keys import Namespace
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.epoch import MAX_EPOCH, parse_epoch
from undercroft.tiers.disk.fsck import Fsck, Kind
from undercroft.tiers.disk.manifest import MAX_MANIFEST_BYTES, parse_manifest
from undercroft.tiers.disk.table import MAX_SLOTS, parse_entries, parse_header
from undercroft.tiers.disk.usage import Wanted

from .stores import CAPACITY, fill, held, look
from .support import NAMESPACE, disk, files, put, right

MIB = 1 << 20
TIB = 1 << 40
RECORD_BYTES_AT, NUM_SLOTS_AT = 16, 24
EPOCH_AT, SEQUENCE_AT, PAYLOAD_AT = 9 * 8, 10 * 8, 11 * 8


@contextmanager
def little_memory(most_bytes: int = 16 * MIB) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_bytes, f"{peak} bytes at once"


@pytest.fixture
def store(memory_path: Path) -> Path:
    fill(memory_path, range(4))
    return memory_path


def change(path: Path, at: int, value: int, size: int = 8) -> None:
    """A number in an index, with good checksums."""
    data = bytearray(path.read_bytes())
    data[at : at + size] = value.to_bytes(size, "little")
    path.write_bytes(sealed_index(bytes(data)))


def opens_and_works(store: Path) -> None:
    with little_memory():
        tier = disk(store, capacity_bytes=CAPACITY)
        for number in range(4):
            right(tier, number)
        put(tier, 9)
        assert right(tier, 9)
        tier.close()
        report = Fsck(catalog := Catalog(str(store), SystemClock())).check(catalog.look())
    assert report.num_chunks >= 1


@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES + 1, TIB])
def test_a_manifest_of_any_size_is_written_anew(store: Path, size: int) -> None:
    """A sparse file costs nothing to make, and memory to read."""
    (manifest,) = files(store, "manifest.json")
    os.truncate(manifest, size)
    with little_memory():
        (namespace,) = look(store).namespaces
    assert "more than" in namespace.problem
    opens_and_works(store)
    assert manifest.stat().st_size < 4096


def test_an_index_of_a_tebibyte_is_cut(store: Path) -> None:
    """With a good header."""
    for index in files(store, ".index"):
        os.truncate(index, TIB)
    opens_and_works(store)


def test_an_index_of_a_tebibyte_without_a_header_is_removed(store: Path) -> None:
    """What it held is noted as lost, from as much of it as there can be; also for the epoch."""
    for index in files(store, ".index"):
        with index.open("r+b") as file:
            file.write(bytes(512))
        os.truncate(index, TIB)
    files(store, "epoch")[0].unlink()
    opens_and_works(store)


@pytest.mark.parametrize("value", [1 << 60, (1 << 64) - 1, MAX_SLOTS + 1, MAX_SLOTS, 1 << 33])
@pytest.mark.parametrize("at", [NUM_SLOTS_AT, RECORD_BYTES_AT])
def test_a_header_that_says_any_geometry_takes_no_memory(store: Path, at: int, value: int) -> None:
    """With a good checksum, and slab and index of sizes to match where that is possible."""
    (index,), (slab,) = files(store, ".index"), files(store, ".slab")
    change(index, at, value // 4096 * 4096 if at == RECORD_BYTES_AT else value)
    os.truncate(index, min(value * 128 + 4096, 8 * TIB))
    os.truncate(slab, 8 * TIB)
    opens_and_works(store)


def test_a_followed_header_that_says_any_geometry_takes_no_memory(store: Path) -> None:
    """Its owner lives, so that it is followed rather than adopted."""
    with held(store, 10, 14):
        tier = disk(store, capacity_bytes=CAPACITY)
        assert right(tier, 10)
        (index,) = files(store, ".index")
        before = index.read_bytes()
        with little_memory():
            change(index, NUM_SLOTS_AT, MAX_SLOTS)
            tier.refresh()
            other = disk(store, capacity_bytes=CAPACITY)
            assert not right(other, 10)
            other.close()
        index.write_bytes(before)
        tier.close()


def test_a_ring_item_beyond_the_table_is_a_lost_one(store: Path) -> None:
    """Items carry no check: a flipped bit in one names any slot; the table is read instead."""
    with held(store, 10, 14):
        tier = disk(store, capacity_bytes=CAPACITY)
        assert right(tier, 10)
        (index,) = files(store, ".index")
        page = index.read_bytes()[:4096]
        items = struct.unpack_from("<448Q", page, 512)
        newest = max(item >> 32 for item in items)
        with index.open("r+b") as file:
            file.seek(512 + 8 * ((newest + 1) % 448))
            file.write(struct.pack("<Q", (newest + 1) << 32 | 0xFFFFFFF0))
        tier.refresh()
        assert right(tier, 11)
        tier.close()


def test_segments_stay_below_what_is_read() -> None:
    """What this release makes, it reads."""
    for capacity in (1 << 50, 1 << 60):
        assert Wanted(capacity, 1).target_slots(8192) == MAX_SLOTS


def test_a_header_beyond_the_limits_is_damaged(store: Path) -> None:
    """For the tools, too, which know no capacity."""
    page = files(store, ".index")[0].read_bytes()[:4096]
    for at, value in ((NUM_SLOTS_AT, MAX_SLOTS + 1), (RECORD_BYTES_AT, 1 << 37)):
        wrong = sealed_index(page[:at] + value.to_bytes(8, "little") + page[at + 8 :])
        with pytest.raises(CorruptChunk, match="slots of"):
            parse_header(wrong)


@pytest.mark.parametrize("epoch", [0, MAX_EPOCH + 1, (1 << 64) - 1])
def test_an_epoch_that_counting_never_reaches_is_damaged(store: Path, epoch: int) -> None:
    """One more than the largest number would not fit the file."""
    data = sealed_epoch(struct.pack("<8sQQ", b"UNDREPCH", epoch, 0))
    assert parse_epoch(data) is None
    files(store, "epoch")[0].write_bytes(data)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert not right(tier, 0)
    put(tier, 0)
    assert right(tier, 0)
    assert 1 <= tier.epoch() < 100
    assert tier.raise_epoch() > 0
    tier.close()


@pytest.mark.parametrize("at", [EPOCH_AT, SEQUENCE_AT, PAYLOAD_AT])
def test_an_entry_that_counting_never_reaches_is_damaged(store: Path, at: int) -> None:
    """The next epoch and sequence are one later than any: they must stay numbers that fit."""
    (index,) = files(store, ".index")
    for place in range(4096, index.stat().st_size, 128):
        if any(index.read_bytes()[place : place + 128]):
            change(index, place + at, (1 << 64) - 1)
    files(store, "epoch")[0].unlink()
    tier = disk(store, capacity_bytes=CAPACITY)
    assert tier.epoch() < 100
    put(tier, 1)
    assert right(tier, 1)
    assert sum(size for _, size in tier.evictable()) <= CAPACITY
    tier.close()


def test_an_entry_longer_than_its_slot_is_counted_as_its_slot(store: Path) -> None:
    """It fails to be read later; until then it must not upset what is in use."""
    (index,) = files(store, ".index")
    data = index.read_bytes()
    place = next(at for at in range(4096, len(data), 128) if any(data[at : at + 128]))
    change(index, place + PAYLOAD_AT, 1 << 35)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert max(size for _, size in tier.evictable()) == 4096
    tier.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"\xff",
        b'{"a": NaN}',
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":"' + b"x" * MAX_MANIFEST_BYTES + b'"}',
    ],
    ids=["empty", "list", "number", "bytes", "nan", "deep", "deeper", "deepest", "digits", "long"],
)
def test_what_is_no_manifest_is_damaged(store: Path, data: bytes) -> None:
    """And is written anew by the next engine."""
    with pytest.raises(CorruptChunk):
        parse_manifest(data)
    (manifest,) = files(store, "manifest.json")
    manifest.write_bytes(data)
    opens_and_works(store)
    assert parse_manifest(manifest.read_bytes()).id == NAMESPACE.id


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """The engine says so at its start, rather than never finding its chunks again."""
    deep: object = 1
    for _ in range(100):
        deep = {"a": deep}
    for manifest in ({"a": deep}, {"a": "x" * MAX_MANIFEST_BYTES}):
        with pytest.raises(ConfigError, match="cannot be stored"):
            disk(tmp_path, namespace=Namespace(manifest))


def test_a_difference_is_named_in_one_short_line(store: Path, caplog) -> None:
    """What an altered manifest says goes into a log: no line breaks, no megabytes."""
    (manifest,) = files(store, "manifest.json")
    altered = json.loads(manifest.read_text())
    altered["a\nb\x1b[31m"] = "y" * 100_000
    manifest.write_text(json.dumps(altered))
    disk(store, capacity_bytes=CAPACITY).close()
    (record,) = (r for r in caplog.records if "was altered" in r.getMessage())
    assert len(record.getMessage()) < 1000
    assert record.getMessage().isprintable()


def test_a_strangers_tree_of_any_depth_stops_no_tool(store: Path) -> None:
    """It is counted as far as a path reaches."""
    here = os.open(store / "undercroft-v1", os.O_RDONLY)
    top = here
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        if here != top:
            os.close(here)
        here = below
    os.close(here)
    (foreign,) = look(store).foreign
    assert foreign.path.endswith("/d")
    catalog = Catalog(str(store), SystemClock())
    assert any(f.kind is Kind.FOREIGN for f in Fsck(catalog).check(catalog.look()).findings)
    os.close(top)
    subprocess.run(["rm", "-rf", foreign.path], check=True)  # `rmtree` goes as deep as the stack


def test_entries_of_a_torn_table_are_the_whole_ones() -> None:
    """A length that is no multiple of an entry."""
    for size in (0, 1, 127, 129, 200):
        assert len(parse_entries(b"\xff" * size, NAMESPACE.digest).keys) == 0
    assert len(parse_entries(sealed_rows(b"\x01" * 129), NAMESPACE.digest).damaged_slots) == 1
