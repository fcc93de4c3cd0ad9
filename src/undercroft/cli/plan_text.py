"""The words and tables of `undercroft plan`."""

from __future__ import annotations

from itertools import pairwise

from undercroft.plan.advice import ENOUGH_RATIO, Advice, net_a_month, unfit
from undercroft.plan.shape import Shape
from undercroft.plan.study import Levels, Study
from undercroft.plan.terms import Drive, Prices
from undercroft.settings import format_bytes
from undercroft.sim import Report

__all__ = ["Table", "advice_lines", "assumptions", "checked", "disk_table", "host_table", "studied"]

_HOUR_S, _DAY_S = 3600.0, 86400.0
_NAMES = {"host": "more host memory", "disk": "a larger disk"}
Table = tuple[str, list[str], list[list[str]]]
"""Heading, titles of columns, rows."""


def studied(study: Study, shape: Shape, model: str) -> list[str]:
    """What was replayed, for what model."""
    trace = study.trace
    hours = float(trace.times_ms[-1] - trace.times_ms[0]) / 1e3 / _HOUR_S
    each = format_bytes(round(study.block_bytes / trace.block_tokens))
    limit = study.limit.token_hit_ratio
    seldom = [
        f"hardly anything comes again: no cache, however large, finds {100 * ENOUGH_RATIO:.0f} %"
    ]
    return [
        f"{trace.name}: {trace.num_requests:,} requests in {hours:.1f} hours, "
        f"{study.limit.num_tokens / 1e6:,.0f} million prompt tokens",
        f"{model}: {shape.text}, {shape.dtype}: {each} a token" if shape.dtype else model,
        f"all of it kept takes {format_bytes(int(study.all_bytes))}, and finds "
        f"{_percent(limit)} of the tokens",
        *(seldom if limit < ENOUGH_RATIO else []),
    ]


def host_table(study: Study, prices: Prices) -> Table:
    """Host memory alone: each policy and the optimum."""
    titles = ["HOST MEMORY", *(c.policy.upper() for c in study.policies), "OPTIMUM", "ADDS"]
    titles += ["ENGINES SAVED", *_price_titles(prices)]
    adds = {
        larger: study.policies[0].ratio(larger) - study.policies[0].ratio(size)
        for size, larger in pairwise(study.hosts)
    }
    rows = []
    for size in study.hosts:
        levels = study.levels(size, 0)
        rows.append(
            [
                format_bytes(size),
                *(_percent(curve.ratio(size)) for curve in study.policies),
                _percent(levels.optimum_ratio),
                f"+{100 * adds[size]:.1f}" if size in adds else "",
                f"{levels.saved_s:.2f}",
                *_money(levels, prices),
            ]
        )
    return "Prompt tokens found in host memory alone", titles, rows


def disk_table(study: Study, host_bytes: int, drive: Drive, prices: Prices) -> Table:
    """A disk below host memory of one size."""
    titles = ["DISK", "FROM HOST", "FROM DISK", "TOGETHER", "OPTIMUM", "ENGINES SAVED"]
    titles += ["READ A SECOND", "WRITTEN A DAY", *(["OF ITS RATING"] if drive.endurance else [])]
    titles += _price_titles(prices)
    rows = []
    for size in study.disks:
        levels = study.levels(host_bytes, size)
        wear = drive.wear(size, levels.written_bytes)
        rows.append(
            [
                format_bytes(size) if size else "none",
                *map(_percent, (levels.host_ratio, levels.disk_ratio, levels.ratio)),
                _percent(levels.optimum_ratio),
                f"{levels.saved_s:.2f}",
                *(map(format_bytes, _moved(levels)) if size else ("", "")),
                *([_percent(wear) if wear is not None else ""] if drive.endurance else []),
                *_money(levels, prices),
            ]
        )
    heading = f"Prompt tokens found with {format_bytes(host_bytes)} of host memory above a disk"
    return heading, titles, rows


def _moved(levels: Levels) -> tuple[int, int]:
    return int(levels.read_bytes_per_s), int(levels.written_bytes)


def _price_titles(prices: Prices) -> list[str]:
    if not prices.are_told:
        return []
    return ["COST A MONTH", *(["NET A MONTH"] if prices.are_complete else [])]


def _money(levels: Levels, prices: Prices) -> list[str]:
    if not prices.are_told:
        return []
    cost = [f"{prices.cost_a_month(levels.host_bytes, levels.disk_bytes):,.0f}"]
    return [*cost, *([f"{net_a_month(levels, prices):,.0f}"] if prices.are_complete else [])]


