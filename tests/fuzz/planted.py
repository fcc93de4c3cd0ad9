"""Parsers with a fault each that is put there on purpose: a fuzzer that misses it is broken."""

from __future__ import annotations

from undercroft.errors import CorruptChunk

from .parsers import Parser


def _beyond_the_end(data: bytes) -> int:
    """Believes an offset."""
    if data[:2] != b"UN":
        raise CorruptChunk("no magic")
    return data[int.from_bytes(data[2:3], "little")]


def _any_size(data: bytes) -> bytes:
    """Believes a length."""
    if data[:2] != b"UN":
        raise CorruptChunk("no magic")
    return bytes(int.from_bytes(data[2:10], "little"))


PLANTED = {
    "planted-index": Parser(_beyond_the_end, lambda: [b"UN\x01ab"], max_len=64),
    "planted-size": Parser(_any_size, lambda: [b"UN\x01" + bytes(7)], max_len=64),
}
