"""`undercroft du`: the bytes of a store, per namespace, per model, and by age."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping

from undercroft.cli.output import Exit, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_capacity,
    add_path,
    capacity_of,
    catalog_of,
    columns,
    say,
    short_id,
    size_text,
    when_text,
)
from undercroft.clock import SystemClock
from undercroft.tiers.disk.stored import Store

__all__ = ["add_parser", "run"]

_HOUR_S, _DAY_S = 3600.0, 86400.0
_AGES = (
    ("last hour", _HOUR_S),
    ("last day", _DAY_S),
    ("last week", 7 * _DAY_S),
    ("last 30 days", 30 * _DAY_S),
    ("longer ago", float("inf")),
)


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "du",
        "show what a store on disk takes, per namespace, model and age",
        description="Shows what a disk tier takes. The total is what `du` says of the directory, "
        "and what counts against the capacity. Safe beside running engines.",
    )
    add_path(parser)
    add_capacity(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    store, output = catalog_of(args).look(), output_for(args)
    capacity = capacity_of(args)
    by_model, by_age = _by_model(store), _by_age(store, SystemClock().unix_s())
    shared = sum(piece.charged_bytes for piece in store.own)
    foreign = sum(piece.charged_bytes for piece in store.foreign)
    total = store.charged_bytes
    output.table(
        columns("NAMESPACE", "MODEL", "DTYPE", "BYTES", "SHARE", "STORED"),
        [
            (
                short_id(namespace.namespace_id),
                namespace.model_name or "?",
                namespace.dtype or "?",
                size_text(namespace.charged_bytes),
                f"{100 * namespace.charged_bytes / total:.1f} %",
                when_text(namespace.modified_s),
            )
            for namespace in sorted(store.namespaces, key=lambda n: -n.charged_bytes)
        ],
    )
    if len(by_model) > 1 or len(store.namespaces) > 1:
        say(output)
        output.table(
            columns("MODEL", "BYTES"), [(m or "?", size_text(n)) for m, n in by_model.items()]
        )
    say(output)
    output.table(columns("STORED", "BYTES"), [(a, size_text(n)) for a, n in by_age.items() if n])
    say(output)
    if foreign:
        say(output, f"not ours: {size_text(foreign)}")
    allowed = f" of {size_text(capacity)} ({100 * total / capacity:.0f} %)" if capacity else ""
    say(output, f"total: {size_text(total)}{allowed}, {total} bytes")
    output.data(
        {
            "path": store.path,
            "bytes": total,
            "disk_bytes": store.disk_bytes,
            "capacity_bytes": capacity,
            "shared_bytes": shared,
            "foreign_bytes": foreign,
            "namespaces": [
                {
                    "id": namespace.namespace_id,
                    "model": namespace.model_name,
                    "dtype": namespace.dtype,
                    "bytes": namespace.charged_bytes,
                    "modified_unix_s": namespace.modified_s,
                }
                for namespace in store.namespaces
            ],
            "models": by_model,
            "ages": by_age,
        }
    )
    return Exit.FINE


def _by_model(store: Store) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for namespace in store.namespaces:
        found[namespace.model_name] += namespace.charged_bytes
    return dict(found.most_common())


def _by_age(store: Store, now_s: float) -> Mapping[str, int]:
    """Bytes of segments by when something was last stored in them."""
    found = {name: 0 for name, _ in _AGES}
    for namespace in store.namespaces:
        for segment in namespace.segments:
            age_s = now_s - segment.modified_s
            name = next(name for name, limit_s in _AGES if age_s < limit_s)
            found[name] += segment.charged_bytes
    return found
