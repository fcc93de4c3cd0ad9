"""`undercroft ls`: the namespaces of a store, or the chunks of one."""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping

from undercroft.cli.output import Exit, Output, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_path,
    catalog_of,
    columns,
    find_namespace,
    say,
    short_id,
    size_text,
    when_text,
    words,
)
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.stored import Store, StoredChunk, StoredNamespace

__all__ = ["add_parser", "run"]

_LIMIT = 50


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "ls",
        "list the namespaces of a store on disk, or the chunks of one",
        description="Lists what a disk tier holds. Safe beside running engines.",
    )
    parser.add_argument(
        "namespace", metavar="NAMESPACE", nargs="?", help="the first digits of one: list its chunks"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=_LIMIT,
        help="chunks to list, latest first (default: 50)",
    )
    parser.add_argument("--void", action="store_true", help="also chunks that a reset made void")
    add_path(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    catalog = catalog_of(args)
    store = catalog.look()
    output = output_for(args)
    if args.namespace:
        _chunks(output, catalog, find_namespace(store, args.namespace), args)
    else:
        _namespaces(output, catalog, store)
    return Exit.FINE


def _namespaces(output: Output, catalog: Catalog, store: Store) -> None:
    documents = [_document(catalog, namespace) for namespace in store.namespaces]
    if not documents:
        say(output, f"{store.path} holds no namespace")
    output.table(
        columns("NAMESPACE", "MODEL", "DTYPE", "CHUNKS", "VOID", "BYTES", "STORED", "IN USE"),
        [
            (
                short_id(namespace.namespace_id),
                namespace.model_name or "?",
                namespace.dtype or "?",
                str(document["chunks"]),
                str(document["void_chunks"]),
                size_text(namespace.charged_bytes),
                when_text(namespace.modified_s),
                _in_use(namespace),
            )
            for namespace, document in zip(store.namespaces, documents, strict=True)
        ],
    )
    for namespace, document in zip(store.namespaces, documents, strict=True):
        where = short_id(namespace.namespace_id)
        if namespace.problem:
            say(output, f"{where}: {namespace.problem}")
        for segment in namespace.segments:
            if segment.problem:
                say(output, f"{where}: segment {segment.segment_id}: {segment.problem}")
        if document["damaged_entries"]:
            say(output, f"{where}: {document['damaged_entries']} damaged entries")
    for piece in store.foreign:
        say(output, f"not ours: {piece.path}, {size_text(piece.charged_bytes)}")
    output.data(
        {
            "path": store.path,
            "bytes": store.charged_bytes,
            "namespaces": documents,
            "foreign": [{"path": p.path, "bytes": p.charged_bytes} for p in store.foreign],
        }
    )


def _in_use(namespace: StoredNamespace) -> str:
    if not namespace.is_in_use:
        return "no"
    if namespace.users.is_held is None:
        return "unknown"
    return f"by {words(namespace.pids)}" if namespace.pids else "yes"


def _document(catalog: Catalog, namespace: StoredNamespace) -> Mapping[str, object]:
    current = void = damaged = 0
    for segment in namespace.segments:
        entries = catalog.entries(segment)
        if entries is not None:
            mine = int((entries.epochs == (namespace.epoch or 0)).sum())
            current, void = current + mine, void + len(entries.keys) - mine
            damaged += len(entries.damaged_slots)
    return {
        "id": namespace.namespace_id,
        "model": namespace.model_name,
        "dtype": namespace.dtype,
        "manifest": namespace.manifest,
        "problem": namespace.problem,
        "epoch": namespace.epoch,
        "chunks": current,
        "void_chunks": void,
        "damaged_entries": damaged,
        "bytes": namespace.charged_bytes,
        "modified_unix_s": namespace.modified_s,
        "in_use": namespace.users.is_held
        if namespace.users.is_held is None
        else namespace.is_in_use,
        "pids": list(namespace.pids),
        "segments": [
            {
                "id": segment.segment_id,
                "bytes": segment.charged_bytes,
                "slots": segment.header.num_slots if segment.header else None,
                "record_bytes": segment.header.record_bytes if segment.header else None,
                "modified_unix_s": segment.modified_s,
                "in_use": segment.users.is_held,
                "pids": list(segment.users.pids),
                "problem": segment.problem,
            }
            for segment in namespace.segments
        ],
    }


def _chunks(
    output: Output, catalog: Catalog, namespace: StoredNamespace, args: argparse.Namespace
) -> None:
    wanted = (c for c in catalog.chunks(namespace) if args.void or c.is_current)
    num_found, latest = 0, list[tuple[int, int, StoredChunk]]()
    with output.progress("reading the indexes, chunks") as progress:
        for chunk in wanted:
            num_found += 1
            item = (chunk.sequence, num_found, chunk)
            if len(latest) < args.limit:
                heapq.heappush(latest, item)
            elif latest:
                heapq.heappushpop(latest, item)
            progress.step()
    listed = [chunk for *_, chunk in sorted(latest, reverse=True)]
    output.table(
        columns("KEY", "BYTES", "EPOCH", "SEQUENCE", "SEGMENT", "SLOT", "SEGMENT LAST WRITTEN"),
        [
            (
                chunk.key.hex(),
                str(chunk.payload_bytes),
                f"{chunk.epoch}" if chunk.is_current else f"{chunk.epoch} (void)",
                str(chunk.sequence),
                chunk.segment.segment_id,
                str(chunk.slot),
                when_text(chunk.segment.modified_s),
            )
            for chunk in listed
        ],
    )
    if num_found > len(listed):
        say(output, f"... and {num_found - len(listed)} more (--limit)")
    if not num_found:
        say(output, f"namespace {short_id(namespace.namespace_id)} holds no chunk")
    output.data(
        {
            "namespace": namespace.namespace_id,
            "chunks": num_found,
            "listed": [_chunk_document(chunk) for chunk in listed],
        }
    )


def _chunk_document(chunk: StoredChunk) -> Mapping[str, object]:
    return {
        "key": chunk.key.hex(),
        "bytes": chunk.payload_bytes,
        "epoch": chunk.epoch,
        "current": chunk.is_current,
        "sequence": chunk.sequence,
        "segment": chunk.segment.segment_id,
        "slot": chunk.slot,
        "segment_modified_unix_s": chunk.segment.modified_s,
    }
