"""The mover process of a disk tier of type `faulty`: its system calls go wrong as the tier's own.

It follows the tier's control file itself, and writes what fired beside it, so "once" means once in
each of the two processes, and `killed` ends the one that made the call.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from undercroft.clock import SystemClock
from undercroft.testing.faulty import Watch
from undercroft.tiers.disk.mover_main import serve

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Arguments: those of `mover_main`, then the control file, the tier's name and its path."""
    logging.getLogger("undercroft").setLevel(logging.CRITICAL)  # the engine says what goes wrong
    *rest, control, tier, path = argv
    watch = Watch(Path(control), tier, SystemClock(), path or None, takes_files=True)
    serve(rest, watch.files)
    watch.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
