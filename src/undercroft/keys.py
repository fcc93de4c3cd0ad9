"""What a chunk is called, and what has to be equal for two chunks to be the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NewType

__all__ = ["MAX_KEY_BYTES", "ChunkKey", "Namespace"]

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
