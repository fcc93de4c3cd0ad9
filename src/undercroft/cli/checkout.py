"""Become another program: vLLM, or a script of the repository (they are not in the package)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import undercroft
from undercroft.cli.output import CommandFailed, Exit

__all__ = ["become", "script"]


def script(name: str, *, root: Path | None = None) -> Path:
    """The path of a script of the checkout that this package runs from.

    Args:
        name: Below the repository's root: `examples/demo.py`.
        root: The repository; found from the package if None.

    Raises:
        CommandFailed: The package was installed without its repository, or the script is not in it.
    """
    root = root or Path(undercroft.__file__).resolve().parents[2]
    path = root / name
    if not path.is_file():
        raise CommandFailed(
            f"{name} is not in {root}: it comes with the repository, not with the package; clone "
            f"the repository and run this command from its environment (`make setup`)",
            Exit.UNREACHABLE,
        )
    return path


def become(command: Sequence[str]) -> NoReturn:
    """Become another program, so that signals and its exit code are its own.

    Raises:
        OSError: There is no such program.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))  # noqa: S606 - what the commands that call this are for
