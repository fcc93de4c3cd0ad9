"""What a command shows: lines and tables for people, or one JSON document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

__all__ = ["View"]


class View:
    """Collects nothing: people see lines as they come, programs see the document at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._json = bool(args.json)
        self._is_watched = sys.stderr.isatty() and not self._json
        self._shown = -1

    def line(self, text: str = "") -> None:
        """One line for people."""
        if not self._json:
            sys.stdout.write(text + "\n")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for people; nothing if there are no rows. Cells that are numbers go right."""
        if not rows:
            return
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
        self.line("  ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True)).rstrip())
        for raw, row in zip(rows, cells, strict=True):
            padded = (
                cell.rjust(width) if isinstance(value, int | float) else cell.ljust(width)
                for value, cell, width in zip(raw, row, widths, strict=True)
            )
            self.line("  ".join(padded).rstrip())

    def progress(self, done: int, total: int) -> None:
        """How far long work is."""
        percent = 100 * done // max(1, total)
        if self._is_watched and percent != self._shown:
            self._shown = percent
            sys.stderr.write(f"\r{percent:3d} %" if done < total else "\r      \r")
            sys.stderr.flush()

    def end(self, document: Mapping[str, object]) -> None:
        """The document for programs."""
        if self._json:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
