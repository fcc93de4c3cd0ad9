"""Lines of a file that may be compressed, numbered, with one way to say that one is wrong."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from undercroft.errors import BadTrace

__all__ = ["Lines"]

_MAX_LINE_BYTES = 16 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class Lines:
    """The lines of a file, plain or gzip, each without its end. Use it as a context.

    Args:
        path: The file; which of both it is, its first bytes tell.

    Raises:
        OSError: It cannot be opened, or read.

    Threads: one. Memory: one line, which may have up to 16 MiB.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.number = 0
        """Of the line given last, from 1; 0 before the first."""
        self._file = self.path.open("rb")
        is_gzip = self._file.read(2) == _GZIP_MAGIC
        self._file.seek(0)
        self._plain: io.BufferedIOBase = (
            io.BufferedReader(gzip.GzipFile(fileobj=self._file)) if is_gzip else self._file
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        """The lines that follow; empty ones are left out.

        Raises:
            BadTrace: The compressed data end early or are damaged, a line is too long, or is not
                UTF-8.
        """
        while True:
            raw = self._next()
            if not raw:
                return
            try:
                line = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise self.bad(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
            if line:
                yield line

    def objects(self) -> Iterator[dict[str, Any]]:
        """The lines that follow, each as the JSON object that it has to be.

        Raises:
            BadTrace: As with lines, and where one is no JSON object.
        """
        for line in self:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self.bad(f"it is not JSON: {error}") from None
            if not isinstance(value, dict):
                raise self.bad(f"it is {type(value).__name__}, not a JSON object")
            yield value

    def whole(
        self, fields: dict[str, Any], name: str, default: int | None = None, *, least: int = 0
    ) -> int:
        """The whole number in field `name` of the line given last.

        Args:
            fields: The line, as an object.
            name: Of the field.
            default: If the field is not there; None: it has to be.
            least: What it may be, at least; at most 2^62.

        Raises:
            BadTrace: It is missing, no whole number, or out of range.
        """
        value = fields.get(name, default)
        if value is None:
            raise self.bad(f"{name!r} is missing; it has to be a whole number")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.bad(f"{name!r} is {_short(value)}, not a whole number")
        if not least <= value <= 1 << 62:
            raise self.bad(f"{name!r} is {_short(value)}, but must be {least} to 2^62")
        return value

    def bad(self, what: str) -> BadTrace:
        """The error that says what is wrong with the line given last."""
        return BadTrace(f"{self.path}, line {max(1, self.number)}: {what}")

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Whatever `ValueError` is raised inside is what is wrong with the line given last."""
        try:
            yield
        except ValueError as error:
            raise self.bad(str(error)) from None

    def _next(self) -> bytes:
        try:
            raw = self._plain.readline(_MAX_LINE_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.number += 1
            raise self.bad(
                f"the compressed data end early or are damaged, here or a little further down "
                f"({error}); copy the file anew"
            ) from None
        self.number += bool(raw)
        if len(raw) > _MAX_LINE_BYTES:
            raise self.bad(
                f"it is longer than {_MAX_LINE_BYTES >> 20} MiB: no trace has such lines"
            )
        return raw


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "too large"  # noqa: PLR2004 - repr of more may fail
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - a part of a line