def advice_lines(advice: Advice, drive: Drive, prices: Prices) -> list[str]:
    """What is recommended, why, and what it does."""
    levels = advice.levels
    disk = f" above {format_bytes(levels.disk_bytes)} of disk" if levels.disk_bytes else ", no disk"
    lines = [f"{format_bytes(levels.host_bytes)} of host memory{disk}: {advice.why}"]
    where = (
        f" ({_percent(levels.host_ratio)} from host memory, {_percent(levels.disk_ratio)} from "
        "disk)"
        if levels.disk_bytes
        else ""
    )
    lines.append(
        f"it finds {_percent(levels.ratio)} of the prompt tokens{where}, the optimum "
        f"{_percent(levels.optimum_ratio)}; that saves the prefill of {levels.saved_s:.2f} engines"
    )
    if levels.disk_bytes:
        lines.append(_moves(advice, drive))
    if advice.better is not None and advice.complaint:
        lines.append(_better(advice.better, advice.complaint))
    lines += [
        f"{_NAMES[level]} was not asked about (--{level}), and could bring up to "
        f"{100 * ratio:.1f} points more"
        for level, ratio in advice.not_asked.items()
    ]
    if advice.net_a_month is not None:
        lines.append(_net(levels, prices, advice.net_a_month))
    return lines


def _net(levels: Levels, prices: Prices, net: float) -> str:
    cost = f"it costs {prices.cost_a_month(levels.host_bytes, levels.disk_bytes):,.0f} a month"
    if net < 0:
        return f"{cost}, {-net:,.0f} more than it saves: by these prices no cache is worth it"
    return f"{cost}, and saves {net:,.0f} more than that"


def _moves(advice: Advice, drive: Drive) -> str:
    levels = advice.levels
    line = (
        f"the disk is written {format_bytes(int(levels.written_bytes))} a day, and read "
        f"{format_bytes(int(levels.read_bytes_per_s))} a second on average"
    )
    if why := unfit(levels, drive):
        return f"{line}; it would {why}, so that it finds less than that"
    if drive.endurance is not None and advice.wear is not None:
        line += f"; the writes are {_percent(advice.wear)} of what {drive.endurance.text} allows"
    return line


def _better(levels: Levels, why: str) -> str:
    return (
        f"{format_bytes(levels.host_bytes)} above {format_bytes(levels.disk_bytes)} of disk would "
        f"find {_percent(levels.ratio)}, but {why}: take better drives or more of them; an "
        "admission that stores what comes again saves writes"
    )


def checked(report: Report, study: Study) -> str:
    """What the whole hierarchy found at the recommended sizes."""
    found = [level.hit_tokens / report.num_tokens for level in report.levels]
    line = f"checked with the whole hierarchy: {_percent(sum(found))} found"
    if len(found) == 1:
        return line
    written = report.levels[1].num_written * study.block_bytes / study.seconds * _DAY_S
    declined = report.levels[1].num_declined
    line += f", {_percent(found[0])} in host memory and {_percent(found[1])} on disk, which is "
    line += f"written {format_bytes(int(written))} a day"
    return line + (f"; {declined:,} times it was too slow to take a chunk" if declined else "")


def assumptions(study: Study, prices: Prices, *, has_ends: bool) -> list[str]:
    """What the numbers rest on.

    Args:
        study: The trace.
        prices: What is known of them.
        has_ends: Whether the model keeps windows or states.
    """
    lines = [
        f"an engine computes {study.prefill_tokens_per_s:,.0f} prompt tokens a second "
        "(--prefill-tokens-per-s); what a hit itself costs is not subtracted",
        "the cache is empty at first, a store takes no time, and nothing is dropped on the way",
        "the disk holds what host memory holds, and more: together they find what the larger "
        "one finds alone",
        f"a token from disk saves {_percent(study.disk_worth)} of the time that computing it takes "
        "(--disk-read); it counts for that much where sizes are weighed",
        f"host memory is no smaller than the longest prompt, {format_bytes(study.longest_bytes)}, "
        "as long as such sizes are asked about: a disk is read through it",
    ]
    if has_ends:
        lines.append("each prompt that brings something new leaves a window and a state at its end")
    lines.append(
        f"the trace lasts {study.seconds / _HOUR_S:.1f} hours at the pace of the middle nine "
        "tenths of its requests"
    )
    if study.seconds < _DAY_S:
        lines.append("a day is taken to be like that; users who pause for longer are not seen")
    if None in (prices.host, prices.disk):
        lines.append("a byte of host memory costs 40 times as much as one of disk (--prices)")
    if prices.are_told:
        lines.append(f"what is bought is used for {prices.years:g} years, power not counted")
    return lines


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
