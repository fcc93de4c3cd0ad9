"""The mover process of a disk tier: reads, verifies and writes records, and keeps nothing.

Started by `undercroft.tiers.disk.mover`. It maps the file that level 0 lies in, is handed the
descriptors of segments, and does what the lanes ask. It ends when its control socket does, or its
parent: so with the engine, however that ends. An order under way then is an incomplete write, as
after any crash; the segment's lock, which this process shares through the descriptor, keeps others
out until it is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from undercroft.clock import SystemClock
from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers.disk import wire
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.records import RecordIo, record_bytes
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    FREE_ENTRY,
    entry_offset,
    pack_entry,
    parse_entries,
)
from undercroft.tiers.disk.wire import End, Order, Status, Verb

__all__ = ["main", "serve"]

_MAX_FDS = 2
_CLOCK = SystemClock()
_GATHER_S = 0.002
_LOOK_S = 1.0
_KINDNESS = 5
"""Steps go first where processors are few: an engine's threads are not niced."""


@dataclass(frozen=True, slots=True)
class _Segment:
    slab_fd: int
    index_fd: int
    record_bytes: int


class _Mover:
    """Threads: `control` and each lane have one, and a pool does what the lanes are asked for."""

    def __init__(
        self, control: socket.socket, num_threads: int, engine_pid: int, files: Files
    ) -> None:
        self._control = control
        self._files = files
        self._engine_pid = engine_pid
        self._segments: dict[int, _Segment] = {}
        self._memory = memoryview(b"")
        self._namespace = bytes(32)
        self._records: dict[bool, RecordIo] = {}
        self._pool = _started_pool(num_threads)

    def serve(self) -> None:
        """Until nobody is at the other end, who may go between a question and its answer."""
        self._control.settimeout(_LOOK_S)
        with suppress(ConnectionError):
            while True:
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 256, _MAX_FDS)
                except TimeoutError:
                    # What the engine forked later has the other end, too, and may outlive it.
                    if os.getppid() != self._engine_pid:
                        return
                    continue
                if not message:
                    return
                self._control.send(self._answer(message, fds))

    def _answer(self, message: bytes, fds: list[int]) -> bytes:
        try:
            self._obey(message, fds)
        except (OSError, ValueError, KeyError) as exc:
            return f"{type(exc).__name__}: {exc}".encode()[:256]
        return b"."

    def _obey(self, message: bytes, fds: list[int]) -> None:
        kind = message[:1]
        if kind == b"h":
            _, offset, length, self._namespace = wire.HELLO.unpack(message)
            pool = AlignedPool()
            for direct in (False, True):
                self._records[direct] = RecordIo(self._files, self._namespace, pool, direct)
            whole = memoryview(mmap.mmap(fds[0], 0))
            os.close(fds[0])
            if offset + length > len(whole):
                raise ValueError(f"{offset} + {length} bytes of a file of {len(whole)}")
            self._memory = whole[offset : offset + length]
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
        ends: SimpleQueue[End] = SimpleQueue()
        with lane, suppress(OSError):
            while message := lane.recv(wire.MAX_MESSAGE_BYTES):
                verb, direct, orders = wire.unpack_orders(message)
                records = self._records[direct]
                for number, order in enumerate(orders):
                    self._pool.submit(self._perform, verb, number, order, records, ends)
                num_left = len(orders)
                while num_left:
                    some = _gathered(ends, num_left)
                    num_left -= len(some)
                    lane.send(wire.pack_ends(some))

    def _perform(
        self, verb: int, number: int, order: Order, records: RecordIo, ends: SimpleQueue[End]
    ) -> None:
        status, code, text = Status.DONE, 0, ""
        try:
            if verb == Verb.WRITE:
                self._write(order, records)
            elif verb == Verb.FREE:
                self._free(self._segments[order.segment], order)
            elif not self._read(order, records):
                status = Status.STALE
        except OSError as exc:
            status, code, text = Status.FAILED, exc.errno or 0, exc.strerror or str(exc)
        except CorruptChunk as exc:
            status, text = Status.CORRUPT, str(exc)
        except FormatTooNew as exc:
            status, text = Status.TOO_NEW, str(exc)
        except Exception as exc:  # noqa: BLE001 - whoever waits for this must hear of it
            status, text = Status.BUG, f"{type(exc).__name__}: {exc}"
        ends.put(End(number, status, code, _written_bytes(verb, order), text))

    def _read(self, order: Order, records: RecordIo) -> bool:
        segment = self._segments[order.segment]
        if order.checks_entry:
            entry = self._files.pread(segment.index_fd, ENTRY_BYTES, entry_offset(order.slot))
            if parse_entries(entry, self._namespace, order.slot).keys != [order.key]:
                return False
        out = self._memory[order.place : order.place + order.num_bytes]
        offset = order.slot * segment.record_bytes
        records.read(segment.slab_fd, offset, order.key, order.epoch, out)
        return True

    def _write(self, order: Order, records: RecordIo) -> None:
        """As the tier itself: free the slot's entry, write the record, then the entry of it."""
        segment = self._segments[order.segment]
        if order.checks_entry:
            self._free(segment, order)
        stamp = (order.epoch, order.sequence)
        data = self._memory[order.place : order.place + order.num_bytes]
        records.write(segment.slab_fd, order.slot * segment.record_bytes, order.key, stamp, data)
        entry = pack_entry(order.slot, order.key, *stamp, order.num_bytes, self._namespace)
        self._files.pwrite(segment.index_fd, entry, entry_offset(order.slot))

    def _free(self, segment: _Segment, order: Order) -> None:
        self._files.pwrite(segment.index_fd, FREE_ENTRY, entry_offset(order.slot))


