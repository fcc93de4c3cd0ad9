"""`undercroft gc`: let go of what a store need not keep."""

from __future__ import annotations

import argparse

from undercroft.cli.output import Exit, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_capacity,
    add_path,
    capacity_of,
    catalog_of,
    parse_age,
    say,
    size_text,
)
from undercroft.clock import SystemClock
from undercroft.errors import TierUnavailable
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.sweep import Waste, plan, remove

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "gc",
        "remove debris, old formats, and what nobody has used for long",
        description="Removes files that a crash left, segments that serve nothing, namespaces of "
        "older formats and empty ones; with --unused-for, namespaces in which nothing was stored "
        "for so long; with a capacity, the coldest segments beyond it. Never what a running "
        "engine has open, nor files that are not ours.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument(
        "--unused-for",
        metavar="DAYS",
        help="also namespaces in which nothing was stored for so many days; or 12h, 2w",
    )
    add_path(parser)
    add_capacity(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    catalog, output = catalog_of(args), output_for(args)
    unused_s = parse_age(args.unused_for, "--unused-for") if args.unused_for else None
    capacity = capacity_of(args)
    store = catalog.look()
    if not store.is_settled:
        raise TierUnavailable(f"another process holds {store.path}/lock: try again")
    found = plan(store, now_s=SystemClock().unix_s(), unused_s=unused_s, capacity_bytes=capacity)
    removal = Removal(catalog)
    why_left: list[str] = []
    with output.progress("removing", len(found)) as progress:
        for waste in found:
            why_left.append("" if args.dry_run else _removed(waste, removal))
            progress.step()
    ended = list(zip(found, why_left, strict=True))
    for waste, why in ended:
        detail = f" ({waste.detail})" if waste.detail else ""
        become = f" [left: {why}]" if why else ""
        size = size_text(waste.num_bytes)
        say(output, f"{waste.reason.value}: {waste.path}, {size}{detail}{become}")
    freed = sum(waste.num_bytes for waste, why in ended if not why)
    left = sum(bool(why) for why in why_left)
    verb = "would give back" if args.dry_run else "gave back"
    whole = size_text(store.charged_bytes)
    say(output, f"{len(found) - left} things, {verb} {size_text(freed)} of {whole}")
    over = capacity is not None and store.charged_bytes - freed > capacity
    if over:
        say(output, "still over the capacity: the rest is in use, or not ours")
    output.data(
        {
            "path": store.path,
            "dry_run": args.dry_run,
            "bytes": freed,
            "charged_bytes": store.charged_bytes,
            "capacity_bytes": capacity,
            "over_capacity": over,
            "waste": [
                {
                    "reason": waste.reason.name.lower(),
                    "path": waste.path,
                    "bytes": waste.num_bytes,
                    "detail": waste.detail,
                    "left": why,
                }
                for waste, why in ended
            ],
        }
    )
    return Exit.PROBLEM if left or over else Exit.FINE


def _removed(waste: Waste, removal: Removal) -> str:
    try:
        return remove(waste, removal)
    except (OSError, TierUnavailable) as error:
        return str(error)
