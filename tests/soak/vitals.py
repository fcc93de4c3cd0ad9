"""What a process and a folder hold, read from outside, and whether it grows."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from undercroft.hierarchy.rendezvous import _is_locked_by_others

__all__ = ["Growth", "Vitals", "Watch", "folder_bytes", "growth", "shared_memory_bytes", "vitals"]

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of one process, at one moment between two rounds. Sizes in bytes."""

    at_s: float
    num_requests: int
    """That the process has answered so far."""
    rss: int
    shared: int
    """The part of `rss` that is shared memory: host memory's slots."""
    descriptors: int
    threads: int
    named_shared: int
    """Files of ours in /dev/shm, of engines that have ended."""


def vitals(pid: int, at_s: float, num_requests: int) -> Vitals:
    """Read them from /proc."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    )
    kib = {name: int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem")}
    return Vitals(
        at_s=at_s,
        num_requests=num_requests,
        rss=kib["VmRSS"],
        shared=kib["RssShmem"],
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(status["Threads"]),
        named_shared=shared_memory_bytes(),
    )


def shared_memory_bytes(folder: Path = _SHARED_MEMORY) -> int:
    """Of the files that engines which ended left there; one that is about to start has its own.

    A living engine's file is locked for as long as it has a name: see `hierarchy.rendezvous`.
    """
    total = 0
    for path in folder.glob("undercroft-" + "[0-9a-f]" * 16):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if not _is_locked_by_others(fd, 0, 0):
                    total += os.fstat(fd).st_blocks * 512
            finally:
                os.close(fd)
    return total


def folder_bytes(folder: Path) -> int:
    """As `du` counts: blocks of files and of directories, each file once."""
    total, seen = 0, set[tuple[int, int]]()
    for parent, _, names in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            with suppress(FileNotFoundError):
                found = path.lstat()
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one number over a run: its median after the warm-up, and at the end."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Above 1: it grew."""
        return self.after / self.before if self.before else (1.0 if not self.after else 1e9)


def growth(
    samples: Sequence[Vitals], pick: Callable[[Vitals], int], warm_up_ratio: float = 0.25
) -> Growth:
    """The first quarter is warm-up; then the median of the first third against that of the last.

    Raises:
        ValueError: Fewer than eight samples say nothing.
    """
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few to tell growth: 8 at least")
    values = [pick(sample) for sample in samples[int(len(samples) * warm_up_ratio) :]]
    third = max(1, len(values) // 3)
    return Growth(statistics.median(values[:third]), statistics.median(values[-third:]))


class Watch:
    """A thread that looks at a folder all the time and keeps the most it has seen."""

    def __init__(self, folder: Path, every_s: float = 0.2) -> None:
        self.most_bytes = 0
        self.num_looks = 0
        self._folder = folder
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="watch", daemon=True)

    def _main(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most_bytes = max(self.most_bytes, folder_bytes(self._folder))
            self.num_looks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def now_s() -> float:
    """Seconds, monotonic."""
    return time.monotonic()
