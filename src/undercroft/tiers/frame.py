"""The header that travels with every chunk below host memory, and its checksums.

One 4096-byte block before the payload, so that header and payload can be moved by one aligned
vectored call. Little-endian:

====== ===== =====================================================================
offset bytes field
====== ===== =====================================================================
0      8     magic `UNDRCRFT`
8      2     format version
10     1     checksum kind (1 = xxh3-64)
11     1     key length
12     4     header bytes (4096)
16     8     epoch
24     8     sequence: a number that only grows, over all writes of one process
32     8     payload bytes
40     8     checksum of the payload
48     32    namespace digest
80     64    key, zero-padded
144    3944  zero
4088   8     xxh3-64 of the 4088 bytes before it
====== ===== =====================================================================

Magic, version and the place and kind of the last eight bytes stay the same in every version, so
that "written by a later version" can be told from "damaged".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as _xxh3

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.keys import MAX_KEY_BYTES

__all__ = ["FORMAT_VERSION", "HEADER_BYTES", "Frame", "checksum", "pack", "unpack", "verify"]

FORMAT_VERSION = 1
HEADER_BYTES = 4096
_MAGIC = b"UNDRCRFT"
_XXH3_64 = 1
_FIELDS = struct.Struct("<8sHBBIQQQQ32s64s")
_CHECK = struct.Struct("<Q")
_CHECK_AT = HEADER_BYTES - _CHECK.size
_REST = bytes(_CHECK_AT - _FIELDS.size)
_Fields = tuple[bytes, int, int, int, int, int, int, int, int, bytes, bytes]


class Frame(NamedTuple):
    """What a chunk's header says about it."""

    key: bytes
    namespace: bytes
    epoch: int
    sequence: int
    payload_bytes: int
    payload_checksum: int


def checksum(payload: memoryview) -> int:
    """xxh3-64 of `payload`. Threads: any; releases the GIL. Cost: one pass over memory."""
    return _xxh3(payload)


def pack(frame: Frame, block: memoryview) -> None:
    """Write `frame` into `block`, `(HEADER_BYTES,)` uint8, every byte of it."""
    _FIELDS.pack_into(
        block,
        0,
        _MAGIC,
        FORMAT_VERSION,
        _XXH3_64,
        len(frame.key),
        HEADER_BYTES,
        frame.epoch,
        frame.sequence,
        frame.payload_bytes,
        frame.payload_checksum,
        frame.namespace,
        frame.key,
    )
    block[_FIELDS.size : _CHECK_AT] = _REST
    _CHECK.pack_into(block, _CHECK_AT, _xxh3(block[:_CHECK_AT]))


def unpack(block: memoryview) -> Frame:
    """Read what `pack` wrote.

    Raises:
        CorruptChunk: Not a header, or a damaged one.
        FormatTooNew: An undamaged header of a later format version.
    """
    _, _, _, key_bytes, _, epoch, sequence, payload_bytes, payload, space, key = _fields(block)
    return Frame(key[:key_bytes], space, epoch, sequence, payload_bytes, payload)


def _fields(block: memoryview) -> _Fields:
    """The fields of an undamaged header of this version."""
    fields: _Fields = _FIELDS.unpack_from(block)
    magic, version, kind, key_bytes, size = fields[:5]
    if magic != _MAGIC:
        raise CorruptChunk("the header's magic is wrong: overwritten, lost, or never written")
    (stored,) = _CHECK.unpack_from(block, _CHECK_AT)
    if stored != _xxh3(block[:_CHECK_AT]):
        raise CorruptChunk("the header's checksum differs")
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"the chunk is of format version {version}; this release reads up to "
            f"{FORMAT_VERSION}: upgrade, or use another directory"
        )
    if version != FORMAT_VERSION or kind != _XXH3_64 or size != HEADER_BYTES:
        raise CorruptChunk(f"the header says version {version}, checksum {kind}, {size} bytes")
    if not 1 <= key_bytes <= MAX_KEY_BYTES:
        raise CorruptChunk(f"the header says {key_bytes} bytes of key")
    return fields


def verify(
    block: memoryview, payload: memoryview, *, key: bytes, namespace: bytes, epoch: int
) -> None:
    """Raise unless `block` and `payload` are, wholly and exactly, that chunk of that epoch.

    Args:
        block: `(HEADER_BYTES,)` uint8, as read.
        payload: As read, padding left out.
        key: Whose chunk was asked for.
        namespace: Digest of the namespace it was asked for in.
        epoch: The only epoch that may be served.

    Raises:
        CorruptChunk: It is not; the message says in what.
        FormatTooNew: A later version wrote it.
    """
    _, _, _, key_bytes, _, head_epoch, _, num_bytes, stored, space, head_key = _fields(block)
    if head_key[:key_bytes] != key or space != namespace:
        raise CorruptChunk("the record belongs to another chunk")
    if head_epoch != epoch:
        raise CorruptChunk(f"the record is of epoch {head_epoch}, not {epoch}")
    if num_bytes != len(payload):
        raise CorruptChunk(f"{num_bytes} bytes are stored, {len(payload)} were asked for")
    if stored != checksum(payload):
        raise CorruptChunk("the payload's checksum differs")
