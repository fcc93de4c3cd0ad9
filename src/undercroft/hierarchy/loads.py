"""Chunks on their way from level 0 into the engine: pinned until it has them.

What did not arrive although a lookup had said HIT is dropped from level 0, since nobody knows
whether the slot or the way to the engine is at fault: the next lookup finds it in a lower level, or
misses. Lower levels keep theirs: what they read is verified.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from undercroft.errors import Bug
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.fresh import Fresh
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.slots import SlotState
from undercroft.hierarchy.stores import LEVEL_0
from undercroft.key_table import SHARD_SHIFT
from undercroft.keys import ChunkKey

__all__ = ["Loads"]

_READY = int(SlotState.READY)


class Loads:
    """The loads under way. Threads: the scheduler's."""

    def __init__(
        self, pool: Pool, fresh: Fresh, *, counters: Counters, events: LevelEvents
    ) -> None:
        self._pool = pool
        self._fresh = fresh
        self._counters = counters
        self._events = events
        self._num_chunks = 0
        self.requests: dict[str, Request] = {}
        """Those with chunks under way."""

    def __len__(self) -> int:
        """Chunks under way."""
        return self._num_chunks

    def prepare(self, keys: Sequence[ChunkKey], request: Request) -> list[int]:
        """Pin the slots of `keys`; see `Hierarchy.prepare_load`."""
        shards, states = self._pool.table.shards, self._pool.slots.states
        slots: list[int] = []
        for key in keys:
            slot = shards[hash(key) >> SHARD_SHIFT].get(key, -1)
            if slot < 0 or states[slot] < _READY:
                raise Bug(f"request {request.id}: asked to load {key.hex()}, which was not a hit")
            slots.append(slot)
        self._pool.slots.pin_all(slots)
        request.loading.update(zip(keys, slots, strict=True))
        request.loaded = dict.fromkeys(request.in_order(keys))
        if request.loading:
            self.requests[request.id] = request
        self._num_chunks += len(slots)
        return slots

    def complete(self, keys: Iterable[ChunkKey], request: Request, step: int) -> bool:
        """The engine has those of `keys` that did not fail; whether nothing is left to load."""
        loaded: list[int] = []
        take = request.loading.pop
        for key in keys:
            slot = take(key, None)
            if slot is not None:
                loaded.append(slot)
        self._num_chunks -= len(loaded)
        self._counters.loaded_bytes += self._pool.slots.bytes_of(loaded)
        self._counters.loaded_chunks += len(loaded)
        if not request.finished:
            self._fresh.keep(request, loaded, step)
        else:
            self._pool.unpin_all(loaded)
        if request.loading:
            return False
        self.requests.pop(request.id, None)
        return True

    def fail(self, request_id: str, offsets: Container[int]) -> None:
        """Drop the chunks of a request's load whose slots begin at `offsets`.

        Those that leave level 0 by this, and not in a reset meanwhile, are counted.
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        pool = self._pool
        failed = [(k, s) for k, s in request.loading.items() if pool.slots.offset(s) in offsets]
        self._fresh.discard({slot for _key, slot in failed})
        for key, slot in failed:
            del request.loading[key]
            request.loaded.pop(key, None)
            if pool.find(key) == slot:
                pool.void(key, slot)
                self._counters.dropped_chunks[LEVEL_0, "load_failed"] += 1
                self._counters.note(LEVEL_0, "dropped", "load_failed", key)
                self._events.add(LEVEL_0, key, removed=True)
            pool.unpin(slot)
        self._num_chunks -= len(failed)

    def forget_all(self) -> list[int]:
        """At a reset: nobody will say that they ended. Their slots, still pinned."""
        held: list[int] = []
        for request in self.requests.values():
            held.extend(request.loading.values())
            request.loading.clear()
        self.requests.clear()
        self._num_chunks = 0
        return held
