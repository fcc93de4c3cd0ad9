"""`undercroft simulate --host`: the whole hierarchy, host memory and a disk, with times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from undercroft import plugins
from undercroft.cli.capacities import Capacity, parse_capacities
from undercroft.cli.output import Column, Exit, Output
from undercroft.cli.store import counted, say, size_text
from undercroft.cli.trace_flags import load_trace
from undercroft.errors import ConfigError
from undercroft.settings import parse_size
from undercroft.sim import BOUNDS, Hits, LevelPlan, Report, Service, hit_curve, simulate
from undercroft.traces import Trace

__all__ = ["add_level_flags", "refuse_level_flags", "run_levels"]

_OF_LEVELS = {
    "--disk-read": "3GB",
    "--disk-write": "2GB",
    "--disk-latency": 1e-4,
    "--admission": "always",
    "--prefill-tokens-per-s": 8000.0,
}
"""What one level alone has no use for, and what it is if nothing is said."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """What is simulated, whatever the policy."""

    trace: Trace
    sizes: tuple[tuple[str, Capacity], ...]
    service: Service
    admission: str
    token_bytes: int
    prefill_tokens_per_s: float
    num_warm: int


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str
    report: Report
    cpu_s: float


def add_level_flags(parser: argparse.ArgumentParser) -> None:
    """Those of a simulation of the whole hierarchy."""
    levels = parser.add_argument_group(
        "the whole hierarchy", "needs --bytes-per-token; takes minutes for a large trace"
    )
    levels.add_argument("--host", metavar="C", help="host memory of this capacity")
    levels.add_argument("--disk", metavar="C", help="a disk of this capacity below it")
    levels.add_argument(
        "--disk-read",
        default=_OF_LEVELS["--disk-read"],
        metavar="SIZE",
        help="what it reads in a second (%(default)s)",
    )
    levels.add_argument(
        "--disk-write",
        default=_OF_LEVELS["--disk-write"],
        metavar="SIZE",
        help="what it writes in a second (%(default)s)",
    )
    levels.add_argument(
        "--disk-latency",
        type=float,
        default=_OF_LEVELS["--disk-latency"],
        metavar="SECONDS",
        help="what each read and write takes besides (%(default)g)",
    )
    levels.add_argument(
        "--admission",
        default=_OF_LEVELS["--admission"],
        metavar="A",
        help="who comes into the disk (%(default)s)",
    )
    levels.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=_OF_LEVELS["--prefill-tokens-per-s"],
        metavar="N",
        help="what an engine computes of prompts, for the seconds saved (%(default)g)",
    )


def refuse_level_flags(args: argparse.Namespace) -> None:
    """Nobody is to think that one level alone had an admission, or a disk that takes its time.

    Raises:
        ConfigError: Such a thing is said.
    """
    for flag, default in _OF_LEVELS.items():
        if getattr(args, flag[2:].replace("-", "_")) != default:
            raise ConfigError(f"{flag} is for the whole hierarchy: say how large it is, by --host")


def run_levels(
    args: argparse.Namespace, output: Output, warm_ratio: float, token_bytes: int | None
) -> int:
    """Simulate what the command line says of host memory and disk, with each policy.

    Raises:
        ConfigError: Something is missing, or goes with one level alone only.
    """
    policies = _policies(args.policy)
    levels = _levels(args, warm_ratio, token_bytes)
    optimum = _optimum(levels)
    runs = []
    total = len(policies) * levels.trace.num_requests
    with output.progress("simulating requests", total) as progress:
        for policy in policies:
            began_s = time.process_time()
            report = _simulate(levels, policy, partial(progress.step, note=policy))
            runs.append(_Run(policy, report, time.process_time() - began_s))
    _show(output, levels, runs, optimum)
    output.data(_as_data(args.trace, levels, runs, optimum))
    return Exit.FINE


def _policies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name in BOUNDS:
            raise ConfigError(
                f"--policy {name} knows the future and so runs in no hierarchy; leave it out, the "
                "optimum is told anyway"
            )
        plugins.find("policies", name)
    return names


def _levels(args: argparse.Namespace, warm_ratio: float, token_bytes: int | None) -> _Levels:
    if args.host is None:
        raise ConfigError("--disk is below host memory: say how large that is, by --host")
    if args.capacity is not None:
        raise ConfigError("--capacity is for one level alone; leave it out, or --host and --disk")
    if token_bytes is None:
        raise ConfigError(
            "--bytes-per-token has to say what a token takes, as devices have to move it "
            '("128KiB" for Llama 3.1 8B)'
        )
    if args.prefill_tokens_per_s <= 0 or args.disk_latency < 0:
        raise ConfigError("--prefill-tokens-per-s must be above 0, --disk-latency not below it")
    plugins.find("admission", args.admission)
    service = Service(
        args.disk_latency,
        parse_size(args.disk_read, "--disk-read"),
        parse_size(args.disk_write, "--disk-write"),
    )
    trace = load_trace(args, full_blocks=args.full_blocks)
    sizes = []
    for name, text in (("host", args.host), ("disk", args.disk)):
        if text is not None:
            (size,) = _one(parse_capacities(text, trace, token_bytes, f"--{name}"), name)
            sizes.append((name, size))
    return _Levels(
        trace,
        tuple(sizes),
        service,
        args.admission,
        token_bytes,
        args.prefill_tokens_per_s,
        int(warm_ratio * trace.num_requests),
    )


def _one(capacities: list[Capacity], name: str) -> list[Capacity]:
    if len(capacities) > 1:
        raise ConfigError(f"--{name} is one capacity; `undercroft plan` looks at many")
    return capacities


def _simulate(levels: _Levels, policy: str, on_request: Callable[[], None]) -> Report:
    plans = [
        LevelPlan(
            name,
            size.num_blocks,
            policy,
            admission=levels.admission if name == "disk" else "always",
            service=levels.service if name == "disk" else Service(),
        )
        for name, size in levels.sizes
    ]
    return simulate(
        levels.trace,
        plans,
        bytes_per_token=levels.token_bytes,
        prefill_tokens_per_s=levels.prefill_tokens_per_s,
        num_warm=levels.num_warm,
        on_request=on_request,
    )


def _optimum(levels: _Levels) -> Hits:
    """The most that any policy finds in as much room as the larger level has."""
    largest = max(size.num_blocks for _, size in levels.sizes)
    whole = levels.trace.full_blocks()
    return hit_curve(whole, "belady", [largest], num_warm=levels.num_warm)[0]


# --- what is said of it -----------------------------------------------------------------------


def _show(output: Output, levels: _Levels, runs: Sequence[_Run], optimum: Hits) -> None:
    trace = levels.trace
    say(
        output,
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.num_references:,} references",
    )
    for name, size in levels.sizes:
        say(output, f"{name}: {size.num_blocks:,} blocks, {size_text(size.num_bytes or 0)}")
    if levels.num_warm:
        say(output, f"the first {counted(levels.num_warm, 'request')} are not counted")
    titles = ["POLICY", "LEVEL", "BLOCK HITS", "BLOCKS", "TOKEN HITS", "TOKENS", "BYTES"]
    rows = [row for run in runs for row in _found(run)]
    where = "together" if len(levels.sizes) > 1 else "host"
    together = [_percent(optimum.block_hit_ratio), f"{optimum.hit_blocks:,}"]
    together += [_percent(optimum.token_hit_ratio), f"{optimum.hit_tokens:,}", "", ""]
    _table(output, [*titles, "SECONDS SAVED"], [*rows, ["optimum", where, *together]])
    titles = ["POLICY", "LEVEL", "READ", "WRITTEN", "BYTES WRITTEN", "TIMES EACH", "EVICTED"]
    rows = [row for run in runs for row in _moved(run, levels)]
    _table(output, [*titles, "DECLINED"], rows)
    titles = ["POLICY", "REQUESTS", "WAITED FOR DISKS", "OF TRACE", "CPU SECONDS"]
    _table(output, titles, [_timed(run) for run in runs])


def _table(output: Output, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    say(output)
    aligned = [Column(titles[0]), *(Column(title, "right") for title in titles[1:])]
    output.table(aligned, [list(row) for row in rows])


def _found(run: _Run) -> list[list[str]]:
    """What was found, by level and on all of them."""
    report = run.report
    rows = [
        [
            run.policy,
            level.name,
            _percent(_over(level.hit_blocks, report.num_references)),
            f"{level.hit_blocks:,}",
            _percent(_over(level.hit_tokens, report.num_tokens)),
            f"{level.hit_tokens:,}",
            size_text(level.hit_bytes),
            f"{level.saved_prefill_s:,.0f}",
        ]
        for level in report.levels
    ]
    if len(rows) > 1:
        rows.append(
            [
                run.policy,
                "together",
                _percent(report.block_hit_ratio),
                f"{report.hit_blocks:,}",
                _percent(report.token_hit_ratio),
                f"{report.hit_tokens:,}",
                size_text(sum(level.hit_bytes for level in report.levels)),
                f"{report.saved_prefill_s:,.0f}",
            ]
        )
    return rows


def _moved(run: _Run, levels: _Levels) -> list[list[str]]:
    """What went in and out, in chunks of a block."""
    block_bytes = levels.token_bytes * levels.trace.block_tokens
    return [
        [
            run.policy,
            level.name,
            f"{level.num_read:,}",
            f"{level.num_written:,}",
            size_text(level.num_written * block_bytes),
            f"{level.write_amplification:.2f}",
            f"{level.num_evicted:,}",
            f"{level.num_declined:,}",
        ]
        for level in run.report.levels
    ]


def _timed(run: _Run) -> list[str]:
    report = run.report
    return [
        run.policy,
        f"{report.num_requests:,}",
        f"{report.waited_s:,.0f} s",
        f"{report.spanned_s:,.0f} s",
        f"{run.cpu_s:,.1f}",
    ]


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _as_data(path: str, levels: _Levels, runs: Sequence[_Run], optimum: Hits) -> object:
    trace = levels.trace
    block_bytes = levels.token_bytes * trace.block_tokens
    return {
        "trace": {
            "path": path,
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_blocks": trace.num_blocks,
            "num_references": trace.num_references,
            "block_tokens": trace.block_tokens,
            "num_warm_requests": levels.num_warm,
        },
        "optimum": {
            **asdict(optimum),
            "block_hit_ratio": optimum.block_hit_ratio,
            "token_hit_ratio": optimum.token_hit_ratio,
        },
        "policies": [
            {
                "policy": run.policy,
                "cpu_s": run.cpu_s,
                **asdict(run.report),
                "block_hit_ratio": run.report.block_hit_ratio,
                "token_hit_ratio": run.report.token_hit_ratio,
                "saved_prefill_s": run.report.saved_prefill_s,
                "levels": [
                    {
                        **asdict(level),
                        "capacity_bytes": level.capacity_blocks * block_bytes,
                        "read_bytes": level.num_read * block_bytes,
                        "written_bytes": level.num_written * block_bytes,
                        "write_amplification": level.write_amplification,
                    }
                    for level in run.report.levels
                ],
            }
            for run in runs
        ],
    }
