"""Files damaged, swapped, cut, grown or deleted: a miss or `CorruptChunk`, then repaired."""

import errno
import os
import shutil
import struct
from pathlib import Path

import pytest

from undercroft.errors import (
    CorruptChunk,
    FormatTooNew,
    KvError,
    TierFull,
    TierUnavailable,
)
from undercroft.keys import Namespace
from undercroft.tiers import frame
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files, translate
from undercroft.tiers.disk.table import ENTRY_BYTES

from .support import NAMESPACE, ManualClock, disk, du, files, key, put, right

RECORD = 8192
CAPACITY = 300 << 10


def filled(path: Path, num: int = 6) -> None:
    tier = disk(path, capacity_bytes=CAPACITY)
    for number in range(num):
        put(tier, number)
    tier.close()


def outcomes(tier: DiskTier, num: int = 6) -> str:
    """`h` hit, `m` miss, `c` corrupt, for each chunk in turn."""
    out = ""
    for number in range(num):
        try:
            out += "h" if right(tier, number) else "m"
        except CorruptChunk:
            out += "c"
    return out


def repaired(path: Path, tier: DiskTier, num: int = 6) -> None:
    """Storing again must heal whatever was lost."""
    for number in range(num):
        put(tier, number)
    assert outcomes(tier, num) == "h" * num
    assert du(path) <= CAPACITY
    tier.close()
    tier = disk(path, capacity_bytes=CAPACITY)
    assert outcomes(tier, num) == "h" * num
    assert tier.used_bytes() == du(path) <= CAPACITY
    tier.close()


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("offset", [0, 9, 40, 100, 2000, 4090, 4096, 6000, 8191])
@pytest.mark.parametrize("live", [True, False])
def test_any_flipped_byte_of_a_record_is_seen(tmp_path: Path, offset: int, live: bool) -> None:
    """One flipped byte, in header, padding or payload: that chunk only, dropped and rewritable."""
    filled(tmp_path)
    tier = disk(tmp_path, capacity_bytes=CAPACITY) if live else None
    flip(files(tmp_path, ".slab")[0], 2 * RECORD + offset)
    tier = tier or disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hhchhh"
    assert tier.stats()["corrupt_dropped"] == 1
    assert outcomes(tier) == "hhmhhh"
    repaired(tmp_path, tier)


def test_every_byte_of_a_short_chunk_is_covered(tmp_path: Path) -> None:
    """The padding after a chunk that ends within a page must be checked too."""
    tier = disk(tmp_path)
    for offset in (4096, 4195, 4196, 8191):
        put(tier, 1, 100)
        flip(files(tmp_path, ".slab")[0], offset)
        with pytest.raises(CorruptChunk):
            right(tier, 1, 100)
    tier.close()


@pytest.mark.parametrize("at", [0, 5, 70, 80, 88, 100, 127])
def test_a_damaged_entry_is_absent_and_its_slot_free(tmp_path: Path, at: int) -> None:
    """One flipped byte of an index entry: that chunk is absent after reopening, others stay."""
    filled(tmp_path)
    flip(files(tmp_path, ".index")[0], 4096 + 3 * ENTRY_BYTES + at)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hhhmhh"
    assert tier.stats()["damaged_entries"] == 1
    repaired(tmp_path, tier)


def test_entries_that_were_swapped_are_absent(tmp_path: Path) -> None:
    """An entry at another slot's place must not be believed."""
    filled(tmp_path)
    index = files(tmp_path, ".index")[0]
    data = index.read_bytes()
    one, two = (data[4096 + n * ENTRY_BYTES :][:ENTRY_BYTES] for n in (1, 2))
    patch(index, 4096 + ENTRY_BYTES, two + one)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hmmhhh"
    repaired(tmp_path, tier)


def test_records_that_were_swapped_are_seen(tmp_path: Path) -> None:
    """Every record carries its own key: another chunk's bytes are never served."""
    filled(tmp_path)
    slab = files(tmp_path, ".slab")[0]
    data = slab.read_bytes()
    patch(slab, RECORD, data[2 * RECORD : 3 * RECORD] + data[RECORD : 2 * RECORD])
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hcchhh"
    repaired(tmp_path, tier)


