"""`undercroft rm`: take namespaces or chunks out of a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from undercroft.cli.output import CommandFailed, Exit, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_path,
    catalog_of,
    find_chunks,
    find_namespace,
    has_prefix,
    parse_age,
    say,
    short_id,
    size_text,
    when_text,
)
from undercroft.clock import SystemClock
from undercroft.errors import ConfigError, TierUnavailable
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.stored import Store, StoredNamespace

__all__ = ["add_parser", "run"]

_SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    num_bytes: int
    remove: Callable[[], str]


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "rm",
        "remove namespaces or chunks from a store on disk",
        description="Removes what is named. What a running engine has open is refused: reset its "
        "cache instead, or stop it.",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="*",
        help="namespaces, or keys of chunks; the first digits are enough",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="segments of these namespaces, or of all, in which nothing was stored for so long: "
        "30d, 12h",
    )
    parser.add_argument("--all", action="store_true", help="every namespace")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_path(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    if not (args.what or args.all or args.older_than):
        raise ConfigError("name what to remove: a namespace, a key, --older-than AGE, or --all")
    if args.what and args.all:
        raise ConfigError("either names, or --all")
    catalog, output = catalog_of(args), output_for(args)
    targets = _targets(catalog, catalog.look(), args)
    for target in targets:
        say(output, f"{'would remove' if args.dry_run else 'remove'} {target.name}")
    left: dict[str, str] = {}
    if not args.dry_run and targets:
        _confirm(args, len(targets))
        with output.progress("removing", len(targets)) as progress:
            for target in targets:
                if why := _removed(target):
                    left[target.name] = why
                progress.step()
    for name, why in left.items():
        say(output, f"left {name}: {why}")
    if not targets:
        say(output, "nothing to remove")
    output.data(
        {
            "dry_run": args.dry_run,
            "targets": [
                {"what": t.name, "bytes": t.num_bytes, "left": left.get(t.name, "")}
                for t in targets
            ],
        }
    )
    return Exit.PROBLEM if left else Exit.FINE


def _removed(target: _Target) -> str:
    try:
        return target.remove()
    except (OSError, TierUnavailable) as error:
        return str(error)


def _confirm(args: argparse.Namespace, num: int) -> None:
    if args.yes:
        return
    if args.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("nobody can be asked here: add --yes")
    sys.stderr.write(f"Remove {num} of these for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("not confirmed: nothing was removed", Exit.PROBLEM)


def _targets(catalog: Catalog, store: Store, args: argparse.Namespace) -> list[_Target]:
    removal = Removal(catalog)
    if args.older_than:
        chosen = [find_namespace(store, text) for text in args.what] or list(store.namespaces)
        before_s = SystemClock().unix_s() - parse_age(args.older_than, "--older-than")
        return [
            _Target(
                f"segment {segment.segment_id} of namespace {short_id(namespace.namespace_id)}, "
                f"{size_text(segment.charged_bytes)}, last written {when_text(segment.modified_s)}",
                segment.charged_bytes,
                lambda segment=segment: removal.remove_segment(segment),  # type: ignore[misc] # bound now
            )
            for namespace in chosen
            for segment in namespace.segments
            if segment.modified_s < before_s
        ]
    if args.all:
        return [_whole(removal, namespace) for namespace in store.namespaces]
    return [target for text in args.what for target in _named(catalog, removal, store, text)]


def _whole(removal: Removal, namespace: StoredNamespace) -> _Target:
    return _Target(
        f"namespace {short_id(namespace.namespace_id)} ({namespace.model_name or '?'}), "
        f"{size_text(namespace.charged_bytes)}",
        namespace.charged_bytes,
        lambda: removal.remove_namespace(namespace),
    )


def _named(catalog: Catalog, removal: Removal, store: Store, text: str) -> list[_Target]:
    if not has_prefix(text):
        raise ConfigError(f"{text!r} is neither a namespace nor a key: both are hex digits")
    is_namespace = any(n.namespace_id.startswith(text.lower()) for n in store.namespaces)
    chunks = find_chunks(catalog, store, text) if len(text) >= _SHORTEST_KEY else []
    if is_namespace and chunks:
        raise ConfigError(f"both a namespace and a key begin with {text}: write more digits")
    if not chunks:
        return [_whole(removal, find_namespace(store, text))]
    return [
        _Target(
            f"chunk {chunk.key.hex()} of namespace {short_id(namespace.namespace_id)}, "
            f"{size_text(chunk.payload_bytes)}",
            chunk.payload_bytes,
            lambda chunk=chunk: removal.free_chunks(chunk.segment, [chunk]),  # type: ignore[misc] # bound now
        )
        for namespace, chunk in chunks
    ]
