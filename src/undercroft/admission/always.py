"""Let every chunk in."""

from __future__ import annotations

from undercroft.keys import ChunkKey

__all__ = ["Always"]


class Always:
    """Admits every chunk: the default, and the right choice where writes cost nothing."""

    name = "always"

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:  # noqa: ARG002 - the seam's signature
        """Yes."""
        return True
