"""Let a chunk in when a second request brings it: flash is not worn by what never returns."""

from __future__ import annotations

from undercroft.admission.sightings import MAX_TRACKED, Sightings
from undercroft.keys import ChunkKey

__all__ = ["SecondSight"]


class SecondSight:
    """Admits a chunk from its second offer on.

    What `frequency` does with two sights, remembered in an eighth of the memory or less: what
    matters is that a key is still known when its prompt comes back.

    Args:
        max_tracked: Keys remembered, the latest offered.

    Raises:
        ConfigError: `max_tracked` is not a whole number above 0.

    Memory: 8 to 16 bytes a tracked key, at once. Threads: one. Cost: O(1).
    """

    name = "second_sight"

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self._sightings = Sightings(max_tracked, "admission second_sight")

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:  # noqa: ARG002 - the seam's signature
        """Whether `key` was offered before."""
        return self._sightings.see(key) > 1
