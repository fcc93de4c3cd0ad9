"""The admission seam: who may come into a level. Keys only."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from undercroft.keys import ChunkKey

__all__ = ["Admission", "Budgeting", "Observing", "Purse"]


class Admission(Protocol):
    """Decides whether a chunk is worth a write to a level. Threads: one. O(1).

    Made once for each level, with the user's options and with what its constructor names of
    `clock`, `num_replicas` (processes that share the level) and `level_budget_bytes` (a day's, if
    the level keeps a budget itself).
    """

    name: str

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:
        """Whether to write `key` now. Called once per offer, and at most once per request."""
        ...


@runtime_checkable
class Observing(Protocol):
    """An admission that wants to know of requests, and of chunks that are in, too."""

    def on_begin(self) -> None:
        """What is offered from now on is of another request, from its root on.

        Offers of requests that run side by side may be mixed.
        """
        ...

    def on_use(self, key: ChunkKey) -> None:
        """A request used `key`, which is in the level. It is not offered for that request."""
        ...


class Purse(Protocol):
    """What a level may write."""

    @property
    def is_kept(self) -> bool:
        """Whether the level can keep a day's budget itself, over restarts."""
        ...

    def cost_bytes(self, num_bytes: int) -> int:
        """What a chunk of `num_bytes` costs."""
        ...

    def day_bytes(self) -> tuple[int, int] | None:
        """What is left of the day's budget now, and the budget; None: there is none."""
        ...


@runtime_checkable
class Budgeting(Protocol):
    """An admission that looks into the level's purse."""

    def open(self, purse: Purse) -> None:
        """Once, before the first chunk is offered.

        Raises:
            ConfigError: It cannot work with this level.
        """
        ...
