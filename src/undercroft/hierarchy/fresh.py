"""Chunks that a running request has just stored or loaded, and that must not be evicted for it.

A prompt is stored over several steps, root first. Told to the policy as they come, its deepest
chunks would look newest and its root would be evicted first, which makes the rest useless. So they
stay FRESH, which is not evictable, until the request ends or has stored nothing for some steps, and
are then inserted leaf first, a bounded number at once: a request may have tens of thousands. When
room is needed, ended requests' chunks are listed first, then those of other running ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey

__all__ = ["MAX_LISTED_AT_ONCE", "Fresh"]

MAX_LISTED_AT_ONCE = 256
"""Chunks that one call tells the policy of, some half a millisecond's worth; the rest waits for
the next step."""
_SHARE_PER_STEP = 4
"""A step lists at least this part of what waits, so that the backlog of a flood stays small."""
_IDLE_STEPS = 8


@dataclass(slots=True)
class _Entry:
    """What one request keeps, in prefix order."""

    step: int
    # Two plain lists rather than one of pairs, which the garbage collector would walk through.
    stored: list[ChunkKey] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Of `stored`."""
    kept: list[int] = field(default_factory=list)
    """Slots it loaded, each pinned once."""
    used: list[ChunkKey] = field(default_factory=list)
    """Keys it loaded."""

    def __len__(self) -> int:
        return len(self.stored) + len(self.kept) + len(self.used)


class Fresh:
    """The unlisted chunks, by request. Threads: the scheduler's.

    Args:
        tell: Tells the policy of a request that runs; None if it learns nothing from requests. If
            it does, what one that is idle has stored is left alone: it is told of once, at its end.

    Cost: each call O(`MAX_LISTED_AT_ONCE`) besides what it is given.
    """

    def __init__(self, pool: Pool, tell: Callable[[str], None] | None = None) -> None:
        self._pool = pool
        self._tell = tell
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[_Entry] = deque()
        self._num_ended = 0  # the sum of their lengths

    @property
    def is_listing(self) -> bool:
        """Whether ended requests have chunks that the policy does not know yet."""
        return bool(self._ended)

    def kept_slots(self) -> Iterable[int]:
        """Every slot pinned here, once for each pin."""
        for entry in (*self._entries.values(), *self._ended):
            yield from entry.kept

    def add(
        self, request: Request, keys: Sequence[ChunkKey], slots: Sequence[int], step: int
    ) -> None:
        """`keys`, in prefix order, are in their `slots` as of `step`."""
        entry = self._entry(request.id, step)
        entry.stored += keys
        entry.slots += slots
        self._pool.slots.make_fresh(slots)

    def keep(self, request: Request, slots: Sequence[int], step: int) -> None:
        """`request` has loaded `slots`: its own stores must not evict what they continue.

        The caller's pins on them become this one's.
        """
        entry = self._entry(request.id, step)
        entry.kept += slots
        entry.used = list(request.loaded)

    def _entry(self, request_id: str, step: int) -> _Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = _Entry(step)
        entry.step = step
        return entry

    def settle(self, request_id: str, used: Iterable[ChunkKey]) -> None:
        """Tell the policy of a request's chunks, deepest first; the root ends up newest.

        Args:
            request_id: Whose.
            used: What it loaded, in prefix order: the part nearest the root.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            entry = _Entry(0)
        entry.used = list(used)
        self._end(entry)
        self.advance()

    def _end(self, entry: _Entry) -> None:
        if entry:
            self._ended.append(entry)
            self._num_ended += len(entry)

    def advance_step(self) -> None:
        """Once a step: list more, the more the more waits."""
        self.advance(max(MAX_LISTED_AT_ONCE, self._num_ended // _SHARE_PER_STEP))

    def advance(self, num_chunks: int = MAX_LISTED_AT_ONCE) -> None:
        """List up to `num_chunks` of ended requests."""
        while self._ended and num_chunks > 0:
            entry = self._ended[0]
            num_listed = self._list(entry, num_chunks)
            num_chunks -= num_listed
            self._num_ended -= num_listed
            if not entry:
                self._ended.popleft()

    def _list(self, entry: _Entry, num_chunks: int) -> int:
        """The next part of `entry`; returns how many that were."""
        pool = self._pool
        if entry.stored:
            stored, of_stored = entry.stored[-num_chunks:], entry.slots[-num_chunks:]
            del entry.stored[-num_chunks:], entry.slots[-num_chunks:]
            pool.list_fresh(stored[::-1], of_stored[::-1])
            return len(stored)
        if entry.kept:
            slots = entry.kept[-num_chunks:]
            del entry.kept[-num_chunks:]
            pool.unpin_all(slots)
            return len(slots)
        keys = entry.used[-num_chunks:]
        del entry.used[-num_chunks:]
        pool.touch(keys)
        return len(keys)

    def discard(self, slots: Collection[int]) -> None:
        """The chunks in `slots` are gone: list them no more. O(unlisted chunks); rare."""
        for entry in (*self._entries.values(), *self._ended):
            left = [i for i, slot in enumerate(entry.slots) if slot not in slots]
            if len(left) < len(entry.slots):
                entry.stored = [entry.stored[i] for i in left]
                entry.slots = [entry.slots[i] for i in left]
        self._num_ended = sum(map(len, self._ended))
        self._ended = deque(entry for entry in self._ended if entry)

    def make_room(self, request_id: str, num_chunks: int = MAX_LISTED_AT_ONCE) -> bool:
        """Make some `num_chunks` of other requests evictable; False: there is none left.

        Every true answer is progress: ask again while the room does not suffice.
        """
        if not self._ended and not any(other != request_id for other in self._entries):
            return False
        for other in list(self._entries):
            if self._num_ended >= num_chunks:
                break
            if other != request_id:
                if self._tell is not None:
                    self._tell(other)
                self._end(self._entries.pop(other))
        self.advance(num_chunks)
        return True

    def settle_idle(self, step: int) -> None:
        """Settle requests that have stored nothing for a while."""
        idle = [r for r, entry in self._entries.items() if step - entry.step >= _IDLE_STEPS]
        for request_id in idle:
            if self._tell is None:
                self._end(self._entries.pop(request_id))
            elif kept := self._entries[request_id].kept:
                self._entries[request_id].kept = []
                self._end(_Entry(step, kept=kept))

    def forget_all(self) -> None:
        """At a reset: the keys were voided."""
        for slot in list(self.kept_slots()):
            self._pool.unpin(slot)
        self._entries.clear()
        self._ended.clear()
        self._num_ended = 0
