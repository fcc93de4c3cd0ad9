"""What all commands share: flags, exit codes, tables, JSON, colour, progress.

Results go to standard output; errors and progress to standard error. With `--json`
standard output is exactly one JSON value, an error included.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Self, TextIO

from undercroft.clock import Clock, SystemClock
from undercroft.errors import KvError

__all__ = [
    "Column",
    "CommandFailed",
    "Exit",
    "Output",
    "Progress",
    "Style",
    "Subparsers",
    "add_command",
    "output_for",
    "printable",
]

Subparsers = argparse._SubParsersAction  # noqa: SLF001 - argparse gives it no public name
Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]

_SGR: Mapping[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}
_PAINT = re.compile(rf"(\x1b\[(?:0|(?:{'|'.join(_SGR.values())})(?:;\d)*)m)")
_PROGRESS_EVERY_S = 0.1
_BAR_CELLS = 24
_USUAL_COLUMNS = 80
_MAX_HELP_COLUMNS = 100
_MIN_HELP_COLUMNS = 11
_MIN_CELL_COLUMNS = 12


class Exit(IntEnum):
    """What a command's exit code says."""

    FINE = 0
    """All is well."""
    PROBLEM = 1
    """The command did its work and found something wrong, or not what was asked for."""
    USAGE = 2
    """The command line or the settings are wrong."""
    UNREACHABLE = 3
    """Something that is needed could not be reached: a folder, a server, an engine."""


class CommandFailed(KvError):
    """A command cannot go on, for a reason of its own.

    Args:
        message: What happened, where, and what to do about it.
        code: What kind of failure it is.
    """

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        title: Its heading.
        align: Numbers go right.
        shorten: Says a cell in no more than so many characters, for lines that would be too long.
            None: it is never shortened.
    """

    title: str
    align: Literal["left", "right"] = "left"
    shorten: Callable[[str, int], str] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command writes, and how.

    Args:
        is_json: `--json`: one JSON value, and nothing else, on standard output.
        is_coloured: A person reads it on a terminal that shows colours.
        shows_progress: Standard error is a terminal.
        can_redraw: Standard output is a terminal whose cursor can be moved.
        stdout: Results.
        stderr: Errors, progress.
        clock: Time, for progress.
    """

    is_json: bool
    is_coloured: bool
    shows_progress: bool
    can_redraw: bool
    stdout: TextIO
    stderr: TextIO
    clock: Clock

    def say(self, line: str = "") -> None:
        """A line of the result, for people; nothing with `--json`."""
        if not self.is_json:
            _write(self.stdout, f"{line}\n")

    def data(self, value: object) -> None:
        """The result as JSON, with `--json` only; call it once.

        Numbers keep their units in their names, as everywhere. `Path`, `bytes` (as hex digits)
        and sets are fine.
        """
        if self.is_json:
            text = json.dumps(value, indent=2, ensure_ascii=False, default=_as_json)
            if not _can_encode(self.stdout, text):
                text = json.dumps(value, indent=2, default=_as_json)
            self.stdout.write(f"{text}\n")

    def error(self, line: str) -> None:
        """The last line of a command that could not do its work, on standard error."""
        self.stdout.flush()
        _write(self.stderr, f"{self.paint('error:', 'red')} {printable(line)}\n")

    def paint(self, text: str, *styles: Style) -> str:
        """`text` in a style, or as it is where colours are off."""
        if not self.is_coloured or not styles:
            return text
        return f"\x1b[{';'.join(_SGR[style] for style in styles)}m{text}\x1b[0m"

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Aligned rows under a heading, for people; nothing with `--json`.

        Cells may be painted. Other control characters in cells are shown as `?`, so that a name on
        disk cannot move the cursor. What does not fit into a line of the terminal (80 columns where
        there is none) is shortened in the columns that know how; those hold no paint.
        """
        if self.is_json:
            return
        clean = _clean if self.is_coloured else printable
        body = [[clean(cell) for cell in row] for row in rows]
        widths = [
            max(_width(c.title), *(_width(row[i]) for row in body), 0)
            for i, c in enumerate(columns)
        ]
        _fit(columns, body, widths, _columns(self.stdout))
        head = [c.title for c in columns]
        for number, row in enumerate([head, *body]):
            cells = [
                _pad(cell, width, column.align)
                for cell, width, column in zip(row, widths, columns, strict=True)
            ]
            line = "  ".join(cells).rstrip()
            self.say(self.paint(line, "bold") if number == 0 else line)

    def progress(self, what: str, total: int | None = None) -> Progress:
        """A line that tells how far long work is, on a terminal; nothing elsewhere.

        Args:
            what: What is being done: "reading chunks".
            total: How many steps there are, if that is known.
        """
        return Progress(self, what, total)


class Progress:
    """How far long work is. Use it as a context; its line goes when the work ends.

    Threads: one at a time.
    """

    def __init__(self, output: Output, what: str, total: int | None) -> None:
        self._output = output
        self._what = what
        self._total = total
        self._done = 0
        self._shown_s = float("-inf")

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if self._output.shows_progress:
            self._output.stderr.write("\r\x1b[K")
            self._output.stderr.flush()

    def step(self, num_steps: int = 1, *, note: str = "") -> None:
        """So many steps are done. Cost: a clock read; ten lines a second at most are written."""
        self._done += num_steps
        if self._output.shows_progress:
            now_s = self._output.clock.now_s()
            if now_s - self._shown_s >= _PROGRESS_EVERY_S:
                self._shown_s = now_s
                self._show(note)

    def _show(self, note: str = "") -> None:
        if not self._output.shows_progress:
            return
        counted = str(self._done)
        if self._total:
            share = min(1.0, self._done / self._total)
            filled = int(share * _BAR_CELLS)
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            counted = f"[{bar}] {share:4.0%}  {self._done}/{self._total}"
        # What wraps cannot be taken back.
        line = printable(f"{self._what}  {counted}  {note}".rstrip())[
            : _columns(self._output.stderr)
        ]
        _write(self._output.stderr, f"\r\x1b[K{line}")
        self._output.stderr.flush()


def add_command(
    subparsers: Subparsers[argparse.ArgumentParser],
    name: str,
    summary: str,
    *,
    description: str | None = None,
    with_json: bool = True,
    takes_rest: bool = False,
) -> argparse.ArgumentParser:
    """A subcommand's parser, with the flags that all have.

    Args:
        subparsers: As handed to `add_parser`.
        name: What is typed.
        summary: One line, for the list of commands.
        description: More, for the command's own `--help`; `summary` if it is None. Paragraphs are
            filled to the terminal's width; one that is indented is shown as it is.
        with_json: False for commands that only start another program.
        takes_rest: Options the command does not know are no error: they are in `args.rest`, in
            their order, with all that follows `--`. `args.words` is what came before `--`.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=_filled(description or summary),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if with_json:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON value instead of text"
        )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="no colours; also with NO_COLOR set, and where the output is no terminal",
    )
    parser.set_defaults(takes_rest=takes_rest)
    return parser


