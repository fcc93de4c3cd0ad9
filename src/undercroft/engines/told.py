"""What processes of one engine tell each other through shared memory: packed JSON, bounded.

Written by another process, so judged before it is believed: a few bytes of it could unpack to
gigabytes. Imports no engine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from undercroft.errors import ConfigError
from undercroft.layout.stored import StoredLayout

__all__ = ["MAX_TOLD_BYTES", "pack", "parse_note", "unpack"]

MAX_TOLD_BYTES = 4 << 20
"""As JSON. Real ones are some 10 KiB."""


def pack(value: Mapping[str, Any]) -> bytes:
    """`value` for others.

    Raises:
        ConfigError: Too much; nobody would read it.
    """
    text = json.dumps(value, sort_keys=True).encode()
    if len(text) > MAX_TOLD_BYTES:
        raise ConfigError(f"{len(text)} bytes are to be told, {MAX_TOLD_BYTES} at most can be")
    return zlib.compress(text)


def unpack(data: bytes) -> dict[str, Any]:
    """What `pack` made. Cost: as much memory as `MAX_TOLD_BYTES` of JSON take, never more.

    Raises:
        ValueError: Something else.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_TOLD_BYTES)
        is_whole = unpacker.eof and not unpacker.unused_data
        value = json.loads(text) if is_whole else None
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"not packed JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("cut off, too long, or no object")  # noqa: TRY004 - one kind of failure
    return value


def parse_note(rank: int, note: bytes) -> Mapping[str, Any]:
    """What `RankLayout.note` said.

    Raises:
        ConfigError: Something else.
    """
    try:
        said = unpack(note)
        StoredLayout(said["stored"])
        if not isinstance(said["why"], str) or not _are_layers(said["layers"]):
            raise ValueError("no reason, or no layers")  # noqa: TRY301 - one way out
        return {name: said[name] for name in ("stored", "why", "is_less", "layers")}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"rank {rank} does not say what it stores ({error!r}): it runs another version of "
            "undercroft; install the same"
        ) from error


def _are_layers(value: object) -> bool:
    """Whether it is a list, by group, of lists of layer names."""
    return isinstance(value, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in value
    )
