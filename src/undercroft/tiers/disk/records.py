"""Records of a slab: one header block and the padded payload, moved by one call and verified."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from undercroft.errors import CorruptChunk
from undercroft.tiers import frame
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool, is_aligned, padded
from undercroft.tiers.disk.files import Files

__all__ = ["RecordIo", "record_bytes"]

_ZEROS = memoryview(bytes(PAGE_BYTES))
_NO_TAIL = _ZEROS[:0]


def record_bytes(payload_bytes: int) -> int:
    """What a chunk of `payload_bytes` takes in a slab."""
    return frame.HEADER_BYTES + max(PAGE_BYTES, padded(payload_bytes))


@dataclass(slots=True)
class RecordIo:
    """Writes and verified reads of single records.

    Buffers of whole pages are used as they are, unless direct I/O refuses their address; that and
    odd lengths go through an aligned bounce buffer. Threads: any. Cost: one system call and one
    pass over the payload. Bound: the pool's, and one header block for each thread ever in here at
    the same time.
    """

    files: Files
    namespace: bytes
    pool: AlignedPool
    direct: bool = False
    _blocks: list[memoryview] = field(default_factory=list)

    def open_flags(self) -> int:
        """What a slab is opened with besides the access mode."""
        return os.O_DIRECT if self.direct else 0

    def write(
        self, fd: int, offset: int, key: bytes, stamp: tuple[int, int], data: memoryview
    ) -> None:
        """Write `data` under a header saying `key` and `stamp`, an (epoch, sequence) pair."""
        num_bytes = len(data)
        epoch, sequence = stamp
        head = frame.Frame(key, self.namespace, epoch, sequence, num_bytes, frame.checksum(data))
        block = self._take_block()
        try:
            frame.pack(head, block)
            if num_bytes and not num_bytes % PAGE_BYTES:
                try:
                    self.files.pwritev(fd, [block, data], offset)
                except OSError as exc:
                    if not self._refuses(exc, data):
                        raise
                else:
                    return
            self._write_padded(fd, offset, block, data)
        finally:
            self._blocks.append(block)

    def _write_padded(self, fd: int, offset: int, block: memoryview, data: memoryview) -> None:
        size = record_bytes(len(data)) - frame.HEADER_BYTES
        missing = _ZEROS[: size - len(data)]
        if not self.direct:
            self.files.pwritev(fd, [block, data, missing], offset)
            return
        bounce = self.pool.take(size)
        try:
            bounce[: len(data)] = data
            bounce[len(data) :] = missing
            self.files.pwritev(fd, [block, bounce], offset)
        finally:
            self.pool.give(bounce)

    def read(self, fd: int, offset: int, key: bytes, epoch: int, out: memoryview) -> None:
        """Fill `out` with the payload of `key`.

        Raises:
            CorruptChunk: What is there is not, wholly and exactly, that chunk of that epoch.
            FormatTooNew: A later version wrote it.
        """
        num_bytes = len(out)
        block = self._take_block()
        try:
            if num_bytes and not num_bytes % PAGE_BYTES:
                try:
                    got = self.files.preadv(fd, [block, out], offset)
                except OSError as exc:
                    if not self._refuses(exc, out):
                        raise
                else:
                    self._verify(got, block, (key, epoch), out, _NO_TAIL)
                    return
            self._read_padded(fd, offset, block, (key, epoch), out)
        finally:
            self._blocks.append(block)

    def _read_padded(
        self, fd: int, offset: int, block: memoryview, wanted: tuple[bytes, int], out: memoryview
    ) -> None:
        size = record_bytes(len(out)) - frame.HEADER_BYTES
        spare = self.pool.take(size)
        try:
            tail = spare[len(out) :]
            buffers = [block, spare] if self.direct else [block, out, tail]
            got = self.files.preadv(fd, buffers, offset)
            if self.direct:
                out[:] = spare[: len(out)]
            self._verify(got, block, wanted, out, tail)
        finally:
            self.pool.give(spare)

    def _take_block(self) -> memoryview:
        try:
            return self._blocks.pop()
        except IndexError:
            return self.pool.take(PAGE_BYTES)

    def _refuses(self, exc: OSError, buffer: memoryview) -> bool:
        """Whether `exc` says that direct I/O cannot use the buffer's address.

        Asked of the kernel by trying, since finding an address costs more than all else here.
        """
        return self.direct and exc.errno == errno.EINVAL and not is_aligned(buffer)

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
