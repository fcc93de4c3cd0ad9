"""Stores on disk for the tools' tests, and a process of its own that holds one open."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from undercroft.clock import SystemClock
from undercroft.keys import Namespace
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.stored import Store

from .support import disk, put

CAPACITY = 2 << 20
OTHER = Namespace({"model": "m", "layers": [1, 2], "cache": {"dtype": "fp8"}})

_HOLD = """
import sys
from tests.tiers.disk.support import disk, put
from tests.tiers.disk.stores import CAPACITY
tier = disk(sys.argv[1], capacity_bytes=CAPACITY)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    put(tier, number)
tier.flush()
print("ready", flush=True)
sys.stdin.read()
tier.close()
"""


def fill(path: Path, numbers: range, **settings: object) -> None:
    """A closed tier that holds the chunks of these numbers."""
    tier = disk(path, **{"capacity_bytes": CAPACITY, **settings})
    for number in numbers:
        put(tier, number)
    tier.close()


def look(path: Path) -> Store:
    return Catalog(str(path), SystemClock()).look()


@contextmanager
def held(path: Path, first: int = 0, end: int = 0) -> Iterator[int]:
    """Another process has the store open, with some more chunks stored; yields its id."""
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), str(first), str(end)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.communicate("", timeout=100)


def age(path: Path, seconds: float) -> None:
    """Everything below looks that old."""
    import os

    then = time.time() - seconds
    for one in [*Path(path).rglob("*"), Path(path)]:
        os.utime(one, (then, then), follow_symlinks=False)
