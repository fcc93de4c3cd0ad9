"""The eviction seam: who goes first. Keys only: no bytes, pins, clock or requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from undercroft.keys import ChunkKey

__all__ = ["EvictionPolicy", "InRuns", "Learning"]


class EvictionPolicy(Protocol):
    """Orders the resident keys of one level by who should go first.

    Each call is O(1) amortized and O(capacity) never, at a million keys. No per-key object that
    Python's garbage collector tracks. Threads: one.
    """

    name: str

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether `key` is resident."""
        ...

    def on_insert(self, key: ChunkKey) -> None:
        """`key` became resident."""
        ...

    def on_hit(self, key: ChunkKey) -> None:
        """Resident `key` was used. Callers touch a prefix deepest first, so roots end newest."""
        ...

    def on_evict(self, key: ChunkKey) -> None:
        """Resident `key` left by choice; the policy may remember it (a ghost)."""
        ...

    def on_drop(self, key: ChunkKey) -> None:
        """`key` is void (corrupt, reset): forget it wholly, ghost included. Unknown is fine."""
        ...

    def victims(self) -> Iterator[ChunkKey]:
        """Residents, first to go first, each once; lazy, changes nothing.

        The caller skips what is pinned (and then calls `on_hit` on it, so that it is out of the
        way) and stops early. Calling any other method invalidates the iterator.
        """
        ...


@runtime_checkable
class InRuns(Protocol):
    """A policy that can be looked through in long strides, past many pinned keys at once."""

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """Residents in the order of `victims`, or nearly, cut into runs of some hundred.

        As lazy; to step over a run costs as little as to take its first key. The caller does so
        when that key is pinned.

        Args:
            stride: Leave all out but every nth; those cost hardly anything.
        """
        ...


@runtime_checkable
class Learning(Protocol):
    """A policy that learns from whole requests."""

    def on_request(self, keys: Sequence[ChunkKey], now_s: float, kind: int = 0) -> None:
        """A request ended; called before `on_insert` and `on_hit` of the same keys.

        Args:
            keys: Its chunks of one group, root first, full ones only.
            now_s: The time, of the clock that the policy was given.
            kind: How it ended, as far as the engine tells; 0: unknown.
        """
        ...