def output_for(
    args: argparse.Namespace,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> Output:
    """The output that a command line asked for.

    Args:
        args: What the parser of `add_command` gave.
        stdout: Instead of the process's.
        stderr: Instead of the process's.
        environ: Instead of the process's environment: `NO_COLOR` and `TERM` are read.
    """
    # Where the process was started with one of them closed, Python has None.
    out = stdout or sys.stdout or io.StringIO()
    err = stderr or sys.stderr or io.StringIO()
    environ = os.environ if environ is None else environ
    dumb = environ.get("TERM") == "dumb"
    is_json = bool(getattr(args, "json", False))
    plain = is_json or dumb or bool(environ.get("NO_COLOR")) or getattr(args, "no_color", False)
    return Output(
        is_json=is_json,
        is_coloured=not plain and out.isatty(),
        shows_progress=err.isatty() and not dumb,
        can_redraw=out.isatty() and not dumb,
        stdout=out,
        stderr=err,
        clock=SystemClock(),
    )


def _columns(stream: TextIO) -> int:
    """How much of a line a terminal shows without wrapping."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or _USUAL_COLUMNS) - 1


def _can_encode(stream: TextIO, text: str) -> bool:
    """Not where a locale lacks a letter, nor a name on disk that is no text at all."""
    try:
        text.encode(stream.encoding or "utf-8", stream.errors or "strict")
    except UnicodeEncodeError:
        return False
    return True


def _write(stream: TextIO, text: str) -> None:
    """Write for people: what `stream` cannot encode as escapes."""
    if not _can_encode(stream, text):
        encoding = stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)


def _filled(text: str) -> str:
    """The paragraphs of `text` as wide as the terminal, within reason."""
    width = shutil.get_terminal_size().columns - 2
    width = max(_MIN_HELP_COLUMNS, min(width, _MAX_HELP_COLUMNS))
    return "\n\n".join(
        part if part.startswith(" ") else textwrap.fill(part, width, break_on_hyphens=False)
        for part in text.split("\n\n")
    )


def _as_json(value: object) -> Any:  # noqa: ANN401 - what json.dumps takes
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def printable(text: str) -> str:
    """`text` with a `?` for every control character: nothing in it moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _clean(text: str) -> str:
    """As `printable`, but with our own colours."""
    parts = _PAINT.split(text)
    parts[::2] = map(printable, parts[::2])
    return "".join(parts)


def _width(cell: str) -> int:
    """How many columns `cell` takes, colours aside."""
    width = 0
    in_colour = False
    for character in cell:
        if character == "\x1b":
            in_colour = True
        if not in_colour:
            width += 1
        elif character == "m":
            in_colour = False
    return width


def _fit(columns: Sequence[Column], body: list[list[str]], widths: list[int], most: int) -> None:
    """Shorten cells, and `widths` with them, as far as a line has to be, and can be."""
    for i, column in enumerate(columns):
        excess = sum(widths) + 2 * (len(widths) - 1) - most
        if column.shorten is None or excess <= 0:
            continue
        least = max(_width(column.title), _MIN_CELL_COLUMNS)
        widths[i] = max(min(least, widths[i]), widths[i] - excess)
        for row in body:
            if len(row[i]) > widths[i]:
                row[i] = column.shorten(row[i], widths[i])


def _pad(cell: str, width: int, align: Literal["left", "right"]) -> str:
    gap = " " * (width - _width(cell))
    return gap + cell if align == "right" else cell + gap
