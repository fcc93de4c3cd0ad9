"""Records of a slab: one header block and the padded payload, moved by one call and verified."""

from __future__ import annotations

import os
from dataclasses import dataclass

from undercroft.errors import CorruptChunk
from undercroft.tiers import frame
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool, is_aligned, padded
from undercroft.tiers.disk.files import Files

__all__ = ["RecordIo", "record_bytes"]

_ZEROS = memoryview(bytes(PAGE_BYTES))


def record_bytes(payload_bytes: int) -> int:
    """What a chunk of `payload_bytes` takes in a slab."""
    return frame.HEADER_BYTES + max(PAGE_BYTES, padded(payload_bytes))


@dataclass(slots=True)
class RecordIo:
    """Writes and verified reads of single records.

    With `direct`, buffers at page addresses of whole pages are used as they are, others go through
    an aligned bounce buffer. Threads: any. Cost: one system call and one pass over the payload.
    """

    files: Files
    namespace: bytes
    pool: AlignedPool
    direct: bool = False

    def open_flags(self) -> int:
        """What a slab is opened with besides the access mode."""
        return os.O_DIRECT if self.direct else 0

    def write(
        self, fd: int, offset: int, key: bytes, stamp: tuple[int, int], data: memoryview
    ) -> None:
        """Write `data` under a header saying `key` and `stamp`, an (epoch, sequence) pair."""
        size = record_bytes(len(data)) - frame.HEADER_BYTES
        head = frame.Frame(key, self.namespace, *stamp, len(data), frame.checksum(data))
        block = self.pool.take(PAGE_BYTES)
        bounce = None
        try:
            frame.pack(head, block)
            buffers = [block, data]
            if self.direct and not is_aligned(data):
                bounce = self.pool.take(size)
                bounce[: len(data)] = data
                bounce[len(data) :] = _ZEROS[: size - len(data)]
                buffers = [block, bounce]
            elif size > len(data):
                buffers.append(_ZEROS[: size - len(data)])
            self.files.pwritev(fd, buffers, offset)
        finally:
            self._give_back(block, bounce)

    def read(self, fd: int, offset: int, key: bytes, epoch: int, out: memoryview) -> None:
        """Fill `out` with the payload of `key`.

        Raises:
            CorruptChunk: What is there is not, wholly and exactly, that chunk of that epoch.
            FormatTooNew: A later version wrote it.
        """
        size = record_bytes(len(out)) - frame.HEADER_BYTES
        block = self.pool.take(PAGE_BYTES)
        spare, tail, buffers = None, _ZEROS[:0], [block, out]
        try:
            if self.direct and not is_aligned(out):
                spare = self.pool.take(size)
                tail, buffers = spare[len(out) :], [block, spare]
            elif size > len(out):
                spare = self.pool.take(PAGE_BYTES)
                tail = spare[: size - len(out)]
                buffers.append(tail)
            got = self.files.preadv(fd, buffers, offset)
            if spare is buffers[1]:
                out[:] = spare[: len(out)]
            self._verify(got, block, (key, epoch), out, tail)
        finally:
            self._give_back(block, spare)

    def _give_back(self, block: memoryview, other: memoryview | None) -> None:
        self.pool.give(block)
        if other is not None:
            self.pool.give(other)

    def _verify(
        self,
        got: int,
        block: memoryview,
        wanted: tuple[bytes, int],
        out: memoryview,
        tail: memoryview,
    ) -> None:
        if got != frame.HEADER_BYTES + len(out) + len(tail):
            raise CorruptChunk(f"the slab ends {got} bytes into the record")
        key, epoch = wanted
        frame.verify(block, out, key=key, namespace=self.namespace, epoch=epoch)
        if len(tail) and tail != _ZEROS[: len(tail)]:
            raise CorruptChunk("the padding is not zero")
