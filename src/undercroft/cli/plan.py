"""`undercroft plan`: which size of host memory and disk a trace of requests is worth."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undercroft.cli.output import Column, Exit, Output, Subparsers, add_command, output_for
from undercroft.cli.plan_text import (
    Table,
    advice_lines,
    assumptions,
    checked,
    disk_table,
    host_table,
    studied,
)
from undercroft.cli.store import say
from undercroft.cli.trace_flags import add_trace_flags, load_trace
from undercroft.errors import ConfigError
from undercroft.plan.advice import Advice, advise, net_a_month, serve_words
from undercroft.plan.kinds import Kind
from undercroft.plan.page import Page, write_page
from undercroft.plan.pictures import SHOWN, Told, check_installed, draw
from undercroft.plan.shape import Layers, Shape, read_config, shape_of
from undercroft.plan.study import Study, block_bytes, check, replay
from undercroft.plan.terms import Drive, Prices, parse_endurance, parse_prices, parse_sizes
from undercroft.settings import format_bytes, parse_size
from undercroft.settings.schema import KEYS
from undercroft.sim import Report, check_policy, hit_curve
from undercroft.traces import Trace

__all__ = ["add_parser", "run"]

_PREFILL_TOKENS_PER_S = 8000.0
_DESCRIPTION = """\
Replays a trace of requests at many sizes of host memory and disk, with the eviction policies that
an engine would run, and says what each size finds, what it saves and what it writes, where more
stops to bring much, and which `undercroft serve` does it.

  undercroft plan --trace traces/trace-5e0c11d2-0001.jsonl.gz --model Qwen/Qwen3-8B \\
    --host 16GiB..512GiB --disk 0..8TiB --endurance 1DWPD --out plan

A running engine writes such a trace with the setting `record`."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line says, beside the trace."""

    shape: Shape
    model: str
    name: str
    policies: tuple[str, ...]
    hosts: list[int]
    disks: list[int]
    drive: Drive
    prices: Prices
    prefill_tokens_per_s: float


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "plan",
        "which size of host memory and disk a trace of requests is worth",
        description=_DESCRIPTION,
    )
    add_trace_flags(parser)
    _add_model(parser)
    parser.add_argument(
        "--host",
        default="16GiB..512GiB",
        metavar="SIZES",
        help="of host memory: from..to in doublings, or some with commas (%(default)s)",
    )
    parser.add_argument(
        "--disk",
        default="0..8TiB",
        metavar="SIZES",
        help="of a disk below it, in the same way; 0 is none (%(default)s)",
    )
    parser.add_argument(
        "--policy",
        metavar="P[,P...]",
        help="policies; the first is planned with (the default of `policy`, and lru)",
    )
    _add_terms(parser)
    parser.add_argument(
        "--path", default="/nvme/kv", help="the disk's folder, for the command (%(default)s)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="replay what is recommended through the whole hierarchy, too; takes minutes",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write pictures (PNG, SVG) and an HTML page there"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="whose KV cache it is: a folder, its config.json, or a name in the hub's local cache",
    )
    parser.add_argument("--dtype", default="auto", metavar="T", help="as vLLM's (%(default)s)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="T", help="as vLLM's, such as fp8 (%(default)s)"
    )
    parser.add_argument(
        "--state-dtype",
        default="auto",
        metavar="T",
        help="as vLLM's --mamba-ssm-cache-dtype (%(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="as vLLM's; all ranks together are planned for (%(default)s)",
    )
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", help="of the KV cache, instead of --model's"
    )


