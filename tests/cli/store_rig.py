"""Runs a command of the store in this process: exit code, what it printed, its JSON document."""

import argparse
import json
from dataclasses import dataclass
from typing import Any

import pytest

from undercroft.cli import du, explain, gc, inspect, ls, rm, verify
from undercroft.errors import ConfigError, TierUnavailable

COMMANDS = {
    "ls": ls,
    "du": du,
    "inspect": inspect,
    "verify": verify,
    "rm": rm,
    "gc": gc,
    "explain": explain,
}


@dataclass(frozen=True)
class Ran:
    code: int
    text: str
    errors: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Ran:
    """What `undercroft WORDS` does."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(dest="command")
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    args = parser.parse_args([str(word) for word in words])
    capsys.readouterr()
    try:
        code = COMMANDS[args.command].run(args)
    except ConfigError as error:
        return Ran(2, "", str(error))
    except TierUnavailable as error:
        return Ran(3, "", str(error))
    out = capsys.readouterr()
    return Ran(code, out.out, out.err)
