"""A check finds every kind of damage; a repair frees what is bad, and nothing that is good."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.vllm.lab import damage

from undercroft.clock import SystemClock
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fsck import Fsck, Kind, Report
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.repair import Remedy, repair
from undercroft.tiers.disk.table import ENTRY_BYTES, pack_header, parse_header

from .stores import CAPACITY, fill, held, look
from .support import disk, du, files, key, put, right

NUM = 20


def check(path: Path, capacity_bytes: int | None = None) -> Report:
    fsck = Fsck(Catalog(str(path), SystemClock()))
    return fsck.check(look(path), capacity_bytes=capacity_bytes)


def mend(path: Path, capacity_bytes: int | None = CAPACITY) -> list[Remedy]:
    catalog = Catalog(str(path), SystemClock())
    fsck, store = Fsck(catalog), catalog.look()
    report = fsck.check(store, capacity_bytes=capacity_bytes)
    return list(repair(report, store, fsck, Removal(catalog), capacity_bytes))


def kinds(report: Report) -> Counter[Kind]:
    return Counter(finding.kind for finding in report.findings)


def hits(path: Path, num: int = NUM) -> set[int]:
    tier = disk(path, capacity_bytes=CAPACITY)
    found = {number for number in range(num) if tier.contains(key(number))}
    assert all(right(tier, number) for number in found)
    tier.close()
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("num_bytes", [4096, 100, 0, 70000])
def test_a_good_store_has_no_fault(tmp_path: Path, num_bytes: int) -> None:
    """Every chunk is read, whatever its length, and progress ends at the whole."""
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    for number in range(8):
        put(tier, number, num_bytes)
    tier.close()
    seen: list[tuple[int, int]] = []
    catalog = Catalog(str(tmp_path), SystemClock())
    fsck = Fsck(catalog, on_progress=lambda done, total: seen.append((done, total)))
    report = fsck.check(catalog.look(), capacity_bytes=CAPACITY)
    assert report.findings == []
    assert (report.num_chunks, report.num_bytes) == (8, 8 * num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(
    "harm",
    [
        harm
        for harm in (*damage.LOSES_CHUNKS, damage.grow_files)
        if harm is not damage.delete_folder
    ],
    ids=lambda harm: harm.__name__,
)
def test_every_damage_is_found_and_mended(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Found; mended so that a second check is clean; what is good is still served, all of it."""
    fill(tmp_path, range(NUM))
    spare = tmp_path.with_name(tmp_path.name + "-spare")
    harm(tmp_path)
    shutil.copytree(tmp_path, spare)
    assert check(tmp_path).num_faults > 0
    good = hits_verified(spare)
    remedies = mend(tmp_path)
    left = [remedy for remedy in remedies if remedy.left]
    # `grow_files` also appends to the manifest and the epoch; only an engine can write the former.
    assert {remedy.finding.kind for remedy in left} <= {Kind.NAMESPACE}
    assert check(tmp_path).num_faults == len(left)
    assert du(tmp_path) <= CAPACITY
    assert hits(tmp_path) == good
    assert check(tmp_path).num_faults == 0


def hits_verified(path: Path) -> set[int]:
    """What an engine can really load."""
    from undercroft.errors import CorruptChunk

    tier, found = disk(path, capacity_bytes=CAPACITY), set()
    for number in range(NUM):
        try:
            if right(tier, number):
                found.add(number)
        except CorruptChunk:
            continue
    tier.close()
    return found


def test_findings_name_slot_key_and_kind(tmp_path: Path) -> None:
    """One bad record, one bad entry: two findings that say where, and nothing else."""
    fill(tmp_path, range(6))
    flip(files(tmp_path, ".slab")[0], 2 * 8192 + 4096 + 7)
    flip(files(tmp_path, ".index")[0], 4096 + 4 * ENTRY_BYTES + 50)
    findings = {f.kind: f for f in check(tmp_path).findings}
    assert set(findings) == {Kind.RECORD, Kind.ENTRY}
    record, entry = findings[Kind.RECORD], findings[Kind.ENTRY]
    assert record.chunk
    assert (record.slot, record.chunk.key) == (2, key(2))
    assert "payload's checksum" in record.what
    assert (entry.slot, entry.chunk) == (4, None)


def test_what_a_running_engine_owns_is_left(tmp_path: Path) -> None:
    """Damage under an engine is found, not touched, and said to be left, with the process."""
    with held(tmp_path, 0, 6) as pid:
        flip(files(tmp_path, ".slab")[0], 2 * 8192 + 4096 + 7)
        before = files(tmp_path, ".index")[0].read_bytes()
        (remedy,) = mend(tmp_path)
        assert not remedy.done
        assert remedy.left in (f"process {pid} has it open", "an engine has it open")
        assert files(tmp_path, ".index")[0].read_bytes() == before
    (remedy,) = mend(tmp_path)
    assert remedy.done == "freed"
    assert hits(tmp_path, 6) == {0, 1, 3, 4, 5}


