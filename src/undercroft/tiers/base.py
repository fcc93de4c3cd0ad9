"""The tier seam: bytes of one chunk, in and out.

A tier author writes five blocking verbs. Jobs, deadlines, retries, back-off, circuit breaking,
batching and back-pressure live once, in `hierarchy.transfers`; who is evicted is decided once, by
the hierarchy. A tier only moves bytes, and is right or says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from undercroft.keys import ChunkKey

__all__ = [
    "Allowance",
    "Batched",
    "Bounded",
    "Budgeted",
    "Described",
    "Ends",
    "Epochal",
    "Following",
    "Indexed",
    "MovedElsewhere",
    "Owing",
    "SharedMemory",
    "Tier",
]


@runtime_checkable
class Tier(Protocol):
    """Where chunks of one namespace live below level 0.

    Made once per engine, with what its constructor names of `name`, `namespace`, `capacity_bytes`,
    `clock`, `num_replicas`, `memory` (`SharedMemory` or None), and with the user's options.

    Buffers are contiguous uint8 views. Their length is the chunk's length; the hierarchy passes
    whole slots (4 KiB-aligned address, length a multiple of 4 KiB), others may pass anything.
    Threads: all verbs may be called from many threads at once, and may block.
    """

    name: str

    def contains(self, key: ChunkKey) -> bool:
        """Whether `read_into` is expected to find `key`."""
        ...

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """Fill `out` with the chunk, verified.

        Returns:
            False if absent; `out` is then untouched.

        Raises:
            CorruptChunk: Stored length differs from `len(out)`, or header or checksum is wrong.
                The tier has already dropped the chunk: the next `contains` says False and the
                next `write_from` writes it anew. `out` may hold anything.
            TierUnavailable: The medium failed.
        """
        ...

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """Store the chunk. Atomic: afterwards it reads back whole, or is absent.

        Storing a key that is present is a no-op unless the tier knows it to be bad.

        Raises:
            TierFull: The hard bound would be exceeded, or the medium is full.
            TierUnavailable: The medium failed.
        """
        ...

    def delete(self, key: ChunkKey) -> None:
        """Forget the chunk; absent is fine."""
        ...

    def close(self) -> None:
        """Give everything back; twice is fine. Verbs then raise `TierClosed`."""
        ...


Ends = list[tuple[int, "bool | Exception"]]
"""Of some chunks of a call: which by its index, and what a single verb would have returned; what it
would have raised is here returned, too."""


@runtime_checkable
class Batched(Protocol):
    """A tier that moves several chunks in one call for less than as many calls cost.

    Each chunk has an end of its own: what the single verb would have come to. Ends are given as
    they come, in any order, so that a chunk that hangs holds up no other; each chunk has one, also
    if all fails. The chunks of a call have different keys. Threads: as the single verbs; the call
    is over when the iterator is.
    """

    batch_bytes: int
    """How many bytes a call is worth at most; 0: one chunk a call, whatever its size."""

    def read_many(self, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> Iterator[Ends]:
        """As `Tier.read_into` for each."""
        ...

    def write_many(
        self, given: Sequence[tuple[ChunkKey, memoryview, int | None]]
    ) -> Iterator[Ends]:
        """As `Epochal.write_in_epoch` for each; None: whatever the epoch is."""
        ...

    def delete_many(self, keys: Sequence[ChunkKey]) -> Iterator[Ends]:
        """As `Tier.delete` for each."""
        ...


@runtime_checkable
class Indexed(Protocol):
    """A tier that knows what it holds without I/O."""

    def has(self, key: ChunkKey) -> bool:
        """As `contains`, from memory. Scheduler thread; never blocks; <= 1 us."""
        ...

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        """Every chunk this process may delete, with its length in bytes, coldest first.

        Asked once, at start, to fill the level's policy.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """A tier with a hard bound in bytes."""

    capacity_bytes: int

    def used_bytes(self) -> int:
        """Bytes charged against the bound now, by this process. Any thread; no I/O."""
        ...

    def free_chunks(self, num_bytes: int) -> int:
        """How many more chunks of `num_bytes` can be written before something must be deleted.

        Any thread; no I/O; a lower bound is fine.
        """
        ...


