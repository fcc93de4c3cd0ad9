"""Which size to take: where more of it stops to bring much, or where it is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from undercroft.plan.study import Levels, Study
from undercroft.plan.terms import BUDGET_SHARE, Drive, Prices
from undercroft.settings import format_bytes

__all__ = ["ENOUGH_RATIO", "Advice", "advise", "knee", "net_a_month", "serve_words"]

ENOUGH_RATIO = 0.02
"""A doubling that adds less than this to the share of tokens found is not worth much."""

_USUAL = Prices(host=40.0, disk=1.0)
"""Of host memory and flash, one beside the other, where no prices are given."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommended setting.

    Args:
        levels: What it is, and what it finds.
        why: In a sentence.
        wear: What it writes, over what the drive is rated for; None if that is not known.
        budget_bytes: What may be written a day by that rating.
        net_a_month: What it saves beyond what it costs; None without all prices.
        better: What would be recommended of any disk.
        complaint: Why that would not do, in words that follow "would".
    """

    levels: Levels
    why: str
    wear: float | None = None
    budget_bytes: int | None = None
    net_a_month: float | None = None
    better: Levels | None = None
    complaint: str = ""


def knee(points: Sequence[tuple[float, float]], enough: float = ENOUGH_RATIO) -> int:
    """The index of the point beyond which no doubling adds as much as `enough`.

    Args:
        points: What it costs, above 0 and rising, and what it brings.
        enough: Of what it brings.
    """
    found = 0
    for index, ((cost, value), (dearer, more)) in enumerate(pairwise(points), 1):
        if more - value >= enough * log2(dearer / cost):
            found = index
    return found


def advise(study: Study, drive: Drive, prices: Prices) -> Advice:
    """The setting to take, of those in the study.

    Only host memory that holds the longest prompt, through which a disk is read, and only disks
    that last and are quick enough: as long as there are such.
    """
    hosts = [size for size in study.hosts if size >= study.longest_bytes] or [study.hosts[-1]]
    # What is written to a disk does not depend on the host memory above it.
    written = {size: study.levels(hosts[0], size).written_bytes for size in study.disks}
    fit = [size for size in study.disks if not (size and drive.complaint(size, written[size]))]
    best, why = _best(study, hosts, fit or list(study.disks), prices)
    better, _ = _best(study, hosts, list(study.disks), prices)
    is_better = better.ratio - best.ratio >= ENOUGH_RATIO
    budget = None
    if drive.endurance is not None and best.disk_bytes:
        budget = int(BUDGET_SHARE * drive.endurance.bytes_a_day(best.disk_bytes))
    return Advice(
        best,
        why,
        wear=drive.wear(best.disk_bytes, best.written_bytes),
        budget_bytes=budget,
        net_a_month=net_a_month(best, prices) if prices.are_complete else None,
        better=better if is_better else None,
        complaint=drive.complaint(better.disk_bytes, better.written_bytes) if is_better else "",
    )


def _best(
    study: Study, hosts: Sequence[int], disks: Sequence[int], prices: Prices
) -> tuple[Levels, str]:
    every = [study.levels(host, disk) for host in hosts for disk in disks]
    if prices.are_complete:
        best = max(every, key=lambda levels: net_a_month(levels, prices))
        return best, "what it saves exceeds what it costs by most"
    bought = prices if None not in (prices.host, prices.disk) else _USUAL
    frontier: list[tuple[float, float, Levels]] = []
    for levels in sorted(every, key=lambda each: _cost(each, bought)):
        value = levels.host_ratio + study.disk_worth * levels.disk_ratio
        if not frontier or value > frontier[-1][1]:
            frontier.append((_cost(levels, bought), value, levels))
    index = knee([(cost, value) for cost, value, _ in frontier])
    why = f"spending twice as much would bring less than {100 * ENOUGH_RATIO:.0f} % more"
    return frontier[index][2], why


def _cost(levels: Levels, prices: Prices) -> float:
    return prices.cost_a_month(levels.host_bytes, levels.disk_bytes)


def net_a_month(levels: Levels, prices: Prices) -> float:
    """What is saved, less what it costs."""
    cost = prices.cost_a_month(levels.host_bytes, levels.disk_bytes)
    return prices.worth_a_month(levels.saved_s) - cost


def serve_words(advice: Advice, model: str, policy: str, path: str) -> list[str]:
    """The words of an `undercroft serve` that does as advised."""
    levels = advice.levels
    words = ["undercroft", "serve", model, "--host", _exact(levels.host_bytes)]
    words += ["--set", f"policy={policy}"]
    if levels.disk_bytes:
        tier = f'"type": "disk", "path": "{path}", "capacity": "{_exact(levels.disk_bytes)}"'
        tier += f', "policy": "{policy}"'
        if advice.budget_bytes is not None:
            tier += f', "write_budget": {advice.budget_bytes}'
        words += ["--set", f"tiers=[{{{tier}}}]"]
    return words


def _exact(num_bytes: int) -> str:
    """As people write it where that loses nothing."""
    text = format_bytes(num_bytes).replace(" ", "")
    unit = text.lstrip("0123456789.")
    factor = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}.get(unit)
    number = text.removesuffix(unit)
    if factor and number.isdigit() and int(number) << factor == num_bytes:
        return text
    return str(num_bytes)
