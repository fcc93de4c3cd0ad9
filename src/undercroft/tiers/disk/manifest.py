"""Reads a manifest that lies on disk: bounded in bytes and depth before anything is made of it."""

from __future__ import annotations

import json

from undercroft.errors import CorruptChunk
from undercroft.keys import Namespace

__all__ = ["MAX_MANIFEST_BYTES", "parse_manifest"]

MAX_MANIFEST_BYTES = 1 << 20
"""Real ones are some 10 KiB. Parsed, JSON takes up to some 30 times its bytes."""

_MAX_DEPTH = 64


def parse_manifest(data: bytes) -> Namespace:
    """The namespace that a manifest's bytes describe.

    Raises:
        CorruptChunk: Too large, too deep, or not a JSON object.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptChunk(f"the manifest has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        stored = json.loads(data)
        if not isinstance(stored, dict) or _is_deep(stored):
            raise CorruptChunk("the manifest is damaged")
        namespace = Namespace(stored)
        _ = namespace.digest  # what cannot be written again is no manifest
    except (ValueError, RecursionError) as exc:
        raise CorruptChunk("the manifest is damaged") from exc
    return namespace


def _is_deep(value: object) -> bool:
    """Whether lists and objects are nested more deeply than any manifest of ours."""
    layer = [value]
    for _ in range(_MAX_DEPTH):
        layer = [
            below
            for one in layer
            if isinstance(one, dict | list)
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        if not layer:
            return False
    return True
