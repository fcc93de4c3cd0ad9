"""A tier round another tier that keeps the abilities of the one inside."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cache
from typing import Any, Self

from undercroft.keys import ChunkKey
from undercroft.tiers.base import (
    Allowance,
    Batched,
    Bounded,
    Budgeted,
    Epochal,
    Following,
    Indexed,
    MovedElsewhere,
    Owing,
    Tier,
)

__all__ = ["WrappingTier"]


class WrappingTier:
    """Base of wrappers: holds the inner tier and passes its abilities on; the verbs are yours.

    A tier can be written to in two ways, with and without an epoch: let `write_from` call a method
    `write(key, data, epoch)`, as `Epochal.write_in_epoch` does, and that end in `pass_on`.

    The wrapper is `Indexed`, `Bounded`, `Epochal`, `Owing`, `Following`, `Budgeted` or
    `MovedElsewhere` exactly if the inner tier is. It is `Batched` if the inner tier is and the
    wrapper has `read_many`, `write_many` and `delete_many`: a batch that went straight to the inner
    tier would go past what the wrapper's verbs do. Else the inner tier gets one chunk a call.

    Args:
        inner: The tier inside; closed with this one.
    """

    overhead_bytes: int = 0
    """What the wrapper adds to each chunk; lengths and room are converted with it."""

    suspects: Container[ChunkKey] = ()
    """Keys that the inner tier may hold, but this one does not."""

    def __new__(cls, inner: Tier, *_args: object, **_more: object) -> Self:
        """An instance of `cls` with the abilities of `inner`."""
        made: Self = object.__new__(_with_abilities(cls, _abilities(cls, inner)))  # type: ignore[arg-type] # hashable
        return made

    def __init__(self, inner: Tier) -> None:
        self.inner: Any = inner  # the abilities below are there only if `inner` has them
        self.name = inner.name

    def pass_on(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        """Write to the inner tier, for `epoch` if one is given; False: it is another by now."""
        if epoch is not None:
            return bool(self.inner.write_in_epoch(key, data, epoch))
        self.inner.write_from(key, data)
        return True


class _IndexedAbility(WrappingTier):
    def has(self, key: ChunkKey) -> bool:
        return key not in self.suspects and bool(self.inner.has(key))

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        extra = self.overhead_bytes
        return ((key, num_bytes - extra) for key, num_bytes in self.inner.evictable())


class _BoundedAbility(WrappingTier):
    @property
    def capacity_bytes(self) -> int:
        return int(self.inner.capacity_bytes)

    def used_bytes(self) -> int:
        return int(self.inner.used_bytes())

    def free_chunks(self, num_bytes: int) -> int:
        return int(self.inner.free_chunks(num_bytes + self.overhead_bytes))


class _EpochalAbility(WrappingTier):
    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        verbs: Any = self
        return bool(verbs.write(key, data, epoch))

    def epoch(self) -> int:
        return int(self.inner.epoch())

    def raise_epoch(self) -> int:
        return int(self.inner.raise_epoch())


class _OwingAbility(WrappingTier):
    def owe_reset(self) -> bool:
        return bool(self.inner.owe_reset())

    def owed_at(self) -> str:
        return str(self.inner.owed_at())


class _FollowingAbility(WrappingTier):
    def refresh(self) -> None:
        self.inner.refresh()

    def take_adopted(self) -> Iterable[tuple[ChunkKey, int]]:
        extra = self.overhead_bytes
        return ((key, num_bytes - extra) for key, num_bytes in self.inner.take_adopted())

    def take_lost(self) -> Iterable[tuple[ChunkKey, str]]:
        lost: Iterable[tuple[ChunkKey, str]] = self.inner.take_lost()
        return lost


class _BudgetedAbility(WrappingTier):
    def written_bytes(self) -> int:
        return int(self.inner.written_bytes())

    def write_cost_bytes(self, num_bytes: int) -> int:
        return int(self.inner.write_cost_bytes(num_bytes + self.overhead_bytes))

    def allowance(self) -> Allowance | None:
        found: Allowance | None = self.inner.allowance()
        return found


class _BatchedAbility(WrappingTier):
    @property
    def batch_bytes(self) -> int:
        return int(self.inner.batch_bytes)


class _MovedElsewhereAbility(WrappingTier):
    def mover_deaths(self) -> int:
        return int(self.inner.mover_deaths())

    def is_moved_elsewhere(self) -> bool:
        return bool(self.inner.is_moved_elsewhere())


def _abilities(cls: type, inner: Tier) -> tuple[type[WrappingTier], ...]:
    pairs: tuple[tuple[type, type[WrappingTier]], ...] = (
        (Indexed, _IndexedAbility),
        (Bounded, _BoundedAbility),
        (Epochal, _EpochalAbility),
        (Owing, _OwingAbility),
        (Following, _FollowingAbility),
        (Budgeted, _BudgetedAbility),
        (MovedElsewhere, _MovedElsewhereAbility),
    )
    if all(hasattr(cls, verb) for verb in ("read_many", "write_many", "delete_many")):
        pairs += ((Batched, _BatchedAbility),)
    return tuple(passes_on for ability, passes_on in pairs if isinstance(inner, ability))


@cache
def _with_abilities(cls: type, abilities: tuple[type, ...]) -> type:
    return type(cls.__name__, (cls, *abilities), {"__module__": cls.__module__})