@pytest.mark.parametrize("suffix", [".slab", ".index"])
def test_files_that_were_swapped_between_segments(tmp_path: Path, suffix: str) -> None:
    """Whole files exchanged: no wrong byte, no error but `CorruptChunk`, room comes back."""
    filled(tmp_path, 20)
    one, two = files(tmp_path, suffix)[:2]
    spare = tmp_path / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    outcomes(tier, 20)
    repaired(tmp_path, tier, 20)


@pytest.mark.parametrize("live", [True, False])
def test_a_truncated_slab_loses_only_what_was_cut(tmp_path: Path, live: bool) -> None:
    """Chunks before the cut must still be served, those behind it missed and rewritable."""
    filled(tmp_path)
    tier = disk(tmp_path, capacity_bytes=CAPACITY) if live else None
    os.truncate(files(tmp_path, ".slab")[0], 3 * RECORD + 4096 + 100)
    tier = tier or disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) in ("hhhccc", "hhhmmm")
    repaired(tmp_path, tier)


@pytest.mark.parametrize("suffix", [".slab", ".index"])
def test_a_grown_file_is_cut_back(tmp_path: Path, suffix: str) -> None:
    """Garbage appended must neither be served nor stay uncounted."""
    filled(tmp_path)
    with files(tmp_path, suffix)[0].open("ab") as file:
        file.write(os.urandom(5000))
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hhhhhh"
    repaired(tmp_path, tier)


@pytest.mark.parametrize("size", [0, 100, 4096, 4096 + 2 * ENTRY_BYTES + 60])
def test_a_truncated_index_leaves_what_is_whole(tmp_path: Path, size: int) -> None:
    """Entries that are gone are absent; a header that is gone frees the segment."""
    filled(tmp_path)
    os.truncate(files(tmp_path, ".index")[0], size)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == ("hhmmmm" if size > 4096 else "mmmmmm")
    repaired(tmp_path, tier)


def test_a_damaged_index_header_frees_the_segment(tmp_path: Path) -> None:
    """Without its header a segment is nothing: removed, its room free."""
    filled(tmp_path)
    flip(files(tmp_path, ".index")[0], 20)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "mmmmmm"
    repaired(tmp_path, tier)


@pytest.mark.parametrize("damage", ["gone", "empty", "flipped"])
def test_a_lost_epoch_voids_rather_than_guesses(tmp_path: Path, damage: str) -> None:
    """With the epoch file damaged nothing of any earlier epoch may come back."""
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    put(tier, 0)
    tier.raise_epoch()
    put(tier, 1)
    tier.close()
    path = files(tmp_path, "epoch")[0]
    if damage == "gone":
        path.unlink()
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        flip(path, 8)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier, 2) == "mm"
    assert tier.epoch() == 3
    repaired(tmp_path, tier)


def test_an_epoch_damaged_while_open_is_mended(tmp_path: Path) -> None:
    """The epoch file cut under a running tier: nothing served, then a later epoch, then normal."""
    clock = ManualClock()
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock)
    put(tier, 0)
    os.truncate(files(tmp_path, "epoch")[0], 5)
    clock.t += 0.05
    assert not tier.has(key(0))
    assert outcomes(tier, 1) == "m"
    repaired(tmp_path, tier)


def test_an_epoch_that_goes_back_brings_nothing_back(tmp_path: Path) -> None:
    """An older copy of the epoch file put under a running tier: what was voided stays void."""
    clock = ManualClock()
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock)
    put(tier, 0)
    path = files(tmp_path, "epoch")[0]
    old = path.read_bytes()
    tier.raise_epoch()
    put(tier, 1)
    patch(path, 0, old)
    clock.t += 0.05
    assert not tier.has(key(0))
    assert outcomes(tier, 2) in ("mm", "mh")
    assert tier.epoch() == 3
    tier.close()
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier, 2) == "mm"
    repaired(tmp_path, tier)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"model": "n"}', b'{"x": NaN}'])
