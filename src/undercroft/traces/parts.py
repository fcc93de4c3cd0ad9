"""The files of a recording: each a trace by itself, and all of them together of a bounded size."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes, token_hex

from undercroft.clock import Clock
from undercroft.log import SparingLog
from undercroft.traces.prefixes import PrefixNumbers
from undercroft.traces.writer import CompactWriter, Line

__all__ = ["NUM_PARTS", "Parts", "Recorded"]

_LOG = logging.getLogger(__name__)

NUM_PARTS = 8
"""Into so many parts a recording's bytes are divided; the oldest are removed, one at a time."""
_MEMBERS_A_PART, _MOST_MEMBER_BYTES = 16, 128 << 10
_MAX_LINE_BYTES = 256
_MAX_PREFIXES = 1 << 20
_MAX_SESSIONS = 1 << 16
_FLUSH_S = 30.0
_RETRY_S = 30.0
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.02
_NAME = re.compile(r"trace-[0-9a-f]{8}-\d{4,}\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that has ended.

    Args:
        arrival_s: When it came, by the recorder's clock.
        input_tokens: See `undercroft.traces.writer.Line`, as for `output_tokens` and `kind`.
        output_tokens: The same.
        keys: What names each of its prompt's prefixes of whole blocks, the shortest first.
        session: What the engine calls its session, empty if it says nothing.
        kind: The same.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[bytes]
    session: bytes = b""
    kind: int = 0


class Parts:
    """Writes requests into `trace-<random>-<number>.jsonl.gz` files of a folder.

    Several processes may share the folder; a part that is being written is locked, and never
    removed by others.

    Args:
        folder: Made at the first request, if it is not there, for nobody else to read.
        max_bytes: Of all parts in the folder; never exceeded by one process. Several keep to it
            as long as they are fewer than `NUM_PARTS`.
        block_tokens: Tokens of a block.
        kinds: What a request's `kind` means, for the header.
        clock: For waits, and for how often something is logged.
        results: Counts the requests, under `written` and `not_written`.

    Threads: one at a time. Nothing here raises. Memory: 24 MiB and some at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        block_tokens: int,
        clock: Clock,
        results: Counter[str],
        kinds: str = "",
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._part_bytes = max_bytes // NUM_PARTS
        self._member_bytes = min(self._part_bytes // _MEMBERS_A_PART, _MOST_MEMBER_BYTES)
        self._block_tokens = block_tokens
        self._fields = {"name": "recorded by Undercroft"} | ({"k": kinds} if kinds else {})
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._results = results
        self._salt = token_bytes(32)
        self._owner = token_hex(4)
        self._num_opened = 0
        self._file: io.FileIO | None = None
        self._writer: CompactWriter
        self._numbers: PrefixNumbers
        self._sessions: dict[bytes, int]
        self._begin_s = self._flush_by_s = 0.0
        self._last_ms = 0
        self._retry_s = float("-inf")
        self._num_lost = self._lost_in_waiting = 0

    def lose(self, num_requests: int) -> None:
        """So many requests are missing here; the next line says so."""
        self._num_lost += num_requests

    def add(self, request: Recorded) -> None:
        """Write a request that came no earlier than those before it, some time soon."""
        is_in = False
        try:
            is_in = self._is_open(request) and (self._put(request) or self._put_in_next(request))
            if is_in and self._writer.is_due:
                self._flush()
        except OSError as error:
            self._fail(error)
        if not is_in:
            self._miss(1)

    def tick(self) -> None:
        """Write what has waited for long."""
        if self._file is not None and self._clock.now_s() >= self._flush_by_s:
            try:
                self._flush()
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """Write what waits, and the totals."""
        if self._file is None:
            return
        try:
            self._finish()
        except OSError as error:
            self._fail(error)

    def _is_open(self, request: Recorded) -> bool:
        if self._file is not None:
            return True
        now_s = self._clock.now_s()
        if now_s < self._retry_s:
            return False
        self._retry_s = now_s + _RETRY_S
        if self._num_opened == 0:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder, self._clock):
            self._make_room()
            self._open()
        self._begin_s, self._last_ms = request.arrival_s, 0
        self._flush_by_s = now_s + _FLUSH_S
        self._retry_s = float("-inf")
        return True

    def _open(self) -> None:
        self._num_opened += 1
        path = self._folder / f"trace-{self._owner}-{self._num_opened:04d}.jsonl.gz"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = io.FileIO(os.open(path, flags, 0o600), "wb")
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._writer = CompactWriter(
                file,
                block_tokens=self._block_tokens,
                fields=self._fields,
                member_bytes=self._member_bytes,
            )
        except OSError:
            with suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)
            raise
        self._file = file
        self._numbers = PrefixNumbers(self._salt, _MAX_PREFIXES)
        self._sessions = {}

    def _put(self, request: Recorded) -> bool:
        """Add a line to this part; False: it has no numbers left."""
        place = self._numbers.place(request.keys)
        if place is None:
            return False
        self._last_ms = max(self._last_ms, int(1e3 * (request.arrival_s - self._begin_s)))
        lost, self._num_lost = self._num_lost, 0
        self._lost_in_waiting += lost
        self._writer.add(
            Line(
                self._last_ms,
                request.input_tokens,
                request.output_tokens,
                *place,
                session=self._session(request.session),
                kind=request.kind,
                num_lost=lost,
            )
        )
        return True

    def _put_in_next(self, request: Recorded) -> bool:
        """What is too long for a whole part is left out."""
        self._finish()
        return self._is_open(request) and self._put(request)

    def _session(self, name: bytes) -> int:
        if not name:
            return -1
        mark = blake2b(name, digest_size=8, key=self._salt).digest()
        number = self._sessions.get(mark)
        if number is None:
            number = len(self._sessions)
            if number == _MAX_SESSIONS:
                return -1
            self._sessions[mark] = number
        return number

    def _flush(self) -> None:
        """Put what waits into the file, which ends if there is no room for as much again."""
        if self._file is None:
            return
        writer, num_lines = self._writer, self._writer.num_waiting
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self._folder))
        try:
            writer.flush()
        except OSError:
            self._miss(num_lines)
            raise
        self._results["written"] += num_lines
        self._lost_in_waiting = 0
        self._flush_by_s = self._clock.now_s() + _FLUSH_S
        if writer.num_bytes + self._member_bytes + 2 * _MAX_LINE_BYTES > self._part_bytes:
            self._finish()

    def _finish(self) -> None:
        """End this part; the next request begins another one."""
        if self._file is not None and self._writer.num_waiting:
            self._flush()
        if self._file is not None:
            self._writer.finish(self._num_lost)
            self._num_lost = 0
            file, self._file = self._file, None
            file.close()

    def _miss(self, num_requests: int) -> None:
        self._results["not_written"] += num_requests
        self._num_lost += num_requests

    def _fail(self, error: OSError) -> None:
        """Let go of the part, cut to what is whole in it; another one is tried later."""
        self._log.warning(
            "requests are not recorded in %s for %g s or longer: %s; the metric "
            "recorded_requests counts them",
            self._folder,
            _RETRY_S,
            error,
        )
        self._retry_s = self._clock.now_s() + _RETRY_S
        if self._file is None:
            return
        self._miss(self._writer.num_waiting)
        self._num_lost += self._lost_in_waiting
        self._lost_in_waiting = 0
        file, self._file = self._file, None
        with suppress(OSError):
            file.truncate(self._writer.num_bytes)
        with suppress(OSError):
            file.close()

    # --- room ---------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Remove the oldest parts until there is room for another one.

        Raises:
            OSError: There cannot be.
        """
        ended, total_bytes = [], self._part_bytes
        for part in sorted(self._parts()):
            _, num_bytes, path = part
            if _is_being_written(path):
                total_bytes += max(num_bytes, self._part_bytes)
            else:
                ended.append(part)
                total_bytes += num_bytes
        for _, num_bytes, path in ended:
            if total_bytes > self._max_bytes:
                path.unlink(missing_ok=True)
                total_bytes -= num_bytes
        if total_bytes > self._max_bytes:
            raise OSError(
                errno.EDQUOT, "other engines write as much as record_max_bytes", str(self._folder)
            )

    def _parts(self) -> list[tuple[int, int, Path]]:
        """Of each part: when it was written last, its bytes, and where it is."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return found


def _is_being_written(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _locked(folder: Path, clock: Clock) -> Iterator[None]:
    """Within, no other process makes room in the folder, or opens a part.

    Raises:
        BlockingIOError: One does so all the time.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for num_left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if num_left == 0:
                    raise
                clock.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(fd)