def _add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=_PREFILL_TOKENS_PER_S,
        metavar="N",
        help="what an engine computes of prompts: 1 / vllm:undercroft_prefill_seconds_per_token "
        "of a running one (%(default)g)",
    )
    parser.add_argument(
        "--disk-read",
        default="3GB",
        metavar="SIZE",
        help="what the disk reads in a second, as `undercroft doctor` measures it (%(default)s)",
    )
    parser.add_argument(
        "--disk-write",
        default="2GB",
        metavar="SIZE",
        help="what it writes in a second (%(default)s)",
    )
    parser.add_argument(
        "--endurance",
        metavar="RATING",
        help="what the drive is rated for: drive writes a day (1DWPD) or terabytes written "
        "(1400TBW) over --years",
    )
    parser.add_argument(
        "--drive", metavar="SIZE", help="how large that drive is (as large as what is planned)"
    )
    parser.add_argument(
        "--prices",
        metavar="P",
        help="such as host=4/GiB,disk=80/TiB,engine=2.50/h: with all three, what saves most is "
        "recommended",
    )
    parser.add_argument(
        "--years", type=float, default=5.0, metavar="N", help="that hardware is used (%(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    if args.out is not None:
        check_installed()
    asked = _asked(args)
    trace = _whole_blocks(load_trace(args))
    if trace.num_requests < 2 or trace.times_ms[-1] == trace.times_ms[0]:  # noqa: PLR2004 - a time between two
        raise ConfigError(f"{args.trace} spans no time, so nothing can be said of a day")
    study = _study(output, trace, asked)
    advice = advise(study, asked.drive, asked.prices)
    report = _check(output, study, advice, asked.drive) if args.check else None
    words = serve_words(advice, asked.model, study.policies[0].policy, args.path)
    lines = advice_lines(advice, asked.drive, asked.prices)
    lines += [checked(report, study)] if report else []
    _show(output, study, asked, advice, (lines, shlex.join(words)))
    files = _draw(args.out, study, asked, advice, (lines, shlex.join(words))) if args.out else []
    for file in files:
        say(output, f"written: {file}")
    output.data(
        _as_data(args.trace, study, asked, advice)
        | {"command": words, "files": files, "checked": _checked_data(report)}
    )
    return Exit.FINE


def _asked(args: argparse.Namespace) -> _Asked:
    if args.prefill_tokens_per_s <= 0 or args.years <= 0:
        raise ConfigError("--prefill-tokens-per-s and --years must be above 0")
    if args.tensor_parallel_size < 1:
        raise ConfigError("--tensor-parallel-size must be 1 or more")
    if (args.bytes_per_token is None) == (args.model is None):
        raise ConfigError("say whose KV cache it is, by --model or by --bytes-per-token")
    names = args.policy.split(",") if args.policy else [KEYS["policy"].default, "lru"]
    policies = tuple(dict.fromkeys(name.strip() for name in names))
    for name in policies:
        check_policy(name)
    hosts = parse_sizes(args.host, "--host")
    if not hosts[0]:
        raise ConfigError("--host begins with 0, but host memory is always there; give more")
    return _Asked(
        shape=_shape(args),
        model=args.model or "MODEL",
        name=_name(args),
        policies=policies,
        hosts=hosts,
        disks=parse_sizes(args.disk, "--disk"),
        drive=_drive(args),
        prices=Prices() if args.prices is None else parse_prices(args.prices, args.years),
        prefill_tokens_per_s=args.prefill_tokens_per_s,
    )


def _drive(args: argparse.Namespace) -> Drive:
    drive_bytes = None if args.drive is None else parse_size(args.drive, "--drive")
    return Drive(
        parse_size(args.disk_read, "--disk-read"),
        parse_size(args.disk_write, "--disk-write"),
        None
        if args.endurance is None
        else parse_endurance(args.endurance, args.years, drive_bytes),
    )


def _name(args: argparse.Namespace) -> str:
    """Of the model, for people."""
    if args.model is None:
        each = parse_size(args.bytes_per_token, "--bytes-per-token")
        return f"a model of {format_bytes(each)} a token"
    path = Path(args.model)
    if not path.exists():
        return str(args.model)
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def _shape(args: argparse.Namespace) -> Shape:
    if args.bytes_per_token is not None:
        token_bytes = parse_size(args.bytes_per_token, "--bytes-per-token")
        return Shape((Layers(Kind.ATTENTION, 1, token_bytes),), "")
    return shape_of(
        read_config(args.model, os.environ),
        dtype=args.dtype,
        kv_dtype=args.kv_cache_dtype,
        state_dtype=args.state_dtype,
        num_ranks=args.tensor_parallel_size,
    )


def _whole_blocks(trace: Trace) -> Trace:
    has_tails = bool((trace.lengths * trace.block_tokens > trace.input_tokens).any())
    return trace.full_blocks() if has_tails else trace


def _study(output: Output, trace: Trace, asked: _Asked) -> Study:
    each = block_bytes(trace, asked.shape)
    sizes = sorted({*asked.hosts, *asked.disks} - {0})
    names = [*asked.policies, "belady"]
    with output.progress("replaying", len(names) * len(sizes)) as progress:
        curves = [
            replay(
                trace,
                name,
                sizes,
                each,
                lambda name=name: progress.step(note=name),  # type: ignore[misc] # a default has no type
            )
            for name in names
        ]
    return Study(
        trace=trace,
        block_bytes=each,
        policies=tuple(curves[:-1]),
        optimum=curves[-1],
        limit=hit_curve(trace, "unbounded", [1])[0],
        hosts=tuple(asked.hosts),
        disks=tuple(asked.disks),
        prefill_tokens_per_s=asked.prefill_tokens_per_s,
        disk_bytes_per_s=asked.drive.read_bytes_per_s,
    )


def _check(output: Output, study: Study, advice: Advice, drive: Drive) -> Report:
    with output.progress("checking requests", study.trace.num_requests) as progress:
        return check(study, advice.levels, drive, progress.step)


_Words = tuple[list[str], str]
"""The lines of the advice, and the command."""


def _show(output: Output, study: Study, asked: _Asked, advice: Advice, said: _Words) -> None:
    for line in studied(study, asked.shape, asked.name):
        say(output, line)
    for heading, titles, rows in _tables(study, asked, advice):
        say(output)
        say(output, output.paint(heading, "bold"))
        output.table([Column(title, "right") for title in titles], rows)
    say(output)
    say(output, output.paint("Recommended", "bold"))
    for line in said[0]:
        say(output, f"  {line}")
    say(output, f"  {output.paint(said[1], 'green')}")
    say(output)
    say(output, output.paint("What was assumed", "bold"))
    for line in assumptions(study, asked.prices, has_ends=bool(asked.shape.tail_bytes(1))):
        say(output, f"  {line}")


def _tables(study: Study, asked: _Asked, advice: Advice) -> list[Table]:
    tables = [host_table(study, asked.prices)]
    if any(study.disks):
        host = advice.levels.host_bytes
        tables.append(disk_table(study, host, asked.drive, asked.prices))
    return tables


def _draw(folder: Path, study: Study, asked: _Asked, advice: Advice, said: _Words) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    told = Told(study, advice, asked.drive, asked.prices, asked.name)
    pictures = draw(told, folder)
    file = folder / "plan.html"
    first, *rest = studied(study, asked.shape, asked.name)
    page = Page(
        title=f"What a cache would bring: {study.trace.name}",
        under=f"{first}; {'; '.join(rest)}",
        advice=said[0],
        command=said[1],
        pictures={name: (files[1], SHOWN[name]) for name, files in pictures.items()},
        tables=_tables(study, asked, advice),
        notes=assumptions(study, asked.prices, has_ends=bool(asked.shape.tail_bytes(1))),
    )
    write_page(page, file)
    return [file, *(drawn for files in pictures.values() for drawn in files)]


def _as_data(path: str, study: Study, asked: _Asked, advice: Advice) -> dict[str, Any]:
    trace = study.trace
    return {
        "trace": {
            "path": path,
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_blocks": trace.num_blocks,
            "block_tokens": trace.block_tokens,
            "seconds": study.seconds,
            "all_bytes": study.all_bytes,
        },
        "model": {
            "name": asked.model,
            "layers": asked.shape.text,
            "token_bytes": asked.shape.token_bytes,
            "block_bytes": study.block_bytes,
        },
        "prefill_tokens_per_s": study.prefill_tokens_per_s,
        "disk_worth_ratio": study.disk_worth,
        "unbounded_token_hit_ratio": study.limit.token_hit_ratio,
        "curves": {
            curve.policy: [
                {"bytes": size, "token_hit_ratio": row.token_hit_ratio, **asdict(row)}
                for size, row in zip(curve.sizes, curve.rows, strict=True)
            ]
            for curve in (*study.policies, study.optimum)
        },
        "levels": [
            _level_data(study, asked.prices, host, disk)
            for host in study.hosts
            for disk in study.disks
        ],
        "advice": {
            **asdict(advice.levels),
            "why": advice.why,
            "wear_ratio": advice.wear,
            "write_budget_bytes": advice.budget_bytes,
            "better": asdict(advice.better) if advice.better else None,
            "complaint": advice.complaint,
            "not_asked": advice.not_asked,
            "net_a_month": advice.net_a_month,
        },
    }


def _checked_data(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return asdict(report) | {"token_hit_ratio": report.hit_tokens / report.num_tokens}


def _level_data(study: Study, prices: Prices, host: int, disk: int) -> dict[str, Any]:
    levels = study.levels(host, disk)
    told = {"net_a_month": net_a_month(levels, prices)} if prices.are_complete else {}
    return {**asdict(levels), "token_hit_ratio": levels.ratio, **told}
