"""Damage to a stopped engine's disk folder, done from outside, as disks and people do it."""

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"UNDRCRFT"  # first bytes of a record; docs/reference/format.md
HEADER_BYTES = 4096
_PAYLOAD_BYTES_AT = 32


@dataclass(frozen=True, slots=True)
class Record:
    """Where one stored chunk lies: header, then payload."""

    path: Path
    offset: int
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


def records(folder: Path) -> list[Record]:
    """Every record below `folder`, found by its magic alone."""
    found = []
    for path in sorted(folder.rglob("*.slab")):
        data = path.read_bytes()
        for offset in range(0, len(data), HEADER_BYTES):
            if data.startswith(MAGIC, offset):
                (payload_bytes,) = struct.unpack_from("<Q", data, offset + _PAYLOAD_BYTES_AT)
                found.append(Record(path, offset, payload_bytes))
    return found


def _read(record: Record) -> bytes:
    with record.path.open("rb") as file:
        file.seek(record.offset)
        return file.read(record.num_bytes)


def _write(record: Record, data: bytes, at: int = 0) -> None:
    with record.path.open("r+b") as file:
        file.seek(record.offset + at)
        file.write(data)


def flip_payloads(folder: Path) -> None:
    """One flipped bit in the payload of every record: a float32's exponent, so that it shows."""
    for record in records(folder):
        at = HEADER_BYTES + record.payload_bytes // 2 + 3
        _write(record, bytes([_read(record)[at] ^ 0x40]), at)


def flip_headers(folder: Path) -> None:
    """One flipped bit in the header of every record."""
    for record in records(folder):
        _write(record, bytes([_read(record)[100] ^ 1]), 100)


def flip_bit(record: Record, at: int, bit: int) -> None:
    """One bit, `at` bytes after the beginning of the record; nothing if it is gone."""
    with suppress(FileNotFoundError), record.path.open("r+b") as file:
        file.seek(record.offset + at)
        before = file.read(1)
        file.seek(record.offset + at)
        file.write(bytes([byte ^ 1 << bit for byte in before]))


def swap(one: Record, other: Record) -> None:
    """Two records change places, each whole and right in itself; nothing if one is gone."""
    with suppress(FileNotFoundError):
        first, second = _read(one), _read(other)
        _write(one, second)
        _write(other, first)


def swap_records(folder: Path) -> None:
    """Neighbouring records change places, each whole and right in itself."""
    all_records = records(folder)
    for one, other in zip(all_records[::2], all_records[1::2], strict=False):
        if one.num_bytes == other.num_bytes:
            swap(one, other)


def swap_payloads(folder: Path) -> None:
    """Neighbouring records exchange payloads under their own headers."""
    all_records = records(folder)
    for one, other in zip(all_records[::2], all_records[1::2], strict=False):
        if one.num_bytes == other.num_bytes:
            first, second = _read(one), _read(other)
            _write(one, second[HEADER_BYTES:], HEADER_BYTES)
            _write(other, first[HEADER_BYTES:], HEADER_BYTES)


def zero_payloads(folder: Path) -> None:
    """Payloads as a lost write leaves them: the right length, all zero."""
    for record in records(folder):
        _write(record, bytes(record.payload_bytes), HEADER_BYTES)


def truncate_slabs(folder: Path) -> None:
    """Every slab ends in the middle of its second record."""
    for path in {record.path for record in records(folder)}:
        own = [record for record in records(folder) if record.path == path]
        os.truncate(path, own[1].offset + own[1].num_bytes // 2)


def grow_files(folder: Path) -> None:
    """Garbage behind the end of every file."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("ab") as file:
                file.write(bytes(range(1, 256)) * 600)


def flip_indexes(folder: Path) -> None:
    """One flipped bit in the middle of every index."""
    for path in folder.rglob("*.index"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def truncate_indexes(folder: Path) -> None:
    """Every index loses its second half, not at a record's edge."""
    for path in folder.rglob("*.index"):
        os.truncate(path, path.stat().st_size // 2 + 3)


def delete_slabs(folder: Path) -> None:
    """The payload files are gone, the rest is there."""
    for path in folder.rglob("*.slab"):
        path.unlink()


def delete_indexes(folder: Path) -> None:
    """The indexes are gone, the payloads are there."""
    for path in folder.rglob("*.index"):
        path.unlink()


def delete_folder(folder: Path) -> None:
    """Everything is gone."""
    shutil.rmtree(folder)


LOSES_CHUNKS: tuple[Callable[[Path], None], ...] = (
    flip_payloads,
    flip_headers,
    swap_records,
    swap_payloads,
    zero_payloads,
    truncate_slabs,
    flip_indexes,
    truncate_indexes,
    delete_slabs,
    delete_indexes,
    delete_folder,
)
"""Each of these may cost chunks; `grow_files` need not."""
