"""The history keeps the latest incidents, in bounds, whatever happens to its file."""

import os
from pathlib import Path
from typing import Any

import pytest

from undercroft.clock import SystemClock
from undercroft.errors import CorruptChunk
from undercroft.tiers.disk.history import (
    EVENTS,
    REASONS,
    HistoryFile,
    Incident,
    history_bytes,
    key_part,
    read_history,
)

from .stores import CAPACITY, fill, look
from .support import NAMESPACE, disk, du, files, key

NUM_BYTES = 8192
NUM_ENTRIES = 4096 // 32


def history(path: Path, **more: Any) -> HistoryFile:
    given = {
        "namespace": NAMESPACE,
        "levels": ["host", "disk"],
        "num_bytes": NUM_BYTES,
        "capacity_bytes": CAPACITY,
        "free_space_floor_bytes": 0,
        "clock": SystemClock(),
    }
    return HistoryFile(str(path), **{**given, **more})


def incidents(first: int, count: int) -> list[Incident]:
    return [
        Incident(1000 + n, "evicted", "capacity", "disk", key_part(key(n)))
        for n in range(first, first + count)
    ]


def stored(path: Path) -> list[Incident]:
    (file,) = path.glob("undercroft-v1/*/history-*")
    return read_history(file.read_bytes())


@pytest.mark.parametrize("batch", [1, 7, 128, 500])
def test_the_latest_are_kept_in_order(tmp_path: Path, batch: int) -> None:
    """However they come, the ring holds the last ones, oldest first, and never grows."""
    fill(tmp_path, range(1))
    file = history(tmp_path)
    assert file.open()
    for first in range(0, 300, batch):
        file.add(incidents(first, min(batch, 300 - first)))
    file.close()
    assert stored(tmp_path) == incidents(300 - NUM_ENTRIES, NUM_ENTRIES)
    (found,) = tmp_path.glob("undercroft-v1/*/history-*")
    assert found.stat().st_size == NUM_BYTES


def test_every_word_survives(tmp_path: Path) -> None:
    """Each event and reason is read back as it was written; an unknown one is `other`."""
    fill(tmp_path, range(1))
    file = history(tmp_path)
    assert file.open()
    wanted = [Incident(5, event, "other", "host") for event in EVENTS[1:]]
    wanted += [Incident(6, "dropped", reason, "disk", key_part(b"k")) for reason in REASONS]
    file.add([*wanted, Incident(7, "dropped", "never heard of", "nowhere")])
    file.close()
    assert stored(tmp_path) == [*wanted, Incident(7, "dropped", "other", "host")]


def test_a_new_engine_goes_on_with_the_file(tmp_path: Path) -> None:
    """Restarts do not add files; engines at one time have one each."""
    fill(tmp_path, range(1))
    for run in range(3):
        file = history(tmp_path)
        assert file.open()
        file.add(incidents(60 * run, 60))
        file.close()
    assert stored(tmp_path) == incidents(180 - NUM_ENTRIES, NUM_ENTRIES)
    one, two = history(tmp_path), history(tmp_path)
    assert one.open()
    assert two.open()
    assert len(list(tmp_path.glob("undercroft-v1/*/history-*"))) == 2
    one.close()
    two.close()


def test_torn_and_flipped_entries_are_left_out(tmp_path: Path) -> None:
    """An entry that is not whole is not believed; a file that is not is replaced."""
    fill(tmp_path, range(1))
    file = history(tmp_path)
    assert file.open()
    file.add(incidents(0, 10))
    file.close()
    (path,) = tmp_path.glob("undercroft-v1/*/history-*")
    data = bytearray(path.read_bytes())
    data[4096 + 3 * 32 + 5] ^= 1
    data[4096 + 11 * 32 : 4096 + 12 * 32] = b"\xff" * 32  # a number that would be the last
    path.write_bytes(data)
    assert [one.unix_s for one in stored(tmp_path)] == [1000, 1001, *range(1003, 1010)]
    assert file.open()
    file.add(incidents(10, 1))
    file.close()
    assert stored(tmp_path)[-1] == incidents(10, 1)[0]
    os.truncate(path, 5000)
    assert file.open()
    file.close()
    assert stored(tmp_path) == []
    (path,) = tmp_path.glob("undercroft-v1/*/history-*")
    with pytest.raises(CorruptChunk):
        read_history(b"\0" * 8192)


def test_it_is_within_the_capacity_and_nobody_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes count as ours; without room there is none; it is part of no chunk's way."""
    fill(tmp_path, range(1), capacity_bytes=CAPACITY)
    used = du(tmp_path)
    assert not history(tmp_path, capacity_bytes=used + 4096).open()
    file = history(tmp_path)
    assert file.open()
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert tier.stats()["foreign_files"] == 0
    assert tier.used_bytes() == du(tmp_path) == used + NUM_BYTES
    tier.close()
    store = look(tmp_path)
    assert store.foreign == ()
    assert store.disk_bytes == du(tmp_path)
    file.close()
    assert "not ours" not in caplog.text


def test_a_namespace_left_with_its_history_alone_is_swept(tmp_path: Path) -> None:
    """A history keeps no dead namespace alive."""
    fill(tmp_path, range(1))
    file = history(tmp_path)
    assert file.open()
    for path in (*files(tmp_path, ".slab"), *files(tmp_path, ".index")):
        path.unlink()
    from .stores import OTHER

    fill(tmp_path, range(1), namespace=OTHER)
    assert [n.namespace_id for n in look(tmp_path).namespaces] == [OTHER.id]
    assert not file.is_there()
    assert not file.open()
    file.close()


@pytest.mark.parametrize(
    ("capacity", "num_replicas", "expected"),
    [
        (1 << 20, 1, 0),
        (8 << 20, 1, 8192),
        (8 << 20, 2, 0),
        (1 << 30, 1, 1 << 20),
        (1 << 45, 4, 16 << 20),
    ],
)
def test_its_size_follows_the_capacity(capacity: int, num_replicas: int, expected: int) -> None:
    """A thousandth of it, at most 16 MiB, none where that is too little."""
    assert history_bytes(capacity, num_replicas) == expected


def test_every_reason_that_is_counted_has_a_code() -> None:
    """The words of docs/reference/metrics.md, all of them but `absent`, which is never noted."""
    import re

    text = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    table = text.partition("## Reasons")[2].partition("## Is it")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) - {"absent"} <= set(REASONS)


def test_codes_and_layout_are_as_documented(tmp_path: Path) -> None:
    """docs/reference/format.md names every code, and where each field of an entry lies."""
    import re
    import struct

    import xxhash

    text = (Path(__file__).parents[3] / "docs" / "reference" / "format.md").read_text()
    for field, words in (("event", EVENTS[1:]), ("reason", REASONS)):
        line = next(line for line in text.splitlines() if f"| 1 | {field}: " in line)
        codes = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)(?:,| \|)", line)}
        first = 1 if field == "event" else 0
        assert codes == {word: n for n, word in enumerate(words, first)}
    fill(tmp_path, range(1))
    file = history(tmp_path)
    assert file.open()
    file.add([Incident(77, "dropped", "vanished", "disk", key_part(key(5)))])
    file.close()
    (path,) = tmp_path.glob("undercroft-v1/*/history-*")
    entry = path.read_bytes()[4096 + 32 : 4096 + 64]
    assert entry[:16] == key(5)[:12] + key(5)[-4:]
    assert struct.unpack("<II", entry[16:24]) == (77, 1)
    assert entry[24:28] == bytes([3, 11, 1, 0])
    assert entry[28:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(entry[:28]))[:4]