def _started_pool(num_threads: int) -> ThreadPoolExecutor:
    """With all of its threads: where no more may be started, that shows before any order."""
    pool, gate = ThreadPoolExecutor(num_threads), threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(gate.wait)
    finally:
        gate.set()
    return pool


def _gathered(ends: SimpleQueue[End], num_left: int) -> list[End]:
    """The next end, and those that come soon after: who waits is woken once for several."""
    some = [ends.get()]
    deadline_s = _CLOCK.now_s() + _GATHER_S
    while len(some) < num_left:
        try:
            some.append(ends.get(timeout=max(0.0, deadline_s - _CLOCK.now_s())))
        except Empty:
            break
    return some


def _written_bytes(verb: int, order: Order) -> int:
    """What an order writes at most, in whole pages: it counts also if it failed."""
    if verb == Verb.READ:
        return 0
    entries = PAGE_BYTES * (1 + (verb == Verb.WRITE and order.checks_entry))
    return entries + (record_bytes(order.num_bytes) if verb == Verb.WRITE else 0)


def _processors(engine_pid: int) -> set[int]:
    """Those that any thread of the engine may run on.

    The thread that started us may be bound to one, as those that compute on a CPU are; what the
    whole engine is bound to, by an operator or by itself, holds for us.
    """
    found: set[int] = set()
    for task in Path(f"/proc/{engine_pid}/task").iterdir():
        with suppress(OSError):  # that thread has ended
            found |= os.sched_getaffinity(int(task.name))
    return found


def serve(argv: list[str], files: Files) -> None:
    """Until the engine ends, or lets go.

    Args:
        argv: The descriptor of a socket to serve, a number of threads, the engine's process.
        files: The system calls.
    """
    engine_pid = int(argv[2])
    with suppress(OSError):
        os.sched_setaffinity(0, _processors(engine_pid))
    with suppress(OSError):
        os.nice(_KINDNESS)
    with socket.socket(fileno=int(argv[0])) as control:
        _Mover(control, int(argv[1]), engine_pid, files).serve()


def main(argv: list[str]) -> None:
    """As `serve`, with the system's own calls."""
    serve(argv, Files())
    os._exit(0)  # lanes may hang in the medium, and nothing here is worth waiting for


if __name__ == "__main__":
    main(sys.argv[1:])
