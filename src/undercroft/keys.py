"""What a chunk is called, and what has to be equal for two chunks to be the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NewType

__all__ = ["MAX_KEY_BYTES", "ChunkKey", "Namespace", "first_difference"]

ChunkKey = NewType("ChunkKey", bytes)
"""Opaque packed bytes, 1 to `MAX_KEY_BYTES` long. vLLM: block hash + 4-byte big-endian group id.
Plain `bytes`, because the garbage collector does not track them."""

MAX_KEY_BYTES = 64


@dataclass(frozen=True)
class Namespace:
    """Everything besides the key that decides a chunk's bytes.

    Args:
        manifest: Readable JSON values, nested mappings and lists allowed. Two namespaces are
            the same if and only if their manifests are equal.
    """

    manifest: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The manifest as canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `text`, `(32,)` bytes."""
        return hashlib.sha256(self.text.encode()).digest()

    @property
    def id(self) -> str:
        """The first 32 hex digits of the digest; names directories. Compare manifests, not ids."""
        return self.digest.hex()[:32]


def first_difference(a: Namespace, b: Namespace) -> str | None:
    """The first field in which two manifests differ, with both values; None if they are equal.

    Fields are compared in the order of `a`; one made by `undercroft.identity` puts first what is
    likely to explain the rest: engine, model, groups, and so on.
    """
    return next(_differences("", a.manifest, b.manifest), None)


def _differences(path: str, a: object, b: object) -> Iterator[str]:
    if a is _ABSENT and isinstance(b, Mapping) and b:
        a = {}
    elif b is _ABSENT and isinstance(a, Mapping) and a:
        b = {}
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(below, a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for index in range(max(len(a), len(b))):
            left, right = (v[index] if index < len(v) else _ABSENT for v in (a, b))
            yield from _differences(f"{path}[{index}]", left, right)
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {_shown(a)} here, {_shown(b)} there"


class _Absent:
    pass


_ABSENT = _Absent()


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else repr(value)
