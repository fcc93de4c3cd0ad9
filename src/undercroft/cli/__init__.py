"""The `undercroft` command: `main.py`, and one module for each subcommand.

A subcommand's module has `add_parser(subparsers)`, which calls `output.add_command`, and
`run(args) -> int`, which gives the exit code. Nothing here imports an engine at import: most
commands work where none is installed.
"""

from __future__ import annotations

__all__: list[str] = []
