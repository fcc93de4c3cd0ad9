"""Tables, JSON, colours and progress: for people on a terminal, plain everywhere else."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import termios
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from undercroft.cli.output import Column, Output, output_for


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def made(*, stdout: TextIO, stderr: TextIO | None = None, **flags: bool) -> Output:
    args = argparse.Namespace(**{"json": False, "no_color": False} | flags)
    return output_for(args, stdout=stdout, stderr=stderr or io.StringIO(), environ={})


@pytest.mark.parametrize(
    ("flags", "environ", "is_coloured"),
    [
        ({}, {}, True),
        ({"no_color": True}, {}, False),
        ({"json": True}, {}, False),
        ({}, {"NO_COLOR": "1"}, False),
        ({}, {"NO_COLOR": ""}, True),
        ({}, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals(
    flags: dict[str, bool], environ: dict[str, str], is_coloured: bool
) -> None:
    """On a terminal unless it, the user or the environment says no; never into a pipe."""
    args = argparse.Namespace(**flags)
    for stdout, expected in ((Terminal(), is_coloured), (io.StringIO(), False)):
        output = output_for(args, stdout=stdout, stderr=io.StringIO(), environ=environ)
        assert ("\x1b" in output.paint("x", "red", "bold")) is expected


def all_of(terminal: int) -> str:
    """What was written to a pseudo-terminal whose other end is closed."""
    seen = b""
    with suppress(OSError):  # EIO at its end
        while piece := os.read(terminal, 4096):
            seen += piece
    os.close(terminal)
    return seen.decode()


def test_a_real_terminal_is_seen_as_one() -> None:
    """A pseudo-terminal, as a shell gives it, gets colours and progress."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        output = output_for(argparse.Namespace(), stdout=stream, stderr=stream, environ={})
        output.say(output.paint("x", "green"))
        with output.progress("reading", 4) as progress:
            progress.step(2)
    seen = all_of(ours)
    assert "\x1b[32mx\x1b[0m" in seen
    assert "50%  2/4" in seen
    assert seen.endswith("\r\x1b[K")


def test_progress_does_not_wrap_on_a_narrow_terminal() -> None:
    """A line that wraps cannot be taken back; nothing is shown of what does not fit."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 20))
    with open(theirs, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        output = output_for(argparse.Namespace(), stdout=stream, stderr=stream, environ={})
        with output.progress("reading every chunk of the store", 4) as progress:
            progress.step(1, note="\x1b[2Jseg-1\n")
    lines = all_of(ours).replace("\x1b[K", "").split("\r")
    assert max(map(len, lines)) == 19
    assert "\x1b" not in "".join(lines)


def test_progress_is_silent_into_a_file() -> None:
    """A log file gets no progress line."""
    stderr = io.StringIO()
    with made(stdout=io.StringIO(), stderr=stderr).progress("reading", 2) as progress:
        progress.step()
    assert stderr.getvalue() == ""


def test_progress_on_a_terminal_beside_piped_results() -> None:
    """`undercroft verify | tee log` still shows how far it is; the log has results only."""
    stdout, stderr = io.StringIO(), Terminal()
    output = made(stdout=stdout, stderr=stderr)
    with output.progress("reading") as progress:
        for _ in range(1000):
            progress.step()
    output.say("done")
    assert stdout.getvalue() == "done\n"
    assert "reading  0" in stderr.getvalue()
    assert stderr.getvalue().count("reading") < 100


def test_tables_align_also_when_painted() -> None:
    """Numbers to the right, text to the left, colours without width, nothing trailing."""
    stdout = Terminal()
    output = made(stdout=stdout)
    output.table(
        [Column("level"), Column("bytes", "right")],
        [["host", "7"], [output.paint("disk", "red"), "12345"], ["evil\x07\nname", "1"]],
    )
    lines = stdout.getvalue().splitlines()
    plain = [
        line.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "") for line in lines
    ]
    assert plain == [
        "level       bytes",
        "host            7",
        "disk        12345",
        "evil??name      1",
    ]


def test_a_name_on_disk_cannot_move_the_cursor() -> None:
    """Of escapes only colours pass, in tables and in errors: not a cleared screen, not a title."""
    stdout, stderr = Terminal(), Terminal()
    output = made(stdout=stdout, stderr=stderr)
    evil = "\x1b[2J\x1b[Hgone\x1b]0;title\x07"
    output.table([Column("model")], [[output.paint(evil, "red")]])
    output.error(evil)
    for stream in (stdout, stderr):
        last = stream.getvalue().splitlines()[-1]
        assert "?[2J?[Hgone?]0;title?" in last
        assert last.count("\x1b") == 2  # colour on, colour off


def test_an_empty_table_is_its_heading() -> None:
    """No rows is not an error."""
    stdout = io.StringIO()
    made(stdout=stdout).table([Column("key"), Column("age", "right")], [])
    assert stdout.getvalue() == "key  age\n"


def test_json_is_the_only_thing_on_stdout() -> None:
    """With `--json`, text and tables are left out; bytes, paths and sets are data."""
    stdout = io.StringIO()
    output = made(stdout=stdout, json=True)
    output.say("for people")
    output.table([Column("x")], [["1"]])
    output.data({"key": b"\x01\xff", "path": Path("/nvme/kv"), "names": {"b", "a"}})
    assert json.loads(stdout.getvalue()) == {
        "key": "01ff",
        "path": "/nvme/kv",
        "names": ["a", "b"],
    }


def test_without_json_data_is_left_out() -> None:
    """A command says both ways of its result; one of them is printed."""
    stdout = io.StringIO()
    output = made(stdout=stdout)
    output.data({"x": 1})
    output.say("x is 1")
    assert stdout.getvalue() == "x is 1\n"
