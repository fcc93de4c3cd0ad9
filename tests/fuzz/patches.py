"""How a fuzzer's bytes become a file: whole, or as patches to one that the code wrote; resealed."""

from __future__ import annotations

import struct

import xxhash

from undercroft.tiers.disk.epoch import _check as epoch_check
from undercroft.tiers.disk.table import fold

PAGE = 4096
_WORDS = struct.Struct("<15Q")


def patched(base: bytes, data: bytes) -> bytes:
    """`base` with patches, each: offset (3 bytes), length (1 byte), content.

    A patch of the greatest length ends the file.
    """
    out, at = bytearray(base), 0
    while at + 4 <= len(data):
        offset = int.from_bytes(data[at : at + 3], "little") % (len(base) + 1)
        length = data[at + 3]
        content = data[at + 4 : at + 4 + length]
        if length == 0xFF:
            del out[offset:]
        out[offset : offset + len(content)] = content
        at += 4 + length
    return bytes(out)


def pieces(base: bytes) -> list[bytes]:
    """Patches that leave `base` as it is, at places where something is written: for the corpus."""
    places = [at for at in range(0, len(base), 64) if any(base[at : at + 64])][:24]
    return [b""] + [at.to_bytes(3, "little") + b"\x40" + base[at : at + 64] for at in places]


def _xxh3(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def sealed_page(data: bytes, at: int) -> bytes:
    """With the checksum of the first `at` bytes right after them."""
    data = data.ljust(at + 8, b"\0")
    return data[:at] + _xxh3(data[:at]) + data[at + 8 :]


def sealed_rows(data: bytes, start: int = 0) -> bytes:
    """With the fold of every index entry from `start` on that is not all zero."""
    out = bytearray(data)
    for at in range(start, len(out) - 127, 128):
        if any(out[at : at + 128]):
            words = _WORDS.unpack_from(out, at)
            struct.pack_into("<Q", out, at + 120, fold(words))
    return bytes(out)


def sealed_index(data: bytes) -> bytes:
    return sealed_rows(sealed_page(data, 504), PAGE)


def sealed_history(data: bytes) -> bytes:
    out = bytearray(sealed_page(data, PAGE - 8))
    for at in range(PAGE, len(out) - 31, 32):
        if any(out[at : at + 32]):
            check = xxhash.xxh3_64_intdigest(bytes(out[at : at + 28])) & 0xFFFFFFFF
            struct.pack_into("<I", out, at + 28, check)
    return bytes(out)


def sealed_epoch(data: bytes) -> bytes:
    data = data.ljust(24, b"\0")
    (epoch,) = struct.unpack_from("<Q", data, 8)
    return b"UNDREPCH" + data[8:16] + struct.pack("<Q", epoch_check(epoch)) + data[24:]


def sealed_slab(data: bytes, record_bytes: int = 2 * PAGE) -> bytes:
    """Every record's header checksum. A forged one of a payload would make wrong bytes right."""
    out = bytearray(data)
    for at in range(0, len(out) - record_bytes + 1, record_bytes):
        if any(out[at : at + PAGE]):
            struct.pack_into("<8s", out, at + 4088, _xxh3(bytes(out[at : at + 4088])))
    return bytes(out)
