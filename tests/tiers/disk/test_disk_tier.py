"""The disk tier as a tier: bytes in and out, bounds, order, epochs, names, rights."""

import mmap
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from undercroft.errors import ConfigError, CorruptChunk, TierClosed, TierFull
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.base import Bounded, Epochal, Indexed, Tier
from undercroft.tiers.disk.items import Read
from undercroft.tiers.disk.wire import Verb

from .support import ManualClock, content, disk, du, files, get, key, open_files, put, right


def aligned(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def test_it_is_every_kind_of_tier(tmp_path: Path) -> None:
    """It must be found by the protocols the hierarchy asks for."""
    tier = disk(tmp_path)
    for protocol in (Tier, Indexed, Bounded, Epochal):
        assert isinstance(tier, protocol)
    tier.close()


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 100_000, 131_072])
def test_any_length_reads_back(tmp_path: Path, num_bytes: int, direct: bool | None) -> None:
    """Chunks of any length must come back whole, from aligned and unaligned buffers alike."""
    tier = disk(tmp_path, direct=direct)
    data = content(key(1), num_bytes)
    tier.write_from(key(1), memoryview(data))
    assert get(tier, 1, num_bytes) == data
    page = aligned(max(4096, -(-num_bytes // 4096) * 4096))
    page[:num_bytes] = data
    tier.write_from(key(2), page[:num_bytes])
    page[:num_bytes] = bytes(num_bytes)
    assert tier.read_into(key(2), page[:num_bytes])
    assert page[:num_bytes] == data
    odd = np.zeros(num_bytes + 1, np.uint8)
    assert tier.read_into(key(2), memoryview(odd)[1:])
    assert odd[1:].tobytes() == data
    tier.close()


def test_an_absent_key_is_a_miss_and_leaves_the_buffer(tmp_path: Path) -> None:
    """Absent is a value, not an error, and never stains the buffer."""
    tier = disk(tmp_path)
    assert not tier.contains(key(1))
    assert get(tier, 1) is None
    tier.delete(key(1))
    tier.close()


def test_a_second_write_of_a_key_is_a_no_op(tmp_path: Path) -> None:
    """Storing what is there must neither write nor take room."""
    tier = disk(tmp_path)
    put(tier, 1)
    free = tier.free_chunks(4096)
    tier.write_from(key(1), memoryview(b"x" * 4096))
    assert right(tier, 1)
    assert tier.free_chunks(4096) == free
    tier.close()


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    """A restart must find every chunk, its length, its order, and the same free room."""
    tier = disk(tmp_path)
    for number in range(30):
        put(tier, number)
    tier.delete(key(7))
    before = tier.free_chunks(4096), tier.used_bytes()
    tier.close()
    tier = disk(tmp_path)
    assert [k for k, _ in tier.evictable()] == [key(n) for n in range(30) if n != 7]
    assert {size for _, size in tier.evictable()} == {4096}
    assert [right(tier, n) for n in range(30)] == [n != 7 for n in range(30)]
    assert (tier.free_chunks(4096), tier.used_bytes()) == before
    tier.close()


def test_capacity_holds_and_free_chunks_is_exact(tmp_path: Path) -> None:
    """`free_chunks` must count down to `TierFull` exactly, and `du` never exceed the capacity."""
    for capacity in (64 << 10, 100_000, 300 << 10, 3 << 20):
        path = tmp_path / str(capacity)
        tier = disk(path, capacity_bytes=capacity)
        promised = tier.free_chunks(4096)
        assert promised * 8192 > capacity * 0.9 - (48 << 10)
        for number in range(promised):
            put(tier, number)
            assert tier.free_chunks(4096) == promised - number - 1
            assert tier.used_bytes() == du(path) <= capacity
        with pytest.raises(TierFull) as raised:
            put(tier, promised)
        assert raised.value.key == key(promised)
        assert raised.value.tier == "disk"
        tier.delete(key(0))
        put(tier, promised)
        assert right(tier, promised)
        assert not right(tier, 0)
        tier.close()


def test_a_smaller_capacity_after_restart_is_obeyed_at_open(tmp_path: Path) -> None:
    """Files of earlier runs count: a smaller quota must hold before anything is served."""
    tier = disk(tmp_path, capacity_bytes=2 << 20)
    for number in range(200):
        put(tier, number)
    tier.close()
    tier = disk(tmp_path, capacity_bytes=1 << 20)
    assert tier.used_bytes() == du(tmp_path) <= 1 << 20
    assert sum(right(tier, n) for n in range(200)) == len(list(tier.evictable())) > 50
    tier.close()


def test_the_free_space_floor_is_respected(tmp_path: Path) -> None:
    """Nothing must be written that would leave the file system with less than the floor."""
    tier = disk(tmp_path, free_space_floor_bytes=1 << 60)
    assert tier.free_chunks(4096) == 0
    with pytest.raises(TierFull, match="free space"):
        put(tier, 1)
    tier.close()


def test_sizes_compete_without_starving(tmp_path: Path) -> None:
    """A size that holds nothing must get room from one that holds all; empty ones are re-cut."""
    tier = disk(tmp_path, capacity_bytes=1 << 20)
    small = 0
    while tier.free_chunks(4096):
        put(tier, small)
        small += 1
    put(tier, 5000, 16384)
    assert right(tier, 5000, 16384)
    assert 0 < sum(right(tier, n) for n in range(small)) < small
    for number in range(small):
        tier.delete(key(number))
    count = tier.free_chunks(16384)
    for number in range(6000, 6000 + count):
        put(tier, number, 16384)
    assert count > 30
    assert tier.used_bytes() == du(tmp_path) <= 1 << 20
    tier.close()


def test_a_wrong_length_is_corrupt_and_drops_the_chunk(tmp_path: Path) -> None:
    """Another length than stored must raise `CorruptChunk`, drop, and be writable anew."""
    tier = disk(tmp_path)
    for asked in (4000, 8192):
        put(tier, 1)
        with pytest.raises(CorruptChunk) as raised:
            get(tier, 1, asked)
        assert raised.value.key == key(1)
        assert not tier.contains(key(1))
    put(tier, 1)
    assert right(tier, 1)
    assert tier.stats()["corrupt_dropped"] == 2
    tier.close()


def test_raising_the_epoch_voids_everything_for_good(tmp_path: Path) -> None:
    """After `raise_epoch` nothing stored before is served, here, elsewhere, or after a restart."""
    tier, other = disk(tmp_path), disk(tmp_path)
    promised = tier.free_chunks(4096)
    for number in range(20):
        put(tier, number)
    other.refresh()
    assert right(other, 3)
    assert tier.raise_epoch() == tier.epoch() == 2
    assert not any(right(tier, n) or tier.has(key(n)) for n in range(20))
    time.sleep(0.002)  # its bound for loads is 1 ms
    assert not any(right(other, n) for n in range(20))
    assert other.epoch() == 2
    assert tier.free_chunks(4096) == promised
    put(tier, 3)
    assert right(tier, 3)
    tier.close()
    other.close()
    tier = disk(tmp_path)
    assert [n for n in range(20) if right(tier, n)] == [3]
    assert tier.epoch() == 2
    tier.close()


def test_has_sees_another_process_raise_within_its_bound(tmp_path: Path) -> None:
    """`has` must follow the epoch on disk by itself, 20 ms late at most, without a verb's help."""
    clock = ManualClock()
    tier, other = disk(tmp_path, clock=clock), disk(tmp_path)
    put(tier, 1)
    assert tier.has(key(1))
    other.raise_epoch()
    clock.t += 0.021
    assert not tier.has(key(1))
    assert tier.epoch() == 2
    tier.close()
    other.close()


def test_closed_is_closed(tmp_path: Path) -> None:
    """Twice closing is fine; every verb then raises `TierClosed`; no descriptor stays."""
    before = open_files()
    tier = disk(tmp_path)
    put(tier, 1)
    tier.close()
    tier.close()
    assert open_files() <= before
    for verb in (tier.contains, tier.has, tier.delete):
        with pytest.raises(TierClosed):
            verb(key(1))
    with pytest.raises(TierClosed):
        get(tier, 1)
    with pytest.raises(TierClosed):
        put(tier, 1)
    with pytest.raises(TierClosed):
        tier.raise_epoch()


def test_keys_that_do_not_fit_the_format_are_refused(tmp_path: Path) -> None:
    """A key of 65 bytes or none must be a typed error, one of 64 stored."""
    tier = disk(tmp_path)
    for bad in (b"", b"k" * 65):
        with pytest.raises(ConfigError):
            tier.write_from(ChunkKey(bad), memoryview(b"x"))
        assert not tier.contains(ChunkKey(bad))
    for good in (b"k" * 64, b"k", b"\0\0"):
        tier.write_from(ChunkKey(good), memoryview(good))
    tier.close()
    tier = disk(tmp_path)
    out = bytearray(2)
    assert tier.read_into(ChunkKey(b"\0\0"), memoryview(out))
    assert {k for k, _ in tier.evictable()} == {b"k" * 64, b"k", b"\0\0"}
    tier.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_bytes": 1000},
        {"num_replicas": 0},
        {"free_space_floor_bytes": -1},
        {"flush_interval_s": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    """The message must name the setting and the bound."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        disk(tmp_path, **wrong)


def test_only_we_may_read_it(tmp_path: Path) -> None:
    """Directories must be 0700 and files 0600, whatever the umask and what was there before."""
    old = os.umask(0)
    try:
        (tmp_path / "undercroft-v1").mkdir(mode=0o777)
        tier = disk(tmp_path)
        put(tier, 1)
        tier.close()
    finally:
        os.umask(old)
    for path in (tmp_path / "undercroft-v1").rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "undercroft-v1").stat().st_mode) == 0o700


def test_a_root_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    """A symbolic link in place of the root must not be followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "undercroft-v1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        disk(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "plain").write_text("x")
    with pytest.raises(ConfigError):
        disk(tmp_path / "plain")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Another user's directory must be refused with both ids."""
    (tmp_path / "undercroft-v1").mkdir(mode=0o700)
    os.chown(tmp_path / "undercroft-v1", 12345, 12345)
    with pytest.raises(ConfigError, match="12345"):
        disk(tmp_path)


def test_namespaces_do_not_meet(tmp_path: Path) -> None:
    """The same key in two namespaces must be two chunks."""
    one, two = disk(tmp_path), disk(tmp_path, namespace=Namespace({"model": "other"}))
    put(one, 1)
    assert not two.contains(key(1))
    two.write_from(key(1), memoryview(b"y" * 4096))
    assert right(one, 1)
    assert get(two, 1) == b"y" * 4096
    one.close()
    two.close()


def test_many_threads_on_the_same_keys(tmp_path: Path) -> None:
    """Concurrent stores, loads and deletes of few keys: right bytes or a miss, room accounted."""
    tier = disk(tmp_path, capacity_bytes=600 << 10)
    promised = tier.free_chunks(4096)

    def work(seed: int) -> int:
        random, hits = np.random.default_rng(seed), 0
        for number, verb in zip(
            random.integers(0, promised - 8, 300), random.random(300), strict=True
        ):
            if verb < 0.4:
                put(tier, int(number))
            elif verb < 0.8:
                hits += right(tier, int(number))
            else:
                tier.delete(key(int(number)))
        return hits

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    chunks = len(list(tier.evictable()))
    assert tier.free_chunks(4096) == promised - chunks
    assert tier.used_bytes() == du(tmp_path)
    tier.close()
    tier = disk(tmp_path, capacity_bytes=600 << 10)
    assert sum(right(tier, n) for n in range(promised)) == chunks
    tier.close()


def test_one_of_two_writers_of_a_key_wins(tmp_path: Path) -> None:
    """Two threads storing one key with different bytes: one whole, never a mixture."""
    tier = disk(tmp_path)
    for number in range(40):
        gate = threading.Barrier(2)

        def write(fill: bytes, number: int = number, gate: threading.Barrier = gate) -> None:
            gate.wait()
            tier.write_from(key(number), memoryview(fill * 8192))

        threads = [threading.Thread(target=write, args=(fill,)) for fill in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert get(tier, number, 8192) in (b"a" * 8192, b"b" * 8192)
    assert len(list(tier.evictable())) == 40
    tier.close()


def test_no_slot_is_reused_under_its_reader(tmp_path: Path) -> None:
    """A chunk deleted while being read must still read right; its slot is free afterwards."""
    tier = disk(tmp_path, capacity_bytes=64 << 10)
    promised = tier.free_chunks(4096)
    for number in range(promised):
        put(tier, number)
    pinned = tier._holdings.pin(key(0))
    assert pinned is not None
    segment, slot, epoch = pinned
    tier.delete(key(0))
    assert tier.free_chunks(4096) == 0
    with pytest.raises(TierFull):
        put(tier, 100)
    out = bytearray(4096)
    read = Read(key(0), segment, slot, epoch, memoryview(out))
    assert list(tier._chunks._moved({0: read}, Verb.READ)) == [[(0, None)]]
    assert bytes(out) == content(key(0))
    tier._chunks._leave(segment, slot)
    assert tier.free_chunks(4096) == 1
    put(tier, 100)
    assert right(tier, 100)
    tier.close()


def test_files_of_others_are_left_alone_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What we did not write must stay, count against the capacity, and be named once."""
    disk(tmp_path).close()
    space = files(tmp_path, "epoch")[0].parent
    (space / "notes.txt").write_bytes(bytes(200_000))
    tier = disk(tmp_path, capacity_bytes=400 << 10)
    assert tier.stats()["foreign_files"] == 1
    assert "notes.txt" in caplog.text
    while tier.free_chunks(4096):
        put(tier, tier.free_chunks(4096))
    assert du(tmp_path) <= 400 << 10
    tier.close()
    assert (space / "notes.txt").exists()


def test_segments_may_come_while_someone_goes_through_them(tmp_path: Path) -> None:
    """The scheduler's thread asks what is free while a mover adds a segment."""
    with closing(disk(tmp_path, capacity_bytes=8 << 20)) as tier:
        put(tier, 1)
        under_way = iter(tier._holdings.own.values())
        next(under_way)
        put(tier, 2, 8192)  # another size, so another segment
        assert list(under_way) == []
        assert len(tier._holdings.own) == 2
