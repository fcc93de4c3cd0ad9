"""Which trace a command replays, and what is left out of it."""

from __future__ import annotations

import argparse

from undercroft.traces import Trace, load

__all__ = ["add_trace_flags", "load_trace"]


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Which trace is replayed."""
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="the requests, plain or compressed with gzip"
    )
    parser.add_argument(
        "--format", metavar="NAME", help="its format; told by its first line where left out"
    )
    parser.add_argument(
        "--kinds",
        choices=("all", "none"),
        default="all",
        help="what policies that learn hear of how requests ended: what the trace says of it, or "
        "nothing, as from an engine that does not tell (%(default)s)",
    )


def load_trace(args: argparse.Namespace, *, full_blocks: bool = False) -> Trace:
    """The trace that the flags name.

    Args:
        args: With what `add_trace_flags` adds.
        full_blocks: Leave out the last block of requests where it is not full.

    Raises:
        BadTrace: A line of it is wrong.
        OSError: It cannot be read.
    """
    trace = load(args.trace, args.format)
    if full_blocks:
        trace = trace.full_blocks()
    return trace if args.kinds == "all" else trace.without_kinds()
