"""Copy finished stores down to the lower levels, in prefix order, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from undercroft.errors import TierFull
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.outcome import Done
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import SlotState
from undercroft.keys import ChunkKey

__all__ = ["Cascade"]

_MAX_OFFERS_PER_STEP = 256


class Cascade:
    """Writes under way to lower levels. A slot is pinned while a tier reads from it.

    Each level has a queue of its own, so a slow one holds up no other. Offers wait there, unpinned,
    in the order they came, which is prefix order, until the level's movers have room; a chunk
    that is evicted before its turn is not written. Threads: the scheduler's. Cost: O(1) per chunk;
    at most a fixed number of offers a step.

    Args:
        max_waiting: When there are more offers to one level, the oldest are declined and counted.
    """

    def __init__(
        self,
        pool: Pool,
        levels: Sequence[Level],
        *,
        view_of: Callable[[int], memoryview],
        max_waiting: int,
    ) -> None:
        self._pool = pool
        self._levels = levels
        self._view_of = view_of
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[tuple[ChunkKey, int, bool]]] = {
            level.name: deque() for level in levels
        }
        self._by_ticket: dict[tuple[str, int], tuple[int, int]] = {}
        self._late: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._by_ticket)

    @property
    def num_pinned(self) -> int:
        """Slots that a tier reads from now."""
        return len(self._by_ticket)

    def num_waiting(self, level: str) -> int:
        """Offers to that level whose turn has not come."""
        return len(self._waiting[level])

    @property
    def can_go_on(self) -> bool:
        """Whether `submit` would get anything out of the way now."""
        return any(map(self.can_go_on_to, self._levels))

    def can_go_on_to(self, level: Level) -> bool:
        """The same of one level."""
        waiting = self._waiting[level.name]
        return bool(waiting) and not self._is_held_up(level, waiting[0][0])

    def _is_held_up(self, level: Level, key: ChunkKey) -> bool:
        slot = self._pool.find(key)
        return slot >= 0 and level.is_busy(self._pool.slots.size(slot)) and not level.has(key)

    def add(self, keys: Sequence[ChunkKey], *, begins: bool = True) -> None:
        """Offer READY `keys`, in prefix order, to every lower level.

        Args:
            keys: Of one request.
            begins: They are the first that it offers.
        """
        most = self._max_waiting
        for level in self._levels:
            waiting = self._waiting[level.name]
            waiting.extend((key, 0, begins and key is keys[0]) for key in keys[:most])
            refused = list(keys[most:])
            # The oldest are those that host memory is least likely to have any more.
            while len(waiting) > most:
                refused.append(waiting.popleft()[0])
            if refused:
                level.decline_waiting("queue_full", refused)

    def submit(self) -> None:
        """Hand waiting offers to the movers, as many as they take and a step may cost."""
        for level in self._levels:
            level.begin_step()
            waiting = self._waiting[level.name]
            for _ in range(min(len(waiting), _MAX_OFFERS_PER_STEP)):
                key, attempt, begins = waiting[0]
                if self._is_held_up(level, key):
                    break
                waiting.popleft()
                if begins:
                    level.begin_offers()
                self._offer(level, key, attempt)

    def _offer(self, level: Level, key: ChunkKey, attempt: int) -> None:
        slot, slots = self._pool.find(key), self._pool.slots
        if slot < 0:
            level.decline_waiting("evicted_before_its_turn", (key,))
            return
        if slots.states[slot] < SlotState.READY:
            return  # voided and stored anew: its store offers it again
        ticket = level.offer(key, self._view_of(slot), again=attempt > 0)
        if ticket is not None:
            slots.pin(slot)
            self._by_ticket[level.name, ticket] = (slot, attempt)

    def settle(self, level: Level, done: Done) -> bool:
        """Book the end of one write; whether it is to be tried once more."""
        entry = self._by_ticket.pop((level.name, done.ticket), None)
        if entry is None:
            return False
        slot, attempt = entry
        again = isinstance(done.outcome.error, TierFull) and attempt == 0
        if again:
            # Something was deleted since, or will be: the level makes room when it books this.
            self._waiting[level.name].append((done.outcome.key, 1, False))
        if done.buffer_free:
            self._pool.unpin(slot)
        else:
            self._late[level.name, done.ticket] = slot
        return again

    def released(self, level: Level, ticket: int) -> None:
        """A write that had run out of time came back."""
        slot = self._late.pop((level.name, ticket), None)
        if slot is not None:
            self._pool.unpin(slot)

    def clear_waiting(self) -> None:
        """Forget what has not been handed to the movers."""
        for waiting in self._waiting.values():
            waiting.clear()
