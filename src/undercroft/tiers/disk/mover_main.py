"""The mover process of a disk tier: reads, verifies and writes records, and keeps nothing.

Started by `undercroft.tiers.disk.mover`, as `python -m undercroft.tiers.disk.mover_main FD`. It
maps the file that level 0 lies in, is handed the descriptors of segments, and does what the lanes
ask. It ends when its control socket does, so with the engine, however that ends. An order under way
then is an incomplete write, as after any crash; the segment's lock, which this process shares
through the descriptor, keeps others out until it is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers.disk import wire
from undercroft.tiers.disk.buffers import AlignedPool
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.records import RecordIo
from undercroft.tiers.disk.table import ENTRY_BYTES, FREE_ENTRY, pack_entry, parse_entries
from undercroft.tiers.disk.wire import End, Order, Status, Verb

__all__ = ["main"]

_ENTRIES_AT = 4096
_MAX_FDS = 2
_KINDNESS = 5
"""Steps go first where processors are few: an engine's threads are not niced."""


@dataclass(frozen=True, slots=True)
class _Segment:
    slab_fd: int
    index_fd: int
    record_bytes: int


class _Mover:
    """Threads: `control` on one, `lane` on one for each lane."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._segments: dict[int, _Segment] = {}
        self._memory = memoryview(b"")
        self._namespace = bytes(32)
        self._pool = AlignedPool()

    def serve(self) -> None:
        """Until nobody is at the other end."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._control, 256, _MAX_FDS)
            if not message:
                return
            try:
                self._obey(message, fds)
                answer = b"."
            except (OSError, ValueError, KeyError) as exc:
                answer = f"{type(exc).__name__}: {exc}".encode()[:256]
            self._control.send(answer)

    def _obey(self, message: bytes, fds: list[int]) -> None:
        kind = message[:1]
        if kind == b"h":
            _, offset, length, self._namespace = wire.HELLO.unpack(message)
            with mmap.mmap(fds[0], 0) as probe:  # the file's own length
                size = len(probe)
            if offset + length > size:
                raise ValueError(f"{offset} + {length} bytes of a file of {size}")
            self._memory = memoryview(mmap.mmap(fds[0], size))[offset : offset + length]
            os.close(fds[0])
        elif kind == b"l":
            lane = socket.socket(fileno=fds[0])
            threading.Thread(target=self._serve_lane, args=(lane,), daemon=True).start()
        elif kind == b"a":
            _, number, record_bytes = wire.ATTACH.unpack(message)
            self._segments[number] = _Segment(fds[0], fds[1], record_bytes)
        elif kind == b"d":
            _, number = wire.DETACH.unpack(message)
            segment = self._segments.pop(number)
            os.close(segment.slab_fd)
            os.close(segment.index_fd)

    def _serve_lane(self, lane: socket.socket) -> None:
        files = Files()  # of this lane alone: it counts what is written
        records = {
            direct: RecordIo(files, self._namespace, self._pool, direct) for direct in (False, True)
        }
        with lane, suppress(OSError):
            while message := lane.recv(wire.MAX_MESSAGE_BYTES):
                verb, direct, orders = wire.unpack_orders(message)
                ends = [self._end_of(verb, order, files, records[direct]) for order in orders]
                lane.send(wire.pack_ends(ends))

    def _end_of(self, verb: int, order: Order, files: Files, records: RecordIo) -> End:
        before = files.written_bytes
        status, code, text = Status.DONE, 0, ""
        try:
            if verb == Verb.WRITE:
                self._write(order, files, records)
            elif not self._read(order, files, records):
                status = Status.STALE
        except OSError as exc:
            status, code, text = Status.FAILED, exc.errno or 0, exc.strerror or str(exc)
        except CorruptChunk as exc:
            status, text = Status.CORRUPT, str(exc)
        except FormatTooNew as exc:
            status, text = Status.TOO_NEW, str(exc)
        except Exception as exc:  # noqa: BLE001 - whoever waits for this must hear of it
            status, text = Status.BUG, f"{type(exc).__name__}: {exc}"
        return End(status, code, files.written_bytes - before, text)

    def _read(self, order: Order, files: Files, records: RecordIo) -> bool:
        segment = self._segments[order.segment]
        if order.checks_entry:
            at = _ENTRIES_AT + order.slot * ENTRY_BYTES
            entry = files.pread(segment.index_fd, ENTRY_BYTES, at)
            if parse_entries(entry, self._namespace, order.slot).keys != [order.key]:
                return False
        out = self._memory[order.place : order.place + order.num_bytes]
        offset = order.slot * segment.record_bytes
        records.read(segment.slab_fd, offset, order.key, order.epoch, out)
        return True

    def _write(self, order: Order, files: Files, records: RecordIo) -> None:
        """As the tier itself: free the slot's entry, write the record, then the entry of it."""
        segment = self._segments[order.segment]
        at = _ENTRIES_AT + order.slot * ENTRY_BYTES
        if order.checks_entry:
            files.pwrite(segment.index_fd, FREE_ENTRY, at)
        stamp = (order.epoch, order.sequence)
        data = self._memory[order.place : order.place + order.num_bytes]
        records.write(segment.slab_fd, order.slot * segment.record_bytes, order.key, stamp, data)
        entry = pack_entry(order.slot, order.key, *stamp, order.num_bytes, self._namespace)
        files.pwrite(segment.index_fd, entry, at)


def main(argv: list[str]) -> int:
    """Serve the socket whose descriptor is the only argument."""
    with suppress(OSError):  # the thread that started us may be bound to a processor
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with suppress(OSError):
        os.nice(_KINDNESS)
    with socket.socket(fileno=int(argv[0])) as control:
        _Mover(control).serve()
    os._exit(0)  # lanes may hang in the medium, and nothing here is worth waiting for


if __name__ == "__main__":
    main(sys.argv[1:])
