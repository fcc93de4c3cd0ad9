"""Page-aligned memory for direct I/O: whether a buffer is aligned, and a few that are."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

__all__ = ["PAGE_BYTES", "AlignedPool", "is_aligned", "padded"]

PAGE_BYTES = 4096
_MAX_KEPT_BYTES = 64 << 20


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def is_aligned(buffer: memoryview) -> bool:
    """Whether direct I/O may use `buffer` as it is: address and length in whole pages."""
    if not len(buffer) or len(buffer) % PAGE_BYTES:
        return False
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


class AlignedPool:
    """Page-aligned scratch buffers, kept for the next user.

    Bound: one buffer per thread inside `borrow`, and 64 MiB kept between uses.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    @contextmanager
    def borrow(self, num_bytes: int) -> Iterator[memoryview]:
        """`num_bytes` of page-aligned memory holding anything, until the block ends."""
        kept = self._kept.setdefault(num_bytes, [])
        try:
            buffer = kept.pop()
            self._kept_bytes -= num_bytes
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            yield buffer
        finally:
            if self._kept_bytes + num_bytes <= _MAX_KEPT_BYTES:
                self._kept_bytes += num_bytes
                kept.append(buffer)