def test_no_false_alarm_beside_a_busy_engine(tmp_path: Path) -> None:
    """While an engine stores and deletes all the time, a check finds nothing."""
    import threading

    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    for number in range(60):
        put(tier, number)
    stop = threading.Event()

    def churn() -> None:
        number = 60
        while not stop.is_set():
            tier.delete(key(number - 60))
            put(tier, number)
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        reports = [check(tmp_path) for _ in range(12)]
    finally:
        stop.set()
        thread.join()
        tier.close()
    assert [finding.what for report in reports for finding in report.findings] == []
    assert sum(report.num_chunks for report in reports) > 100


def test_other_engines_see_what_was_freed(tmp_path: Path) -> None:
    """An engine that follows a segment which is repaired reads its table anew."""
    fill(tmp_path, range(30))
    catalog = Catalog(str(tmp_path), SystemClock())
    segment = catalog.look().namespaces[0].segments[0]
    with catalog.owning(segment.index_path):
        follower = disk(tmp_path, capacity_bytes=CAPACITY, num_replicas=2)
    assert follower.has(key(3))
    store = catalog.look()
    (whole,) = [s for s in store.namespaces[0].segments if s.segment_id == segment.segment_id]
    chunk = next(c for c in catalog.chunks_of(whole, store.namespaces[0].epoch) if c.key == key(3))
    assert Removal(catalog).free_chunks(whole, [chunk]) == ""
    follower.refresh()
    assert not follower.has(key(3))
    assert follower.has(key(4))
    follower.close()


def test_the_quota_is_held_against_du(tmp_path: Path) -> None:
    """A store that is larger than it may be is a fault; strangers' files count."""
    fill(tmp_path, range(NUM))
    used = du(tmp_path)
    assert kinds(check(tmp_path, used)) == {}
    (tmp_path / "undercroft-v1" / "film.mkv").write_bytes(b"z" * 10000)
    assert kinds(check(tmp_path, used)) == {Kind.QUOTA: 1, Kind.FOREIGN: 1}


def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    """A segment of a later version is a note, and a repair does not touch it."""
    fill(tmp_path, range(6))
    index = files(tmp_path, ".index")[0]
    page = bytearray(pack_header(parse_header(index.read_bytes())))
    page[8] = 99
    import struct

    import xxhash

    page[504:512] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:504])))
    index.write_bytes(bytes(page) + index.read_bytes()[512:])
    report = check(tmp_path)
    assert kinds(report) == {Kind.NEWER: 1}
    assert report.num_faults == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert [remedy.done for remedy in mend(tmp_path)] == [""]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("harm", ["gone", "empty", "flipped"])
def test_a_damaged_epoch_is_raised(tmp_path: Path, harm: str) -> None:
    """As an engine would: later than any chunk's, so that nothing voided ever comes back."""
    fill(tmp_path, range(4))
    path = files(tmp_path, "epoch")[0]
    {"gone": path.unlink, "empty": lambda: os.truncate(path, 0), "flipped": lambda: flip(path, 9)}[
        harm
    ]()
    assert kinds(check(tmp_path)) == {Kind.EPOCH: 1}
    assert [remedy.done for remedy in mend(tmp_path)] == ["raised"]
    assert check(tmp_path).num_void == 4
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert tier.epoch() == 2
    tier.close()


def test_debris_of_a_crash_is_removed(tmp_path: Path) -> None:
    """Temporary files are notes and go; so do halves of segments, which are faults."""
    fill(tmp_path, range(4))
    folder = files(tmp_path, "manifest.json")[0].parent
    (folder / "seg-0123456789abcdef.index.tmp").write_bytes(b"x")
    (folder / "manifest.json.tmp").write_bytes(b"x")
    (folder / "seg-fedcba9876543210.slab").write_bytes(b"x" * 8192)
    assert kinds(check(tmp_path)) == {Kind.DEBRIS: 2, Kind.SEGMENT: 1}
    assert {remedy.done for remedy in mend(tmp_path)} == {"removed"}
    assert check(tmp_path).findings == []
    assert hits(tmp_path, 4) == set(range(4))


@pytest.mark.parametrize("capacity", [None, 100000])
def test_what_was_cut_is_not_filled_up_beyond_the_capacity(
    tmp_path: Path, capacity: int | None
) -> None:
    """Without a known capacity, or room in it, a cut file stays; the lost chunks are freed."""
    fill(tmp_path, range(6))
    os.truncate(files(tmp_path, ".slab")[0], 3 * 8192)
    before = du(tmp_path)
    remedies = mend(tmp_path, capacity)
    assert [r.finding.kind for r in remedies if r.left and r.finding.kind is not Kind.QUOTA] == [
        Kind.SIZE
    ]
    assert sum(remedy.done == "freed" for remedy in remedies) == 3
    assert du(tmp_path) <= before
    assert hits(tmp_path, 6) == {0, 1, 2}


def test_a_chunk_stored_twice_is_a_note(tmp_path: Path) -> None:
    """Two replicas that stored the same chunk at once: known, harmless."""
    ours, theirs = (
        disk(tmp_path, capacity_bytes=CAPACITY, num_replicas=2, flush_interval_s=60)
        for _ in range(2)
    )
    for tier in (ours, theirs):
        put(tier, 1)
    count = 0
    for tier in (ours, theirs):
        count += tier.stats()["chunks"]
        tier.close()
    report = check(tmp_path)
    assert report.num_faults == 0
    assert kinds(report) == ({Kind.TWICE: 1} if count == 2 else {})
