"""Writes the compact format of traces, request by request; docs/reference/traces.md has it.

Each write is a whole gzip member, so the file can be read to its last member at any time, also
after its writer was killed. What is known only at the end, the totals, is written over blanks that
the header, which is not compressed, keeps for them.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from undercroft.errors import Bug
from undercroft.traces.base import Trace
from undercroft.traces.compact import FORMAT

__all__ = ["CompactWriter", "File", "Line", "write_trace"]

_NOT_COMPRESSED, _COMPRESSED = 0, 6
_MEMBER_BYTES = 128 << 10
_TOTALS = ("requests", "unique_blocks", "block_refs", "lost")
_MOST = (1 << 63) - 1


class Line(NamedTuple):
    """One request.

    Args:
        time_ms: Since the trace began; never less than that of the line before.
        input_tokens: Of its prompt.
        output_tokens: That it generated.
        deepest: The id of its deepest block that an earlier line has, -1 if none has one.
        num_new: How many blocks it has below that one; they get the next ids.
        session: A number of its session, -1 if it is not known.
        kind: A number whose meaning the header says, 0 if it is not known.
        num_lost: How many requests are missing between the line before and this one.
    """

    time_ms: int
    input_tokens: int
    output_tokens: int
    deepest: int
    num_new: int
    session: int = -1
    kind: int = 0
    num_lost: int = 0


class File(Protocol):
    """What is written to, such as `open(path, "wb", buffering=0)` or an `io.BytesIO`."""

    def write(self, data: bytes, /) -> int | None:
        """Write all or some of `data`; returns how much of it."""
        ...

    def seek(self, offset: int, /) -> int:
        """Go to a place counted from the start."""
        ...


class CompactWriter:
    """One trace, in the making.

    Args:
        file: Empty, and the caller's to close.
        block_tokens: Tokens of a block.
        fields: More for the header: `name`, `source`, `licence`, what `k` means.
        member_bytes: How many bytes of lines make a gzip member.

    Raises:
        OSError: Of any call but `add`, as `file` raises it. What was in the file before the call is
            still whole up to `num_bytes`; the lines that were to be written are lost.

    Threads: one at a time. Cost: some 2 us a request; memory 4 bytes a block.
    """

    def __init__(
        self,
        file: File,
        *,
        block_tokens: int,
        fields: Mapping[str, object] | None = None,
        member_bytes: int = _MEMBER_BYTES,
    ) -> None:
        self._file = file
        self._fields = dict(fields or {}) | {"block_tokens": block_tokens, "format": FORMAT}
        self._member_bytes = member_bytes
        self._lines: list[str] = []
        self._waiting_bytes = 0
        self._depths = array("i")
        self._last_ms = 0
        self.num_requests = self.num_references = self.num_lost = 0
        self.num_bytes = 0
        """In the file."""
        self._write(self._header({}))

    @property
    def num_blocks(self) -> int:
        """Different blocks so far: the next id."""
        return len(self._depths)

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._lines)

    @property
    def most_waiting_bytes(self) -> int:
        """What the lines that wait can come to in the file; usually it is a fifth of that."""
        return self._waiting_bytes + (self._waiting_bytes >> 8) + 64

    @property
    def is_due(self) -> bool:
        """Whether enough lines wait to make a member of them."""
        return self._waiting_bytes >= self._member_bytes

    def add(self, line: Line) -> None:
        """Append one request. Writes nothing yet: see `flush`."""
        if not -1 <= line.deepest < self.num_blocks or line.num_new < 0:
            raise Bug(f"no block {line.deepest}, or {line.num_new} new: {self.num_blocks} so far")
        if line.time_ms < self._last_ms:
            raise Bug(f"a request at {line.time_ms} ms after one at {self._last_ms} ms")
        self._last_ms = line.time_ms
        depth = self._depths[line.deepest] if line.deepest >= 0 else 0
        self._depths.extend(range(depth + 1, depth + line.num_new + 1))
        self.num_requests += 1
        self.num_references += depth + line.num_new
        self.num_lost += line.num_lost
        text = (
            f'{{"t":{line.time_ms},"in":{line.input_tokens},"out":{line.output_tokens},'
            f'"p":{line.deepest},"n":{line.num_new}'
        )
        if line.session >= 0:
            text += f',"s":{line.session}'
        if line.kind:
            text += f',"k":{line.kind}'
        if line.num_lost:
            text += f',"lost":{line.num_lost}'
        text += "}\n"
        self._lines.append(text)
        self._waiting_bytes += len(text)

    def flush(self) -> None:
        """Put what waits into the file."""
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines.clear()
        self._waiting_bytes = 0
        self._write(gzip.compress(data, _COMPRESSED, mtime=0))

    def finish(self, num_lost: int = 0) -> None:
        """Put what waits into the file, and the totals into its header.

        Args:
            num_lost: Requests that are missing after the last line.
        """
        self.flush()
        self.num_lost += num_lost
        totals = (self.num_requests, self.num_blocks, self.num_references, self.num_lost)
        header = self._header(dict(zip(_TOTALS, totals, strict=True)))
        self._file.seek(0)
        self._write_all(header)
        self._file.seek(self.num_bytes)

    def _header(self, totals: Mapping[str, int]) -> bytes:
        """As many bytes whatever the totals are."""
        width = len(json.dumps(self._fields | dict.fromkeys(_TOTALS, _MOST)))
        text = json.dumps(self._fields | dict(totals)).ljust(width)
        return gzip.compress(f"{text}\n".encode(), _NOT_COMPRESSED, mtime=0)

    def _write(self, data: bytes) -> None:
        self._write_all(data)
        self.num_bytes += len(data)

    def _write_all(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._file.write(data[done:]) or 0


def write_trace(trace: Trace, file: File, fields: Mapping[str, object] | None = None) -> None:
    """Write a whole trace.

    Args:
        trace: What to write.
        file: Empty, and the caller's to close.
        fields: More for the header, such as what `k` means.
    """
    writer = CompactWriter(
        file, block_tokens=trace.block_tokens, fields={"name": trace.name} | dict(fields or {})
    )
    columns = (
        trace.times_ms,
        trace.input_tokens,
        trace.output_tokens,
        trace.deepest,
        trace.num_new,
        trace.sessions,
        trace.kinds,
    )
    for values in zip(*(column.tolist() for column in columns), strict=True):
        writer.add(Line(*values))
        if writer.is_due:
            writer.flush()
    writer.finish()
