"""`undercroft verify`: a store checked whole, and mended where nobody uses it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from undercroft.cli.output import Exit, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_capacity,
    add_path,
    capacity_of,
    catalog_of,
    counted,
    say,
    size_text,
)
from undercroft.tiers.disk.fsck import Finding, Fsck
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.repair import Remedy, repair
from undercroft.tiers.disk.stored import Store

__all__ = ["add_parser", "run"]

_MAX_SHOWN = 100


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "verify",
        "check every chunk of a store on disk, and mend what is bad",
        description="Reads every record and compares it with its checksum and its entry; checks "
        "sizes, debris of crashes, and the capacity. Safe beside running engines.",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="free what is bad, where no engine has it open, and say what is left",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        default=4,
        help="records read at the same time (default: 4)",
    )
    add_path(parser)
    add_capacity(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    catalog, output, capacity = catalog_of(args), output_for(args), capacity_of(args)
    store = catalog.look()
    with output.progress("reading chunks, MiB", _whole_mib(store)) as progress:
        done_mib = 0

        def on_progress(done_bytes: int, _total_bytes: int) -> None:
            nonlocal done_mib
            progress.step((done_bytes >> 20) - done_mib)
            done_mib = done_bytes >> 20

        fsck = Fsck(catalog, num_threads=max(1, args.threads), on_progress=on_progress)
        report = fsck.check(store, capacity_bytes=capacity)
    remedies = [Remedy(finding) for finding in report.findings]
    if args.repair:
        with output.progress("repairing", len(remedies)) as progress:
            remedies = []
            for remedy in repair(report, store, fsck, Removal(catalog), capacity):
                remedies.append(remedy)
                progress.step()
    for remedy in remedies[:_MAX_SHOWN]:
        say(output, _text(remedy))
    if len(remedies) > _MAX_SHOWN:
        say(output, f"... and {len(remedies) - _MAX_SHOWN} more; --json has all")
    num_left = sum(remedy.finding.is_fault and not remedy.done for remedy in remedies)
    if not store.is_settled:
        say(output, "another process holds the store's lock: debris and halves were not looked for")
    say(
        output,
        f"{counted(report.num_chunks, 'chunk')} ({size_text(report.num_bytes)}) in "
        f"{counted(report.num_segments, 'segment')} of "
        f"{counted(report.num_namespaces, 'namespace')} read; {report.num_void} void; "
        f"{counted(report.num_faults, 'fault')}" + (f", {num_left} left" if args.repair else ""),
    )
    output.data(
        {
            "path": store.path,
            "namespaces": report.num_namespaces,
            "segments": report.num_segments,
            "chunks": report.num_chunks,
            "void_chunks": report.num_void,
            "bytes": report.num_bytes,
            "charged_bytes": store.charged_bytes,
            "capacity_bytes": capacity,
            "settled": store.is_settled,
            "faults": report.num_faults,
            "left": num_left,
            "findings": [_document(remedy) for remedy in remedies],
        }
    )
    return Exit.PROBLEM if num_left else Exit.FINE


def _whole_mib(store: Store) -> int:
    """What there is to read."""
    segments = (segment for namespace in store.namespaces for segment in namespace.segments)
    return sum(s.slab.num_bytes for s in segments if s.slab and s.header) >> 20


def _text(remedy: Remedy) -> str:
    finding = remedy.finding
    what = f"{'fault' if finding.is_fault else 'note'}: {finding.kind.value}: {_where(finding)}"
    become = (
        f" [{remedy.done}]" if remedy.done else f" [left: {remedy.left}]" if remedy.left else ""
    )
    return f"{what}: {finding.what}{become}"


def _where(finding: Finding) -> str:
    return f"{finding.path} slot {finding.slot}" if finding.slot >= 0 else finding.path


def _document(remedy: Remedy) -> Mapping[str, object]:
    finding = remedy.finding
    return {
        "kind": finding.kind.value,
        "fault": finding.is_fault,
        "path": finding.path,
        "slot": finding.slot if finding.slot >= 0 else None,
        "key": finding.chunk.key.hex() if finding.chunk else None,
        "what": finding.what,
        "done": remedy.done,
        "left": remedy.left,
    }
