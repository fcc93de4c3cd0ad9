"""Copy finished stores down to the lower levels, in prefix order, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from undercroft.errors import TierFull
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.outcome import Done
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["Cascade"]

_MAX_OFFERS_PER_STEP = 256


class Cascade:
    """Writes under way to lower levels. A slot is pinned while a tier reads from it.

    Offers wait in one bounded queue in the order they came, which is prefix order; a chunk evicted
    before its turn is not written. Threads: the scheduler's. Cost: O(1) per chunk; at most a fixed
    number of offers a step.

    Args:
        max_waiting: Offers beyond this are declined and counted.
    """

    def __init__(
        self,
        pool: Pool,
        levels: Sequence[Level],
        *,
        view_of: Callable[[int], memoryview],
        counters: Counters,
        max_waiting: int,
    ) -> None:
        self._pool = pool
        self._levels = levels
        self._view_of = view_of
        self._counters = counters
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[ChunkKey, int]] = deque()
        self._by_ticket: dict[tuple[str, int], tuple[int, int]] = {}
        self._late: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._by_ticket)

    @property
    def num_pinned(self) -> int:
        """Slots that a tier reads from now."""
        return len(self._by_ticket)

    def add(self, keys: Sequence[ChunkKey]) -> None:
        """Offer READY `keys`, in prefix order, to every lower level."""
        if not self._levels:
            return
        room = self._max_waiting - len(self._waiting)
        if len(keys) > room:
            self._counters.declined_chunks["cascade:queue_full"] += len(keys) - max(0, room)
        self._waiting.extend((key, 0) for key in keys[: max(0, room)])

    def submit(self) -> None:
        """Hand waiting offers to the movers, as many as a step may cost."""
        pool = self._pool
        for _ in range(min(len(self._waiting), _MAX_OFFERS_PER_STEP)):
            key, attempt = self._waiting.popleft()
            slot = pool.find(key)
            if slot < 0 or pool.slots.states[slot] < SlotState.READY:
                continue
            for level in self._levels:
                ticket = level.offer(key, self._view_of(slot))
                if ticket is not None:
                    pool.slots.pin(slot)
                    self._by_ticket[level.name, ticket] = (slot, attempt)

    def settle(self, level: Level, done: Done) -> None:
        """Book the end of one write."""
        entry = self._by_ticket.pop((level.name, done.ticket), None)
        if entry is None:
            return
        slot, attempt = entry
        if isinstance(done.outcome.error, TierFull) and attempt == 0:
            # Something was deleted since, or will be: the level makes room when it books this.
            self._waiting.append((done.outcome.key, 1))
        if done.buffer_free:
            self._pool.unpin(slot)
        else:
            self._late[level.name, done.ticket] = slot

    def released(self, level: Level, ticket: int) -> None:
        """A write that had run out of time came back."""
        slot = self._late.pop((level.name, ticket), None)
        if slot is not None:
            self._pool.unpin(slot)

    def clear_waiting(self) -> None:
        """Forget what has not been handed to the movers."""
        self._waiting.clear()
