"""`undercroft demo`: a long prompt on a real vLLM, cold, from host memory, after a restart."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from undercroft.cli.checkout import become, script
from undercroft.cli.output import CommandFailed, Exit, Subparsers, add_command

__all__ = ["add_parser", "run"]

_NEEDED = ("vllm", "torch", "transformers")


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    add_command(
        subparsers,
        "demo",
        "a long prompt on a real vLLM: cold, from host memory, after a restart (from a checkout)",
        description="Becomes examples/demo.py of the checkout this package runs from, with all "
        "further words: `undercroft demo -- --help` lists them.",
        with_json=False,
        takes_rest=True,
    )


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    path = script("examples/demo.py")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CommandFailed(
            f"the demo needs {', '.join(missing)}, not installed here; `make demo` in "
            f"{path.parents[1]} installs what is missing and runs it",
            Exit.UNREACHABLE,
        )
    return become([sys.executable, str(path), *args.rest])