def test_a_damaged_manifest_is_written_anew(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is named after the manifest's digest, so an altered one can be restored."""
    filled(tmp_path)
    path = files(tmp_path, "manifest.json")[0]
    good = path.read_bytes()
    path.write_bytes(text)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "hhhhhh"
    assert path.read_bytes() == good
    assert "written anew" in caplog.text
    tier.close()


def test_two_manifests_of_one_id_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should two namespaces share an id, the whole manifest decides; the difference is named."""
    from undercroft.errors import ConfigError

    monkeypatch.setattr(Namespace, "id", "ab" * 16)
    disk(tmp_path).close()
    other = Namespace({**NAMESPACE.manifest, "cache": {"dtype": "fp8"}})
    with pytest.raises(ConfigError, match=r"cache\.dtype: 'fp8' here, 'bf16' there"):
        disk(tmp_path, namespace=other)


def test_a_later_record_version_is_refused_not_guessed(tmp_path: Path) -> None:
    """A whole header of a later version must be `FormatTooNew`, a damaged one `CorruptChunk`."""
    filled(tmp_path)
    slab = files(tmp_path, ".slab")[0]
    header = bytearray(slab.read_bytes()[:4096])
    struct.pack_into("<H", header, 8, 2)
    patch(slab, 0, bytes(header))
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier, 1) == "c"
    tier.close()
    filled(tmp_path)
    struct.pack_into("<Q", header, 4088, frame.checksum(memoryview(header)[:4088]))
    slot = slab.read_bytes().index(key(0)) // RECORD
    patch(slab, slot * RECORD, bytes(header))
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    with pytest.raises(FormatTooNew, match="upgrade"):
        right(tier, 0)
    assert not tier.has(key(0))
    repaired(tmp_path, tier)


def test_a_later_segment_version_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment of a later version must be neither read nor removed, but counted and named."""
    import xxhash

    filled(tmp_path)
    index = files(tmp_path, ".index")[0]
    header = bytearray(index.read_bytes()[:512])
    struct.pack_into("<H", header, 8, 9)
    struct.pack_into("<Q", header, 504, xxhash.xxh3_64_intdigest(bytes(header[:504])))
    patch(index, 0, bytes(header))
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert outcomes(tier) == "mmmmmm"
    assert tier.stats()["too_new_segments"] == 1
    assert "format version 9" in caplog.text
    for number in range(100):
        if not tier.free_chunks(4096):
            break
        put(tier, number)
    assert du(tmp_path) <= CAPACITY
    assert index.exists()
    tier.close()


def test_debris_of_a_crash_is_swept(tmp_path: Path) -> None:
    """Halves of segments and temporary files must go at open, counted; strangers' files stay."""
    filled(tmp_path)
    space = files(tmp_path, "epoch")[0].parent
    for name in ("seg-0123456789abcdef.slab", "seg-0123456789abcde0.index", "manifest.json.tmp"):
        (space / name).write_bytes(bytes(9000))
    (space / "seg-0123456789abcdef.index.tmp").write_bytes(b"x")
    (space / "mine.tmp").write_bytes(b"x")
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert tier.stats()["swept_files"] == 4
    assert sorted(p.name for p in space.glob("*.tmp")) == ["mine.tmp"]
    (space / "mine.tmp").unlink()
    repaired(tmp_path, tier)


@pytest.mark.parametrize("what", ["root", "namespace", "slab", "index", "epoch"])
def test_files_deleted_under_us(tmp_path: Path, what: str) -> None:
    """Deleted under a running tier: typed errors or misses, then made anew by the next store."""
    clock = ManualClock()
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock)
    for number in range(6):
        put(tier, number)
    space = files(tmp_path, "epoch")[0].parent
    if what == "root":
        shutil.rmtree(space.parent)
    elif what == "namespace":
        shutil.rmtree(space)
    else:
        files(tmp_path, what)[0].unlink()
    for number in range(6):
        right(tier, number)
    clock.t += 2.0
    for number in range(6):
        try:
            right(tier, number)
        except TierUnavailable:
            continue
    repaired(tmp_path, tier)


