"""Which size to take: where more of it stops to bring much, or where it is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from undercroft.plan.study import Levels, Study
from undercroft.plan.terms import Endurance, Prices
from undercroft.settings import format_bytes

__all__ = ["ENOUGH_RATIO", "Advice", "advise", "knee", "serve_words"]

ENOUGH_RATIO = 0.02
"""A doubling that adds less than this to the share of tokens found is not worth much."""

_BUDGET_SHARE = 0.9
"""Of what a drive is rated for: it writes more than it is told to."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommended setting.

    Args:
        levels: What it is, and what it finds.
        why: In a sentence.
        wear: What it writes, over what the drive is rated for; None if that is not known.
        budget_bytes: What may be written a day, if it has to be held down.
        net_a_month: What it saves beyond what it costs; None without all prices.
    """

    levels: Levels
    why: str
    wear: float | None = None
    budget_bytes: int | None = None
    net_a_month: float | None = None


def knee(points: Sequence[tuple[int, float]], enough: float = ENOUGH_RATIO) -> int:
    """The smallest size beyond which no doubling adds as much as `enough`.

    Args:
        points: Sizes, smallest first, and the ratio found at each. A size of 0 has whatever is
            found without; the first beyond it counts as one doubling.
        enough: Of the ratio.
    """
    found = points[0][0]
    for (size, ratio), (larger, more) in pairwise(points):
        doublings = log2(larger / size) if size else 1.0
        if more - ratio >= enough * doublings:
            found = larger
    return found


def advise(study: Study, endurance: Endurance | None, prices: Prices) -> Advice:
    """The setting to take, of those in the study."""
    if prices.are_complete:
        pairs = [(host, disk) for host in study.hosts for disk in study.disks]
        every = [study.levels(*pair) for pair in pairs]
        best = max(every, key=lambda levels: net_a_month(levels, prices))
        why = "what it saves exceeds what it costs by most"
    else:
        host = knee([(size, study.levels(size, 0).ratio) for size in study.hosts])
        disk = knee([(size, study.levels(host, size).ratio) for size in study.disks])
        best = study.levels(host, disk)
        why = f"beyond it, no doubling finds {100 * ENOUGH_RATIO:.0f} % more of all tokens"
    net = net_a_month(best, prices) if prices.are_complete else None
    if not best.disk_bytes or endurance is None:
        return Advice(best, why, net_a_month=net)
    rated = endurance.bytes_a_day(best.disk_bytes)
    budget = int(_BUDGET_SHARE * rated) if best.written_bytes > _BUDGET_SHARE * rated else None
    return Advice(best, why, best.written_bytes / rated, budget, net)


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