@runtime_checkable
class Epochal(Protocol):
    """A tier whose contents are void once the epoch has been raised. Epochs only rise."""

    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        """As `Tier.write_from`, provided that the epoch is still `epoch`.

        A chunk is never served in another epoch than it was written for, however late its write
        comes, and whoever raises the epoch while it is under way.

        Returns:
            False if the epoch is another one: nothing was stored.
        """
        ...

    def epoch(self) -> int:
        """The epoch now, also when another process raised it (within 100 ms). No I/O."""
        ...

    def raise_epoch(self) -> int:
        """Make everything stored so far void, durably, for every process sharing the tier.

        Returns:
            The epoch that this call made; another process may have raised it again since.
        """
        ...


@runtime_checkable
class Owing(Protocol):
    """An `Epochal` tier that still owes a reset when this process ends before the epoch is raised.

    Whoever opens it next raises the epoch first; others that share it, and see that a reset is owed
    for long, do so themselves.
    """

    def owe_reset(self) -> bool:
        """Note that the epoch has to be raised: from now on nothing stored before is served.

        Scheduler thread; before anything else is done about a reset; never waits for the medium.

        Returns:
            False if it was noted for this process only.
        """
        ...

    def owed_at(self) -> str:
        """What a person would have to remove if the epoch cannot be raised. No I/O."""
        ...


@runtime_checkable
class Following(Protocol):
    """A tier that other processes write to as well."""

    def refresh(self) -> None:
        """Learn what others did. May block; called every 100 ms or so on a thread of its own."""
        ...

    def take_adopted(self) -> Iterable[tuple[ChunkKey, int]]:
        """Chunks of others that became ours to evict since the last call, and their lengths.

        Scheduler thread; no I/O; cheap when there are none.
        """
        ...

    def take_lost(self) -> Iterable[tuple[ChunkKey, str]]:
        """Chunks of ours that went since the last call though nobody deleted them, and why.

        `vanished`: their files were removed or damaged; `given_up`: others had a right to the room.
        Scheduler thread; no I/O; cheap when there are none; a thousand or so a call.
        """
        ...


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The file that level 0 lies in, for a tier whose bytes another process of its own moves.

    Args:
        fd: Of the file; valid while the tier is being made.
        offset: Where in it `buffer` begins, in bytes.
        buffer: All of level 0, as it is mapped here.
    """

    fd: int
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much a tier may write.

    Args:
        left_bytes: Now, by this process.
        day_left_bytes: Of the day's budget, for all processes; those of this one included.
        budget_bytes: The day's budget.
        is_spent: There will not be more than `left_bytes` soon. If False, there will be.
    """

    left_bytes: int
    day_left_bytes: int
    budget_bytes: int
    is_spent: bool


@runtime_checkable
class Budgeted(Protocol):
    """A tier that knows what reaches its medium, and may have a budget of it.

    The hierarchy asks before it writes a chunk; the tier itself refuses nothing.
    """

    def written_bytes(self) -> int:
        """Bytes written to the medium so far, whatever for. Only rises. No I/O."""
        ...

    def write_cost_bytes(self, num_bytes: int) -> int:
        """What storing a chunk of `num_bytes` writes, at most; what keeps track of it included."""
        ...

    def allowance(self) -> Allowance | None:
        """What may be written now; None: as much as one likes. No I/O, <= 2 us."""
        ...


@runtime_checkable
class MovedElsewhere(Protocol):
    """A tier that may have its bytes moved by a process of its own, and by threads without one."""

    def mover_deaths(self) -> int:
        """How many such processes ended unasked so far. No I/O."""
        ...

    def is_moved_elsewhere(self) -> bool:
        """Whether a process moves the bytes now; else the threads that call do. No I/O."""
        ...


@runtime_checkable
class Described(Protocol):
    """A tier that can say how it reaches its medium."""

    def describe(self) -> str:
        """A few words for the log line at start. No I/O."""
        ...
