"""Which size to take: where more of it stops to bring much, or where it is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2

from undercroft.plan.study import Levels, Study
from undercroft.plan.terms import BUDGET_SHARE, Drive, Prices
from undercroft.settings import format_bytes

__all__ = [
    "ENOUGH_RATIO",
    "Advice",
    "advise",
    "knee",
    "net_a_month",
    "serve_words",
    "unfit",
]

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
        not_asked: `host` and `disk`, where the largest size asked about is recommended: how much
            more of the tokens a larger one could find at most. Left out where it is little.
    """

    levels: Levels
    why: str
    wear: float | None = None
    budget_bytes: int | None = None
    net_a_month: float | None = None
    better: Levels | None = None
    complaint: str = ""
    not_asked: dict[str, float] = field(default_factory=dict)


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


def unfit(levels: Levels, drive: Drive) -> str:
    """Why the disk of such a setting would not do, in words that follow "would"; or nothing."""
    return drive.complaint(levels.disk_bytes, levels.written_bytes, levels.read_bytes_per_s)


def advise(study: Study, drive: Drive, prices: Prices) -> Advice:
    """The setting to take, of those in the study.

    Only host memory that holds the longest prompt, through which a disk is read, and only disks
    that last and are quick enough: as long as there are such.
    """
    hosts = [size for size in study.hosts if size >= study.longest_bytes] or [study.hosts[-1]]
    every = [study.levels(host, disk) for host in hosts for disk in study.disks]
    best, why = _best(study, [each for each in every if not unfit(each, drive)] or every, prices)
    better, _ = _best(study, every, prices)
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
        complaint=unfit(better, drive) if is_better else "",
        not_asked=_not_asked(study, best),
    )


def _best(study: Study, every: Sequence[Levels], prices: Prices) -> tuple[Levels, str]:
    if len(every) == 1:
        return every[0], "the only setting of those asked about that would do"
    if prices.are_complete:
        # Of equals the first, which has the least host memory, and then the smallest disk.
        best = max(every, key=lambda levels: net_a_month(levels, prices))
        return best, "of these sizes, what it saves exceeds what it costs by most"
    bought = prices if None not in (prices.host, prices.disk) else _USUAL
    frontier: list[tuple[float, float, Levels]] = []
    for levels in sorted(every, key=lambda each: _cost(each, bought)):
        value = _value(study, levels)
        if not frontier or value > frontier[-1][1]:
            frontier.append((_cost(levels, bought), value, levels))
    index = knee([(cost, value) for cost, value, _ in frontier])
    points = f"{100 * ENOUGH_RATIO:.0f} points"
    why = f"of these sizes, paying up to twice as much finds less than {points} more"
    return frontier[index][2], why


def _value(study: Study, levels: Levels) -> float:
    """What a setting finds, a token from disk counted for what it saves."""
    return levels.host_ratio + study.disk_worth * levels.disk_ratio


def _not_asked(study: Study, best: Levels) -> dict[str, float]:
    """What sizes beyond those asked about could bring at most, where that may be worth it."""
    limit = study.limit.token_hit_ratio
    most = {}
    if best.host_bytes == study.hosts[-1]:
        most["host"] = limit - _value(study, best)
    if best.disk_bytes and best.disk_bytes == study.disks[-1]:
        most["disk"] = limit - best.ratio
    return {level: ratio for level, ratio in most.items() if ratio >= ENOUGH_RATIO}


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
