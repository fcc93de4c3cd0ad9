"""The stored format: its golden file, and that no single bit of it can change unseen."""

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers import frame
from undercroft.tiers.disk import table
from undercroft.tiers.disk.usage import NamespaceUsage, SegmentUsage, Usage, Wanted, plan_slots

from .support import NAMESPACE, content, disk, key

GOLDEN = Path(__file__).parents[2] / "data" / "disk_format_v1"
GOLDEN_CHUNKS = {0: 4096, 1: 100, 2: 4096}


def test_a_directory_of_format_v1_opens_for_ever(tmp_path: Path) -> None:
    """Written by the first release; every later one must find and verify these three chunks."""
    shutil.copytree(GOLDEN, tmp_path / "undercroft-v1")
    tier = disk(tmp_path)
    assert tier.epoch() == 2
    assert [k for k, _ in tier.evictable()] == [key(n) for n in GOLDEN_CHUNKS]
    for number, size in GOLDEN_CHUNKS.items():
        out = bytearray(size)
        assert tier.read_into(key(number), memoryview(out))
        assert bytes(out) == content(key(number), size)
    assert tier.stats()["damaged_entries"] == tier.stats()["corrupt_dropped"] == 0
    tier.close()


def test_the_version_is_that_of_the_golden_file() -> None:
    """Whoever changes a version must add a golden directory of the new one."""
    assert frame.FORMAT_VERSION == table.FORMAT_VERSION == 1


def packed() -> tuple[frame.Frame, bytearray]:
    head = frame.Frame(b"key", NAMESPACE.digest, 7, 9, 4096, 0x1234567890ABCDEF)
    block = bytearray(frame.HEADER_BYTES)
    frame.pack(head, memoryview(block))
    return head, block


def test_a_frame_reads_back() -> None:
    """`unpack` must return what `pack` was given."""
    head, block = packed()
    assert frame.unpack(memoryview(block)) == head


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """All 32,768 of them."""
    _, block = packed()
    for bit in range(len(block) * 8):
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk):
            frame.unpack(memoryview(block))
        block[bit // 8] ^= 1 << bit % 8


def test_header_fields_that_make_no_sense_are_corrupt() -> None:
    """A right checksum over nonsense must not be believed, a later version not be guessed at."""
    for at, value, wanted in (
        (8, 0, CorruptChunk),
        (8, 2, FormatTooNew),
        (10, 9, CorruptChunk),
        (11, 0, CorruptChunk),
        (11, 65, CorruptChunk),
        (12, 1, CorruptChunk),
    ):
        _, block = packed()
        block[at] = value
        struct.pack_into("<Q", block, 4088, frame.checksum(memoryview(block)[:4088]))
        with pytest.raises(wanted):
            frame.unpack(memoryview(block))


def test_entries_of_mixed_keys_read_back_and_bits_are_seen() -> None:
    """Keys of any length; each of the 1,024 bits of an entry flipped: absent, and only that one."""
    keys = [b"a", b"b" * 36, b"c" * 64, b"\0"]
    entries = [
        table.pack_entry(n, k, 3, 10 + n, 4096, NAMESPACE.digest) for n, k in enumerate(keys)
    ]
    raw = b"".join(entries) + table.FREE_ENTRY
    whole = table.parse_entries(raw, NAMESPACE.digest)
    assert whole.keys == keys
    assert whole.slots.tolist() == [0, 1, 2, 3]
    assert whole.sequences.tolist() == [10, 11, 12, 13]
    assert not len(whole.damaged_slots)
    for bit in range(table.ENTRY_BYTES * 8):
        bad = bytearray(raw)
        bad[table.ENTRY_BYTES + bit // 8] ^= 1 << bit % 8
        found = table.parse_entries(bytes(bad), NAMESPACE.digest)
        assert found.keys == [keys[0], keys[2], keys[3]]
        assert found.damaged_slots.tolist() == [1]


def test_entries_of_another_namespace_are_damaged() -> None:
    """An index moved between namespaces must yield nothing."""
    raw = table.pack_entry(0, b"k", 1, 1, 4096, bytes(32))
    assert table.parse_entries(raw, NAMESPACE.digest).keys == []


def test_the_fold_in_bulk_is_the_fold_by_one() -> None:
    """The vectorised and the scalar checksum must agree on any words."""
    rows = np.random.default_rng(3).integers(0, 1 << 63, (5000, 16), dtype=np.uint64)
    bulk = table.fold_rows(rows).tolist()
    for row, value in zip(rows[::97].tolist(), bulk[::97], strict=True):
        assert table.fold(tuple(row[:15])) == value


def test_the_ring_tells_what_changed_or_that_too_much_did() -> None:
    """Followers get each change once, in order, or learn that some are lost; also at wrap."""
    for start in (1, 447, 448, 100_000, (1 << 32) - 20):
        page = bytearray(4096)
        tell(page, start, [change % 1000 for change in range(start, start + 40)])
        seen = table.changed_slots(bytes(page), (start + 10) & 0xFFFFFFFF)
        assert seen == [change % 1000 for change in range(start + 10, start + 40)]
        at_once = bytearray(page)
        for change in range(start + 40, start + 40 + table.RING_ITEMS):
            tell(page, change, [5])
        assert table.changed_slots(bytes(page), (start + 10) & 0xFFFFFFFF) is None
        tell(at_once, start + 40, [7] * 100 + [5] * table.RING_ITEMS)
        assert table.changed_slots(bytes(at_once), (start + 40) & 0xFFFFFFFF) is None
        assert table.changed_slots(bytes(at_once), start + 140) == [5] * table.RING_ITEMS


def tell(page: bytearray, change: int, slots: list[int]) -> None:
    """What an owner writes into its header page."""
    for place, items in table.ring_runs(change, slots):
        page[place : place + len(items)] = items
        assert table.RING_AT <= place < place + len(items) <= 4096


@pytest.mark.parametrize("seed", range(5))
def test_planned_segments_always_fit(seed: int) -> None:
    """Whatever the room and record size, what is planned must fit, and one slot more must not."""
    dice = random.Random(seed)
    for _ in range(200):
        record = 4096 * dice.randrange(2, 3000)
        room = dice.randrange(1 << 30)
        slots = plan_slots(room, record, 1 << 20)
        from undercroft.tiers.disk.usage import created_bytes

        assert slots == 0 or created_bytes(record, slots) <= room
        assert created_bytes(record, slots + 1) > room


def test_few_segments_even_of_a_huge_capacity() -> None:
    """Descriptors have a bound: some 256 segments, two descriptors each, whatever the capacity."""
    for capacity in (1 << 30, 1 << 40, 1 << 44):
        slots = Wanted(capacity, 1).target_slots(1 << 21)
        assert capacity / (slots * (1 << 21)) <= 257


def test_shares_are_equal_parts() -> None:
    """Each namespace is entitled to its part, each replica to its part of that."""
    usage = Usage({"a": NamespaceUsage("a"), "b": NamespaceUsage("b")}, fixed_bytes=1000)
    assert usage.share_bytes(1_001_000) == 500_000
    usage.namespaces["a"].segments.append(SegmentUsage("x", "a", 100_000, 100_000, 100_000, 0))
    assert Wanted(1_001_000, 2).room_bytes(usage, "b", 0) == 250_000
