"""What a worker gives to whatever moves bytes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Job"]

_Step = TypeVar("_Step")


@dataclass(eq=False, slots=True)
class Job(Generic[_Step]):
    """One transfer. After `submit` its state belongs to the mover until it is finished.

    Args:
        job_id: The engine's name for it.
        is_store: Engine to slots; otherwise slots to engine.
        blocks: The engine blocks that it reads or writes.
        slots: The slots that it writes or reads.
        steps: The work bit by bit. Each step does some and gives the number of bytes; for a
            `DeviceMover`, each gives something to be done.
        on_failure: Told what went wrong, before the job is finished; must not raise.
    """

    job_id: int
    is_store: bool
    blocks: frozenset[int]
    slots: frozenset[int]
    steps: Callable[[], Iterator[_Step]]
    on_failure: Callable[[Exception], None]
    is_urgent: bool = False
    num_bytes: int = 0
    seconds: float = 0.0
    error: Exception | None = None

    @property
    def rank(self) -> tuple[bool, bool]:
        """Lower goes first."""
        return (not self.is_urgent, self.is_store)

    def touches(self, other: Job[_Step]) -> bool:
        """Whether both use a block or a slot in common."""
        return not (self.blocks.isdisjoint(other.blocks) and self.slots.isdisjoint(other.slots))
