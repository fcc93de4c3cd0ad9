"""The `undercroft` command: finds the subcommand, runs it, turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn, Protocol, cast

from undercroft.cli.output import CommandFailed, Exit, Output, Subparsers, output_for
from undercroft.errors import ConfigError, KvError, TierTimeout, TierUnavailable

__all__ = ["COMMANDS", "INTERRUPTED", "OWN_FAULT", "Command", "build_parser", "main"]

COMMANDS: tuple[str, ...] = (
    "serve",
    "doctor",
    "config",
    "top",
    "ls",
    "du",
    "inspect",
    "verify",
    "rm",
    "gc",
    "explain",
    "simulate",
    "plan",
    "demo",
    "bench",
)
"""The subcommands, in the order of `undercroft --help`; each is a module of this package."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
OWN_FAULT = 70
"""Exit code after a fault of our own, which prints a traceback."""

_DESCRIPTION = """\
Keeps the KV cache of LLM inference engines in host memory and on disk.

exit codes: 0 fine, 1 the command found a problem, 2 wrong usage or settings,
3 could not reach what it needs, 70 a fault of undercroft itself,
130 interrupted"""


class Command(Protocol):
    """What the module of a subcommand has."""

    def add_parser(self, subparsers: Subparsers[argparse.ArgumentParser]) -> None:
        """Add this command's parser, made by `output.add_command`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and give the exit code. May raise any `KvError` or `OSError`."""
        ...


class _WrongUsage(Exception):
    """The parser's own words about a command line."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # type: ignore[explicit-override] # from 3.12 on
        raise _WrongUsage(self, message)


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The whole command line, or only some commands of it.

    Args:
        names: Which commands; their modules are imported.
    """
    parser = _Parser(
        prog="undercroft",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"undercroft {_version()}")
    subparsers = cast(
        "Subparsers[argparse.ArgumentParser]",
        parser.add_subparsers(title="commands", metavar="COMMAND", required=True),
    )
    for name in names:
        command = cast(Command, import_module(f"undercroft.cli.{name}"))
        command.add_parser(subparsers)
        subparsers.choices[name].set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `undercroft`; the process's if None.

    Returns:
        The exit code; `--help` and `--version` raise `SystemExit`, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except BrokenPipeError:
        # Who read our output has seen enough.
        _give_up_output()
        return int(Exit.FINE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: list[str]) -> int:
    # Only the command that is asked for is imported: a list of chunks should not wait for others.
    names = (words[0],) if words and words[0] in COMMANDS else COMMANDS
    parser = build_parser(names)
    if not words:
        parser.print_help(sys.stderr)
        return int(Exit.USAGE)
    try:
        args = _parse(parser, words)
    except _WrongUsage as error:
        return _refused(error, words)
    output = output_for(args)
    try:
        code = int(args.run(args))
        output.stdout.flush()
    except BrokenPipeError:
        raise
    except (KvError, OSError) as error:
        return _failed(error, output)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is our fault, and is shown whole
        output.stderr.write(traceback.format_exc())
        output.error("this is a fault of undercroft itself; please report it with the lines above")
        _tell(output, error, str(error))
        return OWN_FAULT
    return code


def _refused(error: _WrongUsage, words: list[str]) -> int:
    """As argparse does, and with `--json` as every other error."""
    own = words[: words.index("--")] if "--" in words else words
    output = output_for(argparse.Namespace(json="--json" in own))
    error.parser.print_usage(output.stderr)
    output.stderr.write(f"{error.parser.prog}: error: {error}\n")
    _tell(output, ConfigError(str(error)), str(error))
    return int(Exit.USAGE)


def _tell(output: Output, error: Exception, message: str) -> None:
    try:
        output.data({"error": {"type": type(error).__name__, "message": message}})
        output.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:  # it may be the very error that is told of
        _give_up_output()


def _give_up_output() -> None:
    """What is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """`words` parsed; what is left over is the command's to judge only if it asked for it."""
    cut = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:cut])
    if args.takes_rest:
        args.words, args.rest = words[1:cut], [*rest, *words[cut + 1 :]]
        return args
    return parser.parse_args(words)


def _failed(error: KvError | OSError, output: Output) -> int:
    """One clear line, and what kind of failure it is."""
    line = " ".join(str(error).split())
    output.error(line)
    _tell(output, error, line)
    if isinstance(error, CommandFailed):
        return int(error.code)
    if isinstance(error, ConfigError):
        return int(Exit.USAGE)
    if isinstance(error, TierUnavailable | TierTimeout | OSError):
        return int(Exit.UNREACHABLE)
    return int(Exit.PROBLEM)


def _version() -> str:
    try:
        return version("undercroft")
    except PackageNotFoundError:
        return "(not installed)"
