"""What a disk tier and its mover process say to each other: fixed little-endian structs.

Each message is one datagram that comes whole (`SOCK_SEQPACKET`):

- *control*: `HELLO`, `LANE`, `ATTACH`, `DETACH`, each answered by a full stop or by a reason.
  Files travel with them, as descriptors.
- *a lane*, one for each thread that waits: a batch of orders, then their ends as they come, in one
  message or several.

Both sides are one release of this library, started together: no version, no negotiation. Nothing
here is read from a disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "ATTACH",
    "DETACH",
    "HELLO",
    "LANE",
    "MAX_MESSAGE_BYTES",
    "MAX_ORDERS",
    "End",
    "Order",
    "Status",
    "Verb",
    "pack_ends",
    "pack_orders",
    "unpack_ends",
    "unpack_orders",
]

MAX_ORDERS = 64
"""In a batch: so that it fits into a socket's buffer on any system."""
MAX_MESSAGE_BYTES = 1 << 16
_MAX_TEXT_BYTES = 256

HELLO = struct.Struct("<cQQ32s")  # "h", offset and length of the memory, namespace digest
LANE = struct.Struct("<c")  # "l"
ATTACH = struct.Struct("<cQQ")  # "a", segment number, record bytes
DETACH = struct.Struct("<cQ")  # "d", segment number
_BATCH = struct.Struct("<BBH")  # verb, direct, number of orders
_ORDER = struct.Struct("<QIQQQQBB64s")
_END = struct.Struct("<HBiQH")


class Verb:
    """What a batch asks for."""

    READ, WRITE, FREE = range(3)


class Status:
    """How an order ended."""

    DONE, FAILED, CORRUPT, TOO_NEW, STALE, BUG = range(6)


class Order(NamedTuple):
    """One record to read or to write, or one entry to free.

    Args:
        segment: The number it was attached under.
        slot: Of the record.
        place: Where in the memory the payload is or goes to.
        num_bytes: Of the payload.
        epoch: Of the record.
        sequence: To write: of the record.
        checks_entry: To read: the index is somebody else's and has to be asked first. To write:
            the slot's entry may be in use and has to be freed first.
        key: The chunk's.
    """

    segment: int
    slot: int
    place: int
    num_bytes: int
    epoch: int
    sequence: int
    checks_entry: bool
    key: bytes


class End(NamedTuple):
    """How an order ended.

    Args:
        number: Which of its batch, from 0 on.
        status: One of `Status`.
        code: The `errno` of `Status.FAILED`.
        written_bytes: To the medium, in whole pages.
        text: What went wrong.
    """

    number: int
    status: int
    code: int = 0
    written_bytes: int = 0
    text: str = ""


def pack_orders(verb: int, orders: Sequence[Order], *, direct: bool) -> bytes:
    """A batch as a message."""
    parts = [_BATCH.pack(verb, direct, len(orders))]
    for number, slot, place, num_bytes, epoch, sequence, checks, key in orders:
        parts.append(
            _ORDER.pack(number, slot, place, num_bytes, epoch, sequence, checks, len(key), key)
        )
    return b"".join(parts)


def unpack_orders(message: bytes) -> tuple[int, bool, list[Order]]:
    """Verb, whether the page cache is bypassed, and the orders."""
    verb, direct, count = _BATCH.unpack_from(message)
    fields = _ORDER.iter_unpack(message[_BATCH.size :])
    orders = [
        Order(number, slot, place, num_bytes, epoch, sequence, bool(checks), key[:key_bytes])
        for number, slot, place, num_bytes, epoch, sequence, checks, key_bytes, key in fields
    ]
    if len(orders) != count:
        raise ValueError(f"{len(orders)} orders instead of {count}")
    return verb, bool(direct), orders


def pack_ends(ends: Iterable[End]) -> bytes:
    """Ends as a message."""
    parts = []
    for number, status, code, written_bytes, text in ends:
        told = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
        parts += [_END.pack(number, status, code, written_bytes, len(told)), told]
    return b"".join(parts)


def unpack_ends(message: bytes) -> list[End]:
    """What `pack_ends` packed."""
    ends, at = [], 0
    while at < len(message):
        number, status, code, written_bytes, length = _END.unpack_from(message, at)
        at += _END.size
        text = message[at : at + length].decode("utf-8", "replace")
        at += length
        ends.append(End(number, status, code, written_bytes, text))
    return ends
