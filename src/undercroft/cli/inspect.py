"""`undercroft inspect`: one chunk, its header, where it is, whether it is good."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress

from undercroft.cli.output import Exit, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_path,
    catalog_of,
    find_chunks,
    say,
    size_text,
    when_text,
)
from undercroft.errors import CorruptChunk, FormatTooNew
from undercroft.tiers import frame
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fsck import Fsck
from undercroft.tiers.disk.stored import StoredChunk, StoredNamespace

__all__ = ["add_parser", "run"]

_GROUP_BYTES = 4


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "inspect",
        "show one chunk of a store on disk: header, place, checksum",
        description="Shows a chunk wherever it is stored, reads it, and says whether it is good.",
    )
    parser.add_argument(
        "key", metavar="KEY", help="its key in hex; the first digits are enough if no other has"
    )
    parser.add_argument(
        "--namespace", metavar="DIGITS", help="the first digits of the only one to look in"
    )
    add_path(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    catalog, output = catalog_of(args), output_for(args)
    store = catalog.look()
    with output.progress("reading the indexes"):
        places = find_chunks(catalog, store, args.key, args.namespace)
    if not places:
        say(output, f"no chunk has a key that begins with {args.key}")
        output.data({"key": args.key, "places": []})
        return Exit.PROBLEM
    fsck = Fsck(catalog, num_threads=1)
    found = [(namespace, chunk, fsck.verify(chunk)) for namespace, chunk in places]
    documents = [_document(catalog, namespace, chunk, wrong) for namespace, chunk, wrong in found]
    for document in documents:
        for name, value in document.items():
            say(output, f"{name.replace('_', ' '):<22}{value}")
        say(output)
    output.data({"key": documents[0]["key"], "places": documents})
    return Exit.PROBLEM if any(wrong for *_, wrong in found) else Exit.FINE


def _document(
    catalog: Catalog, namespace: StoredNamespace, chunk: StoredChunk, wrong: str
) -> Mapping[str, object]:
    record_bytes = chunk.segment.header.record_bytes if chunk.segment.header else 0
    offset = chunk.slot * record_bytes
    found: dict[str, object] = {
        "key": chunk.key.hex(),
        "group": int.from_bytes(chunk.key[-_GROUP_BYTES:], "big"),
        "state": wrong or ("good" if chunk.is_current else "void: stored before a reset"),
        "namespace": namespace.namespace_id,
        "model": namespace.model_name,
        "payload": f"{chunk.payload_bytes} ({size_text(chunk.payload_bytes)})",
        "record_bytes": record_bytes,
        "epoch": chunk.epoch,
        "current_epoch": namespace.epoch,
        "sequence": chunk.sequence,
        "slab": chunk.segment.slab_path,
        "offset": offset,
        "slot": chunk.slot,
        "segment_last_written": when_text(chunk.segment.modified_s),
        "segment_in_use": chunk.segment.users.is_held,
    }
    with suppress(OSError):
        block = catalog.read_file(chunk.segment.slab_path, frame.HEADER_BYTES, offset)
        found.update(_header(block.ljust(frame.HEADER_BYTES, b"\0")))
    return found


def _header(block: bytes) -> Mapping[str, object]:
    try:
        head = frame.unpack(memoryview(block))
    except (CorruptChunk, FormatTooNew) as error:
        return {"header": str(error)}
    return {
        "header": "good",
        "header_key": head.key.hex(),
        "header_namespace": head.namespace.hex(),
        "header_epoch": head.epoch,
        "header_sequence": head.sequence,
        "header_payload_bytes": head.payload_bytes,
        "header_checksum": f"xxh3-64 {head.payload_checksum:016x}",
    }
