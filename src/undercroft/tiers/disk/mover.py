"""A disk tier's mover process: a child that moves the bytes, so that no step waits for Python here.

A thread that moves a chunk takes this interpreter's lock several times, and an engine's step waits
for each (docs/explanation/design/0010-movers-threads-or-process.md). The child takes none of it. It
has no state: what is under way when it ends fails, and is tried again, here or by the next child.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import undercroft
from undercroft.clock import Clock
from undercroft.log import SparingLog
from undercroft.tiers.base import SharedMemory
from undercroft.tiers.disk import wire
from undercroft.tiers.disk.segment import OpenSegment
from undercroft.tiers.disk.wire import End, Order

__all__ = ["OUR_PROGRAM", "MoverGone", "MoverProcess"]

OUR_PROGRAM = ("undercroft.tiers.disk.mover_main",)

_LOG = logging.getLogger(__name__)
_ANSWER_S = 5.0
"""Its control thread does nothing that lasts: a child that is silent for longer is ended."""
_ENDED = "the mover process ended"
_GRACE_S = 1.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class MoverGone(Exception):
    """The process ended, or was ended, while this was under way: it may have been done or not."""


class MoverProcess:
    """Starts the child, and again when it dies; talks to it.

    Args:
        name: The tier's.
        memory: The file of level 0; opened anew here.
        namespace: The digest that records carry.
        clock: For the pauses between two children.
        num_threads: Chunks under way at once.
        program: The module that the child runs, and what it is told besides.

    Threads: any. `move` blocks for the medium, all else for 5 s at most. Until a child is ready,
    and for a while after one has died, `move` says that there is none.
    """

    def __init__(
        self,
        name: str,
        memory: SharedMemory,
        namespace: bytes,
        clock: Clock,
        num_threads: int,
        program: Sequence[str] = OUR_PROGRAM,
    ) -> None:
        self._name = name
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        # An open of its own: the locks that go with the other descriptor are not to be shared.
        self._memory_fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._begin = _address(memory.buffer)
        self._end = self._begin + len(memory.buffer)
        self._hello = wire.HELLO.pack(b"h", memory.offset, len(memory.buffer), namespace)
        self.num_threads = num_threads
        self._program = program
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._start_at_s = float("-inf")
        self._started_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._is_closed = False
        self.num_deaths = 0
        self._why_none = ""
        self._find_child()

    def place_of(self, buffer: memoryview) -> int:
        """Where in the memory `buffer` begins; -1 if it is none of it."""
        if buffer.readonly or not len(buffer):
            return -1
        address = _address(buffer)
        if self._begin <= address and address + len(buffer) <= self._end:
            return address - self._begin
        return -1

    def move(
        self, verb: int, orders: Sequence[Order], segments: Sequence[OpenSegment], *, direct: bool
    ) -> Iterator[list[End]] | None:
        """Have `orders` done, at most `wire.MAX_ORDERS`.

        Args:
            verb: Of `wire.Verb`.
            orders: What to do.
            segments: Of each; all in use by the caller until all has ended.
            direct: Whether their slabs bypass the page cache.

        Returns:
            None if there is no process now, or no way to it. Else the ends, as they come; blocks
            for the next, and raises `MoverGone` if there will be none. The buffers are left alone
            then.

        Raises:
            MoverGone: It has just ended; nothing was done.
        """
        child = self._find_child()
        if child is None:
            return None
        try:
            with self._lock:
                for segment in segments:
                    if segment.number not in child.attached:
                        self._attach(child, segment)
                lane = child.idle.pop() if child.idle else child.new_lane()
            lane.send(wire.pack_orders(verb, orders, direct=direct))
        except MoverGone:
            self._bury(child)
            raise
        except OSError:  # no descriptors for another lane
            return None
        return self._ends(child, lane, len(orders))

    def _ends(self, child: _Child, lane: _Lane, num_left: int) -> Iterator[list[End]]:
        is_done = False
        try:
            while num_left:
                ends = wire.unpack_ends(lane.receive())
                num_left -= len(ends)
                yield ends
            is_done = True
        except MoverGone:
            self._bury(child)
            raise
        finally:
            with self._lock:
                if is_done and self._child is child:
                    child.idle.append(lane)
                else:  # given up, or another thread has found it dead
                    lane.close()

    def detach(self, number: int) -> None:
        """The files of segment `number` are about to be closed here: let go of them there."""
        with self._lock:
            child = self._child
            if child is None or number not in child.attached:
                return
            child.attached.discard(number)
            with suppress(MoverGone):
                child.ask(wire.DETACH.pack(b"d", number))
                return
        self._bury(child)

    def close(self) -> None:
        """End the process: what it is asked for now is given up. Twice is fine. <= 2 s."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            child, self._child = self._child, None
            os.close(self._memory_fd)
        if child is not None:
            child.end()

    def await_ready(self, seconds: float) -> bool:
        """Wait, in real time, until a child is ready, or there is none that could become so."""
        child = self._child
        if child is not None and not child.is_ready:
            child.wait_for_word(seconds)
        return self._find_child() is not None

    def describe(self) -> str:
        """What it does now, after the number of threads that wait for it, or do it themselves."""
        child = self._child
        if child is None:
            return f"no mover process ({self._why_none or 'closed'})"
        threads = f"a mover process of {self.num_threads} threads"
        return threads if child.is_ready else f"{threads} that is starting"

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one that is ready."""
        child = self._child
        return child.pid if child is not None and child.is_ready else None

    def _find_child(self) -> _Child | None:
        child = self._child
        if child is not None and child.is_ready:
            return child
        with self._lock:
            if self._is_closed:
                return None
            child = self._child
            if child is None:
                self._start()
                return None
            try:
                child.listen()
            except MoverGone:
                pass
            else:
                return child if child.is_ready else None
        self._bury(child)
        return None

    def _start(self) -> None:
        now_s = self._clock.now_s()
        if now_s < self._start_at_s:
            return
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        try:
            self._child = _Child(self._hello, self._memory_fd, self.num_threads, self._program)
            self._started_s = now_s
        except (OSError, RuntimeError, MoverGone) as exc:
            self._why_none = f"it cannot be started: {exc}"
            self._log.warning(
                "disk tier %r: no mover process (%s): threads move its chunks, which slows steps",
                self._name,
                str(exc),  # kept by a log record, the exception would keep buffers
            )

    def _attach(self, child: _Child, segment: OpenSegment) -> None:
        message = wire.ATTACH.pack(b"a", segment.number, segment.header.record_bytes)
        child.ask(message, [segment.slab_fd, segment.index_fd])
        child.attached.add(segment.number)
        segment.before_close = self.detach

    def _bury(self, child: _Child) -> None:
        with self._lock:
            is_news = self._child is child
            if is_news:
                self._child = None
                self._why_none = "it ended; another one is started"
                self.num_deaths += 1
                now_s = self._clock.now_s()
                if now_s - self._started_s > _MAX_PAUSE_S:
                    self._pause_s = _FIRST_PAUSE_S
                self._start_at_s = now_s + self._pause_s
        if is_news:
            code = child.end()
            self._log.warning(
                "disk tier %r: its mover process ended (status %s): what was under way is tried "
                "again, by threads until there is another process",
                self._name,
                code,
            )


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Lane:
    """A socket on which one batch at a time is asked for."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours

    def send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except OSError as exc:
            self._socket.close()
            raise MoverGone(_ENDED) from exc

    def receive(self) -> bytes:
        """Blocks."""
        answer = b""
        with suppress(OSError):
            answer = self._socket.recv(wire.MAX_MESSAGE_BYTES)
        if not answer:
            raise MoverGone(_ENDED)
        return answer

    def close(self) -> None:
        self._socket.close()


