"""Page-aligned memory for direct I/O: whether a buffer is aligned, and a few that are."""

from __future__ import annotations

import ctypes
import mmap

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
    if buffer.readonly:
        address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address % PAGE_BYTES == 0


class AlignedPool:
    """Page-aligned scratch buffers, kept for the next user.

    Bound: those taken and not given back, and 64 MiB kept between uses.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """`num_bytes` of page-aligned memory holding anything; to be given back."""
        kept = self._kept.get(num_bytes)
        if kept:
            try:
                buffer = kept.pop()
            except IndexError:  # another thread took the last one
                pass
            else:
                self._kept_bytes -= num_bytes
                return buffer
        return memoryview(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def give(self, buffer: memoryview) -> None:
        """Give back what `take` gave; nobody may use it any more."""
        if self._kept_bytes + len(buffer) <= _MAX_KEPT_BYTES:
            self._kept_bytes += len(buffer)
            self._kept.setdefault(len(buffer), []).append(buffer)
