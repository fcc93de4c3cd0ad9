"""`undercroft bench`: the repository's benchmarks."""

from __future__ import annotations

import argparse
import sys

from undercroft.cli.checkout import become, script
from undercroft.cli.output import Subparsers, add_command

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    add_command(
        subparsers,
        "bench",
        "run the benchmarks, ours and others side by side (from a checkout)",
        description="Becomes bench/run.py of the checkout this package runs from, with all further "
        "words: `undercroft bench --help` is about this command, `undercroft bench -- --help` "
        "about that script.",
        with_json=False,
        takes_rest=True,
    )


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    return become([sys.executable, str(script("bench/run.py")), *args.rest])
