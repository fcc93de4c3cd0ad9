"""Tell lower levels what ended requests used, a bounded number of chunks a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

from undercroft.hierarchy.cascade import Cascade
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.restore import Restores
from undercroft.keys import ChunkKey

__all__ = ["Touches"]

_MAX_PER_STEP = 1024


class Touches:
    """Chains of chunks to be touched, those of the earliest request first.

    Args:
        restores: Knows which usable level has a chunk.
        cascade: Is offered what none has.

    Threads: the scheduler's.
    """

    def __init__(self, levels: Sequence[Level], restores: Restores, cascade: Cascade) -> None:
        self._levels = levels
        self._restores = restores
        self._cascade = cascade
        self._chains: deque[tuple[list[ChunkKey], Container[ChunkKey]]] = deque()

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, chain: list[ChunkKey], once: Container[ChunkKey]) -> None:
        """A request that used `chain`, from the root on, has ended; `once` is not offered again."""
        self._chains.append((chain, once))

    def submit(self) -> None:
        """Touch, leaf first, as much as a step may cost."""
        budget, level_with = _MAX_PER_STEP, self._restores.level_with
        while self._chains and budget > 0:
            chain, once = self._chains[0]
            part = chain[-budget:]
            del chain[-budget:]
            budget -= len(part)
            if not chain:
                self._chains.popleft()
            for level in self._levels:
                level.touch(part, once)
            # What a lower level refused or lost while it was full or away gets another chance.
            # A level that counts offers gets one a request.
            self._cascade.add([k for k in part if k not in once and level_with(k) is None])

    def clear(self) -> None:
        """Forget them all."""
        self._chains.clear()