class Refusing(Files):
    """Every attempt to write fails with `number`, as on a read-only or forbidden file system."""

    def __init__(self, number: int) -> None:
        self.number = number

    def check(self) -> None:
        if self.number:
            raise OSError(self.number, os.strerror(self.number), "injected")

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            self.check()
        return super().open(path, flags)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        self.check()
        super().pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> None:  # type: ignore[override]
        self.check()
        super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.check()
        super().allocate(fd, num_bytes)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_directory_still_serves(tmp_path: Path, number: int) -> None:
    """Read-only at open: what is there is served, stores are `TierUnavailable`, later it heals."""
    filled(tmp_path)
    clock, refusing = ManualClock(), Refusing(number)
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock, files=refusing)
    assert outcomes(tier) == "hhhhhh"
    assert tier.stats()["read_only"] == 1
    assert tier.free_chunks(4096) == 0
    with pytest.raises(TierUnavailable, match="read-only"):
        put(tier, 10)
    clock.t += 5
    with pytest.raises(TierUnavailable):
        put(tier, 10)
    refusing.number = 0
    clock.t += 5
    put(tier, 10)
    assert right(tier, 10)
    repaired(tmp_path, tier)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_starts_refusing_writes(tmp_path: Path, number: int) -> None:
    """Loads must go on while stores fail with the right type; stores work again afterwards."""
    clock, refusing = ManualClock(), Refusing(0)
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock, files=refusing)
    for n in range(6):
        put(tier, n)
    refusing.number = number
    wanted = TierFull if number in (errno.ENOSPC, errno.EDQUOT) else TierUnavailable
    for n in (10, 11):
        with pytest.raises(wanted, match="injected"):
            put(tier, n)
    assert outcomes(tier) == "hhhhhh"
    refusing.number = 0
    clock.t += 1
    put(tier, 10)
    repaired(tmp_path, tier)


def test_a_path_that_cannot_be_made_is_no_reason_to_stop(tmp_path: Path) -> None:
    """A root that cannot be created now: the tier opens empty and works once it can be."""
    clock, refusing = ManualClock(), Refusing(errno.EACCES)
    tier = disk(tmp_path, capacity_bytes=CAPACITY, clock=clock, files=refusing)
    assert outcomes(tier, 1) == "m"
    assert not tier.has(key(0))
    with pytest.raises(TierUnavailable):
        put(tier, 0)
    with pytest.raises(TierUnavailable):
        tier.raise_epoch()
    refusing.number = 0
    clock.t += 5
    repaired(tmp_path, tier)


def test_a_chunk_that_cannot_be_read_is_given_up_after_two_tries(tmp_path: Path) -> None:
    """A bad sector: `TierUnavailable` twice, then a miss that the next store heals."""

    class Bad(Files):
        bad = True

        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            if self.bad and offset == 0:
                raise OSError(errno.EIO, "Input/output error")
            return super().preadv(fd, buffers, offset)

    bad = Bad()
    tier = disk(tmp_path, capacity_bytes=CAPACITY, files=bad, direct=False)
    for number in range(6):
        put(tier, number)
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="check the device"):
            right(tier, 0)
    assert outcomes(tier) == "mhhhhh"
    bad.bad = False
    repaired(tmp_path, tier)


def test_a_full_file_system_is_tier_full(tmp_path: Path) -> None:
    """ENOSPC while a segment is created must leave no half of one behind."""

    class Full(Files):
        def allocate(self, fd: int, num_bytes: int) -> None:
            super().allocate(fd, num_bytes // 8192 * 4096)
            raise OSError(errno.ENOSPC, "No space left on device")

    tier = disk(tmp_path, capacity_bytes=CAPACITY, files=Full())
    with pytest.raises(TierFull):
        put(tier, 0)
    assert files(tmp_path, ".slab") == files(tmp_path, ".tmp") == []
    assert tier.used_bytes() == du(tmp_path)
    tier.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TierFull),
        (errno.EDQUOT, TierFull),
        (errno.EROFS, TierUnavailable),
        (errno.EACCES, TierUnavailable),
        (errno.EIO, TierUnavailable),
        (errno.ENOENT, TierUnavailable),
        (errno.ESTALE, TierUnavailable),
    ],
)
def test_foreign_errors_are_translated(number: int, kind: type[KvError]) -> None:
    """What, where, and what to do must be in the message; the tier and key on the error."""
    error = translate(
        OSError(number, os.strerror(number), "/some/file"), "read it", tier="t", key=b"k"
    )
    assert type(error) is kind
    assert (error.tier, error.key) == ("t", b"k")
    for part in ("read it", "/some/file", os.strerror(number), "; "):
        assert part in str(error)