class _Child:
    """One process; methods but `end` are called under the lock of `MoverProcess`."""

    def __init__(
        self, hello: bytes, memory_fd: int, num_threads: int, program: Sequence[str]
    ) -> None:
        self.attached: set[int] = set()
        self.idle: list[_Lane] = []
        self.is_ready = False
        with ExitStack() as undo:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._control.close)
            with theirs:
                self._process = _spawn(theirs.fileno(), num_threads, program)
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            socket.send_fds(self._control, [hello], [memory_fd])
            self._control.settimeout(_ANSWER_S)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_word(self, seconds: float) -> None:
        """Wait until there is something to hear. Not under the lock."""
        with suppress(OSError, ValueError):  # closed meanwhile
            select.select([self._control], [], [], seconds)

    def listen(self) -> None:
        """See whether it is ready. Does not block."""
        if self.is_ready:
            return
        self._control.settimeout(0)
        try:
            self._check(self._control.recv(wire.MAX_MESSAGE_BYTES))
        except BlockingIOError:
            return
        except OSError as exc:
            raise MoverGone(str(exc)) from exc
        finally:
            self._control.settimeout(_ANSWER_S)
        self.is_ready = True

    def ask(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Tell it something on the control socket, and wait for its yes."""
        try:
            socket.send_fds(self._control, [message], list(fds))
            self._check(self._control.recv(wire.MAX_MESSAGE_BYTES))
        except OSError as exc:  # silence, too
            raise MoverGone(f"the mover process does not answer: {exc}") from exc

    def _check(self, answer: bytes) -> None:
        if answer != b".":
            raise MoverGone(answer.decode("utf-8", "replace") or _ENDED)

    def new_lane(self) -> _Lane:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.ask(wire.LANE.pack(b"l"), [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return _Lane(ours)

    def end(self) -> int | None:
        """Let it go, or end it; its exit status, None if even that is not possible."""
        self._control.close()
        code: int | None = None
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in a system call that cannot be ended
                code = self._process.wait(_GRACE_S)
        while self.idle:
            self.idle.pop().close()
        return code


def _spawn(fd: int, num_threads: int, program: Sequence[str]) -> subprocess.Popen[bytes]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("this program has no interpreter that could be started")
    module, *told = program
    return subprocess.Popen(  # noqa: S603 - our own module
        # -P: nothing that lies in the current directory is imported.
        [sys.executable, "-P", "-m", module, str(fd), str(num_threads), str(os.getpid()), *told],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the engine's own may be a protocol
        pass_fds=[fd],
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for the engine, which ends it
    )


def _environment() -> dict[str, str]:
    env = {**os.environ, **_ONE_THREAD}
    package = str(Path(undercroft.__file__).parents[1])
    # What is installed is found anyway, and after the standard library, as here.
    if package not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        path = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{package}:{path}" if path else package
    return env
