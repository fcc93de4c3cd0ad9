"""The eviction seam: who goes first. Keys only: no bytes, pins, clock or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from undercroft.keys import ChunkKey

__all__ = ["Evicting", "EvictionPolicy", "InRuns", "InsertingMany", "Learning"]


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
        """The bytes of `key` are void (corrupt, reset): it left, as a ghost too. Unknown is fine.

        What is known of the traffic, the key's uses among it, may stay: it was no less true.
        """
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
    """A policy that wants to know of whole requests, found by `isinstance`."""

    def on_request(
        self, keys: Sequence[ChunkKey], now_s: float, kind: int = 0, num_told: int = 0
    ) -> None:
        """A request has ended that used `keys`, or has been going on for long.

        Called once a request and group, before `on_insert` and `on_hit` of the same keys; again
        if it was called before the end, and the request has grown since.

        Args:
            keys: Of one group, root first, without holes; of full chunks only. Resident or not.
            now_s: The clock's time.
            kind: How the request ended, as far as the engine tells: bit 0 = it ended the turn,
                bit 1 = a sub-agent's call.
            num_told: Of so many, from the root on, this same request was told of before: it is one
                use, not two.
        """
        ...


@runtime_checkable
class InsertingMany(Protocol):
    """A policy to which many chunks at once cost less than one by one."""

    def on_insert_all(self, keys: Sequence[ChunkKey]) -> None:
        """The same as `on_insert` of each of `keys`, in this order."""
        ...


@runtime_checkable
class Evicting(Protocol):
    """A policy that evicts many at once itself, and knows then what could not go."""

    def evict(self, num_keys: int, is_kept: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
        """Evict up to `num_keys`, as `on_evict` of each of `victims` would, but none that is kept.

        A kept key is not used by that, nor called hit afterwards. Bounded: fewer may be found than
        there are; the next call goes on.
        """
        ...
