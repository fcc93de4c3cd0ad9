"""Read a trace file of whatever format there is a reader for."""

from __future__ import annotations

from pathlib import Path

from undercroft import plugins
from undercroft.errors import BadTrace
from undercroft.traces.base import Trace, TraceReader
from undercroft.traces.lines import Lines

__all__ = ["load"]


def load(path: Path | str, format: str | None = None) -> Trace:  # noqa: A002 - what users call it
    """The trace in a file, plain or compressed with gzip.

    Args:
        path: The file.
        format: Name of a reader, an entry point of the group `undercroft.traces`; None: the first
            that the file's first line matches.

    Raises:
        BadTrace: A line is wrong, or no reader knows the format; names the file and the line.
        UnknownPlugin: No reader is called `format`.
        OSError: The file cannot be read.
    """
    reader = _made(format) if format is not None else _matching(path)
    with Lines(path) as lines:
        trace = reader.read(lines)
        if not trace.num_requests:
            raise lines.bad("the file has no requests")
        return trace


def _made(name: str) -> TraceReader:
    reader: TraceReader = plugins.find("traces", name)()
    return reader


def _matching(path: Path | str) -> TraceReader:
    names = plugins.names("traces")
    with Lines(path) as lines:
        first = next(iter(lines), "")
        for name in names:
            reader = _made(name)
            if reader.matches(first):
                return reader
        raise BadTrace(
            f"{path}, line {max(1, lines.number)}: no format is known that begins so; there are "
            f"{', '.join(names) or 'none'}"
        )
