"""The admission seam: who may come into a level. Keys only."""

from __future__ import annotations

from typing import Protocol

from undercroft.keys import ChunkKey

__all__ = ["Admission"]


class Admission(Protocol):
    """Decides whether a chunk is worth a write to a level. Threads: one. O(1)."""

    name: str

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:
        """Whether to write `key` now. Called once per offer."""
        ...
