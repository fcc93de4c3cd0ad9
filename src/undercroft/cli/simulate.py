"""`undercroft simulate`: replay a trace through policies; what would each have found?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from undercroft.cli.capacities import Capacity, parse_capacities, parse_percent
from undercroft.cli.output import Column, Exit, Output, Subparsers, add_command, output_for
from undercroft.cli.simulate_levels import add_level_flags, refuse_level_flags, run_levels
from undercroft.cli.store import counted, say, size_text
from undercroft.cli.trace_flags import add_trace_flags, load_trace
from undercroft.errors import ConfigError
from undercroft.settings import parse_size
from undercroft.sim import BOUNDS, Hits, check_policy, hit_curve
from undercroft.traces import Trace

__all__ = ["add_parser", "run"]

_CAPACITIES = "1%,2%,5%,10%"
_ONE_PASS = ("lru", "unbounded")
_COLUMNS_AT_ONCE = 7
"""Capacities side by side; more go below each other."""


@dataclass(frozen=True, slots=True)
class _Curve:
    policy: str
    rows: list[Hits]
    cpu_s: float


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "simulate",
        "replay a trace of requests: which policy, at which size, finds how much",
        description="Replays a trace through the classes that an engine would run, one level "
        "alone, and shows which share of its blocks and tokens each policy finds, beside the "
        "optimum (belady, which knows the future) and room for everything (unbounded). With --host "
        "the whole hierarchy runs, on a clock that jumps: what each level finds, reads, writes, "
        "and what requests wait for it.",
    )
    add_trace_flags(parser)
    parser.add_argument(
        "--policy", default="lru", metavar="P[,P...]", help="policies to compare (%(default)s)"
    )
    parser.add_argument(
        "--capacity",
        metavar="C[,C...]",
        help="shares of the trace's blocks, 5000blocks, or sizes such as 64GiB "
        f"({_CAPACITIES.replace('%', '%%')})",
    )
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", help="of the model's KV cache; for capacities in bytes"
    )
    parser.add_argument(
        "--warm",
        default="0%",
        metavar="PERCENT",
        help="leave the first requests out of the counts, not of the replay",
    )
    parser.add_argument(
        "--full-blocks",
        action="store_true",
        help="leave out partly filled last blocks, which an engine does not store",
    )
    add_level_flags(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    warm_ratio = parse_percent(args.warm, "--warm")
    if warm_ratio > 1:
        raise ConfigError(f"--warm is {args.warm}; a trace has no more than 100%")
    token_bytes = None
    if args.bytes_per_token is not None:
        token_bytes = parse_size(args.bytes_per_token, "--bytes-per-token")
    if args.host is not None or args.disk is not None:
        return run_levels(args, output, warm_ratio, token_bytes)
    refuse_level_flags(args)
    policies = _policies(args.policy)
    trace = load_trace(args, full_blocks=args.full_blocks)
    capacities = parse_capacities(args.capacity or _CAPACITIES, trace, token_bytes)
    num_warm = int(warm_ratio * trace.num_requests)
    curves = _replay(trace, policies, capacities, num_warm, output)
    _show(output, trace, capacities, curves, num_warm)
    output.data(_as_data(args.trace, trace, capacities, curves, num_warm))
    return Exit.FINE


def _policies(text: str) -> list[str]:
    """Each once, and the bounds after them."""
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        check_policy(name)
    return list(dict.fromkeys([*(name for name in asked if name not in BOUNDS), *BOUNDS]))


def _replay(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[Capacity],
    num_warm: int,
    output: Output,
) -> list[_Curve]:
    sizes = [capacity.num_blocks for capacity in capacities]
    curves = []
    with output.progress("replaying", len(policies) * len(sizes)) as progress:
        for policy in policies:
            began_s = time.process_time()
            rows = hit_curve(
                trace,
                policy,
                sizes,
                num_warm=num_warm,
                on_capacity=lambda policy=policy: progress.step(note=policy),  # type: ignore[misc] # mypy: a default has no type
            )
            curves.append(_Curve(policy, rows, time.process_time() - began_s))
    return curves


def _show(
    output: Output,
    trace: Trace,
    capacities: Sequence[Capacity],
    curves: Sequence[_Curve],
    num_warm: int,
) -> None:
    say(
        output,
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_references:,} references",
    )
    if num_warm:
        say(output, f"the first {counted(num_warm, 'request')} are not counted")
    for begin in range(0, len(capacities), _COLUMNS_AT_ONCE):
        part = slice(begin, begin + _COLUMNS_AT_ONCE)
        for title in ("BLOCK HITS", "TOKEN HITS"):
            say(output)
            output.table(*_table(title, capacities[part], curves, part))
    say(output)
    output.table(
        [Column("POLICY"), Column("CPU SECONDS", "right"), Column("REFERENCES A SECOND", "right")],
        [
            (curve.policy, f"{curve.cpu_s:.2f}", f"{_speed(trace, curve):,.0f}")
            for curve in curves
            if curve.policy != "unbounded"  # it is read off the trace
        ],
    )


def _table(
    title: str, capacities: Sequence[Capacity], curves: Sequence[_Curve], part: slice
) -> tuple[list[Column], list[list[str]]]:
    columns = [Column(title), *(Column(c.text, "right") for c in capacities)]
    rows = [["blocks", *(str(c.num_blocks) for c in capacities)]]
    if capacities[0].num_bytes is not None:
        rows.append(["size", *(size_text(c.num_bytes or 0) for c in capacities)])
    for curve in curves:
        ratios = [
            row.block_hit_ratio if title == "BLOCK HITS" else row.token_hit_ratio
            for row in curve.rows[part]
        ]
        rows.append([curve.policy, *(f"{100 * ratio:.2f} %" for ratio in ratios)])
    return columns, rows


def _speed(trace: Trace, curve: _Curve) -> float:
    """References replayed in a second of one core; what is done in one pass counts once."""
    num_passes = 1 if curve.policy in _ONE_PASS else len(curve.rows)
    return num_passes * trace.num_references / max(curve.cpu_s, 1e-9)


def _as_data(
    path: str,
    trace: Trace,
    capacities: Sequence[Capacity],
    curves: Sequence[_Curve],
    num_warm: int,
) -> object:
    return {
        "trace": {
            "path": path,
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_blocks": trace.num_blocks,
            "num_references": trace.num_references,
            "block_tokens": trace.block_tokens,
            "num_warm_requests": num_warm,
        },
        "policies": [
            {
                "policy": curve.policy,
                "cpu_s": curve.cpu_s,
                "references_per_s": _speed(trace, curve),
                "rows": [
                    {
                        "capacity": capacity.text,
                        "capacity_bytes": capacity.num_bytes,
                        **asdict(row),
                        "block_hit_ratio": row.block_hit_ratio,
                        "token_hit_ratio": row.token_hit_ratio,
                    }
                    for capacity, row in zip(capacities, curve.rows, strict=True)
                ],
            }
            for curve in curves
        ],
    }
