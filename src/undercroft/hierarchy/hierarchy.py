"""The hierarchy: which chunk is where. The one entrance for engine adapters.

One thread (the engine's scheduler), and no call blocks but `reset` and `close`, which are bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from undercroft.clock import Clock
from undercroft.hierarchy.ahead import Ahead
from undercroft.hierarchy.cascade import Cascade
from undercroft.hierarchy.closing import close_level, flush
from undercroft.hierarchy.counters import NO_LEVEL, Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.fresh import Fresh
from undercroft.hierarchy.holds import Holds
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.loads import Loads
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Answer, Lookup, Request
from undercroft.hierarchy.restore import Restores
from undercroft.hierarchy.slots import SlotState
from undercroft.hierarchy.stores import LEVEL_0, StorePlan, Stores, failed_chunk
from undercroft.hierarchy.telling import Telling
from undercroft.hierarchy.touches import Touches
from undercroft.hierarchy.voiding import wait_for_tries
from undercroft.key_table import SHARD_SHIFT
from undercroft.keys import ChunkKey
from undercroft.log import SparingLog

__all__ = ["LEVEL_0", "Hierarchy", "Limits", "StorePlan", "failed_chunk"]

_LOG = logging.getLogger(__name__)

# A global's name costs half of an enum member's on the path taken per key.
_READY = int(SlotState.READY)
_HIT, _MISS = Lookup.HIT, Lookup.MISS
_ABSENT, _MISSED = (NO_LEVEL, "absent"), int(Answer.MISS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines and shares; all settings.

    Args:
        promote_deadline_s: How long a request may wait for lower levels, at least.
        drain_deadline_s: How long `reset` may block.
        shutdown_deadline_s: How long `close` may block.
        restore_share_ratio: The part of level 0 that restores may hold at once.
        max_cascade_waiting: Chunks that may wait for their turn to be copied down.
        load_margin: See `undercroft.hierarchy.worth.Worth`.
    """

    promote_deadline_s: float = 2.0
    drain_deadline_s: float = 1.0
    shutdown_deadline_s: float = 3.0
    restore_share_ratio: float = 1.0
    max_cascade_waiting: int = 65536
    load_margin: float | None = 1.5


class Hierarchy:
    """Level 0 and the levels below it.

    Args:
        make_pool: Makes level 0, given whom to tell of evictions.
        levels: Lower levels, nearest first.
        buffer: The bytes of level 0.
        take_failed_stores: Store ids, or `failed_chunk`s, that the workers could not copy, since
            the last call; None means reports were lost, and every open store counts as failed.
    """

    def __init__(  # noqa: PLR0913 - the one place where everything is wired
        self,
        make_pool: Callable[[Callable[[Sequence[ChunkKey]], None]], Pool],
        levels: Sequence[Level],
        *,
        buffer: memoryview,
        clock: Clock,
        counters: Counters,
        events: LevelEvents,
        limits: Limits,
        take_failed_stores: Callable[[], frozenset[int] | None] = frozenset,
    ) -> None:
        self.counters = counters
        self.events = events
        self.pool = make_pool(self._on_evict)
        self.levels = tuple(levels)
        # What every lookup needs, one attribute away.
        self._shards = self.pool.table.shards
        self._states = self.pool.slots.states
        self._buffer = buffer
        self._clock = clock
        self.on_close: list[Callable[[float], None]] = []
        """Called once, last thing when this closes, with the time by which to be back."""
        self._log = SparingLog(_LOG, clock)
        self._limits = limits
        self._step = 0
        self._polled_step = -1
        self._noticed_step = -1
        self._is_outdated = False
        self._asking: dict[str, Request] = {}
        self._draining_until: list[tuple[int, list[int]]] = []
        self._num_ended_steps = 0
        self.holds = Holds(self.pool)
        self.telling = Telling([self.pool, *self.levels], clock)
        self.fresh = Fresh(self.pool, self.telling.tell if self.telling.is_needed else None)
        self.loads = Loads(self.pool, self.fresh, counters=counters, events=events)
        self.stores = Stores(
            self.pool, self.fresh, counters=counters, take_failed=take_failed_stores
        )
        self.restores = Restores(
            self.pool,
            self.levels,
            share_ratio=limits.restore_share_ratio,
            deadline_s=limits.promote_deadline_s,
            view_of=self.view,
            hold=self.holds.add,
            let_go=self.holds.drop,
            make_room=self.fresh.make_room,
            num_busy_slots=self._num_busy_slots,
            on_arrival=lambda key: self.events.add(LEVEL_0, key, removed=False),
            counters=counters,
            load_margin=limits.load_margin,
        )
        self.ahead = Ahead(self.pool, self.restores)
        self.cascade = Cascade(
            self.pool,
            self.levels,
            view_of=self.view,
            max_waiting=limits.max_cascade_waiting,
        )
        self.touches = Touches(self.levels, self.restores, self.cascade)
        for level in self.levels:
            level.ask(self.telling)
        self._keeps_chains = bool(self.levels) or self.telling.is_needed

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, `(slot_bytes,)` uint8, writable."""
        start = self.pool.slots.offset(slot)
        return self._buffer[start : start + self.pool.slots.size(slot)]

    def _num_busy_slots(self) -> int:
        return len(self.loads) + len(self.stores) + self.cascade.num_pinned

    def _on_evict(self, keys: Sequence[ChunkKey]) -> None:
        self.counters.evicted_chunks[LEVEL_0] += len(keys)
        self.events.add_all(LEVEL_0, keys, removed=True)

    # --- lookups ------------------------------------------------------------------------------

    def lookup(self, key: ChunkKey, request: Request) -> Lookup:
        """Where the chunk of `key` is, for `request`.

        After `begin_lookups`, and until `end_step`, a caller may do by itself what is done here: a
        key whose slot in `pool.table` has a state from READY on is a HIT once it is appended to
        `request.asked`; for any other there is `lookup_elsewhere`.
        """
        if request.step != self._step:
            self.begin_lookups(request)
        slot = self._shards[hash(key) >> SHARD_SHIFT].get(key, -1)
        if slot >= 0 and self._states[slot] >= _READY:
            request.asked.append(key)
            return _HIT
        return self.lookup_elsewhere(key, request, slot)

    def begin_lookups(self, request: Request) -> None:
        """Before the first lookup for `request` in this step. Twice is fine."""
        step = self._step
        if request.step != step:
            if self._noticed_step != step:
                self._notice_resets()
            request.begin_step(step)
            self._asking[request.id] = request

    def lookup_elsewhere(self, key: ChunkKey, request: Request, slot: int) -> Lookup:
        """`lookup` of a key that is not readable; its `slot` in the table, or -1."""
        if slot < 0:
            if not self.levels:
                self.counters.lookup_misses[_ABSENT] += 1
                request.note(key, _MISSED)
                return _MISS
            return self._lookup_below(key, request)
        if self._polled_step != self._step:
            # What was read between two steps answers in the very next lookup.
            self._polled_step = self._step
            self.poll()
            return self.lookup(key, request)
        return self._lookup_filling(key, request)

    def _miss(self, key: ChunkKey, request: Request, level: str, reason: str) -> Lookup:
        self.counters.lookup_misses[level, reason] += 1
        if reason != "absent":
            self.counters.note(level, "missed", reason, key)
        request.note(key, Answer.MISS)
        return Lookup.MISS

    def _lookup_filling(self, key: ChunkKey, request: Request) -> Lookup:
        is_over = request.denies(key)
        if not is_over and request.deadline_s is not None:
            now_s = self._clock.now_s()
            may_be = now_s >= request.deadline_s - request.reserve_s
            is_over = may_be and self.restores.gives_up(key, request, now_s)
        if is_over:
            return self._miss(key, request, *self.restores.why_not_here(key, request))
        self.restores.join(key, request)
        return self._pending(key, request, Answer.COMING)

    def _lookup_below(self, key: ChunkKey, request: Request) -> Lookup:
        if key in request.failed_reads:
            return self._miss(key, request, *request.failed_reads[key])
        level = self.restores.level_with(key)
        if level is None:
            return self._miss(key, request, *self.restores.why_absent(key))
        if request.denies(key):
            return self._miss(key, request, level.name, request.why_denied)
        if key in request.promoted:
            return self._miss(key, request, level.name, "evicted_again")
        if request.deadline_s is not None and self.restores.waits.is_over(
            request, self._clock.now_s()
        ):
            return self._miss(key, request, level.name, "deadline")
        return self._pending(key, request, Answer.BELOW)

    def _pending(self, key: ChunkKey, request: Request, answer: Answer) -> Lookup:
        self.restores.want(request, self._clock.now_s())
        request.note(key, answer)
        self.counters.lookup_pending += 1
        return Lookup.PENDING

    def source_of(self, key: ChunkKey, request: Request) -> str:
        """The level that `request`'s hit on `key` came from."""
        return request.promoted.get(key, LEVEL_0)

    def _book_lookups(self) -> None:
        """At the end of a step: count its hits, and forget who asked."""
        for request in self._asking.values():
            self.counters.lookup_hits += request.num_hits
        self._asking = {}

    # --- loads --------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[ChunkKey], request: Request) -> list[int]:
        """Pin `keys`, all answered HIT in this step, until `complete_load`; returns their slots.

        Raises:
            Bug: A key is not readable. Loading anything else in its place would be wrong bytes.
        """
        slots = self.loads.prepare(keys, request)
        if self._keeps_chains:
            request.chain.extend(keys)
        self.restores.leave(request)
        request.deadline_s = None
        self.holds.drop_all(request)
        return slots

    def complete_load(self, keys: Iterable[ChunkKey], request: Request) -> None:
        """The engine has the bytes of `keys`."""
        if self.loads.complete(keys, request, self._step):
            self._touch_if_over(request)

    # --- stores -------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[ChunkKey], request: Request) -> StorePlan:
        """Slots for those of `keys` that are not here yet, as far as the room goes.

        `keys` are offered in the engine's order; room is given in prefix order over all groups, so
        that what is accepted can be used. What is left out counts as done for this request.
        """
        self.holds.add_hits(self._asking.values())
        if self._keeps_chains:
            request.chain.extend(keys)
        return self.stores.prepare(keys, request)

    def complete_store(
        self, keys: Collection[ChunkKey], request: Request, *, success: bool = True
    ) -> None:
        """The workers copied `keys` into their slots, or reported that they could not."""
        key_set = keys if isinstance(keys, (set, frozenset)) else set(keys)
        ready, slots = self.stores.complete(key_set, request, success=success)
        self.fresh.add(request, ready, slots, self._step)
        self.telling.stored(request, ready)
        self.events.add_all(LEVEL_0, ready, removed=False)
        if self.levels:
            self.cascade.add(ready, begins=not request.offered_below)
            if any(level.is_choosy for level in self.levels):
                request.offered_below.update(ready)
        self._touch_if_over(request)

    # --- requests and steps -------------------------------------------------------------------

    def finish_request(self, request: Request) -> None:
        """No more lookups, loads or stores will be prepared for `request`."""
        request.finished = True
        self.restores.leave(request)
        self.holds.drop_all(request)
        self._touch_if_over(request)

    def _touch_if_over(self, request: Request) -> None:
        """Touch the chain of a request leaf first, once nothing of it is under way."""
        if not request.finished or request.loading or request.num_storing > 0:
            return
        chain = list(request.in_order(dict.fromkeys(request.chain))) if request.chain else []
        request.chain.clear()
        self.telling.ended(request, chain)
        self.fresh.settle(request.id, request.loaded)
        if self.levels and chain:
            self.touches.add(chain, request.offered_below)

    def end_step(self, scheduled: Collection[str] = ()) -> bool:
        """Once per engine step, after its lookups and loads, before its stores.

        Args:
            scheduled: Ids of requests that began to run in this step: they want nothing any more.

        Returns:
            Whether another engine was found to have reset the cache: everything is forgotten, and
            what requests have computed or loaded so far must not be stored, as after `reset`.
        """
        self.poll()
        now_s = self._clock.now_s()
        for request_id in scheduled:
            holder = self.holds.requests.get(request_id) or self._asking.get(request_id)
            if holder is not None:
                self.holds.drop_all(holder)
            waiting = self.restores.find(request_id)
            if waiting is not None:
                self.restores.leave(waiting)
                waiting.deadline_s = None
        if self.restores.num_waiting:
            self.holds.add_hits(self._asking.values())
        self._book_lookups()
        self.fresh.settle_idle(self._step)
        self.fresh.advance_step()
        self.restores.refresh()
        self.ahead.admit(self._step, now_s)
        self.touches.submit()
        self.cascade.submit()
        self.events.tell_found()
        for request in list(self.holds.requests.values()):
            kept = request.queued and request.deadline_s is not None and now_s < request.deadline_s
            if not kept:
                self.holds.drop_all(request)
        self._notice_resets()
        self._step += 1
        is_outdated, self._is_outdated = self._is_outdated, False
        return is_outdated

    def _notice_resets(self) -> None:
        """Before the first lookup of a step (an idle engine made none for long), and at its end."""
        self._noticed_step = self._step
        if any(level.epoch_moved() for level in self.levels):
            self._log.warning("another engine dropped the shared cache; this one forgets it too")
            self._forget_all()
            self._is_outdated = True

    def poll(self) -> None:
        """Book what the movers have finished. O(finished)."""
        for level in self.levels:
            for done in level.transfers.poll():
                again = False
                if done.op is Op.READ:
                    self.restores.settle(level, done)
                elif done.op is Op.WRITE:
                    again = self.cascade.settle(level, done)
                level.settle(done, again=again)
            for ticket in level.transfers.take_released():
                self.restores.released(level, ticket)
                self.cascade.released(level, ticket)
                level.released(ticket)

    def step_ended(self) -> None:
        """The workers have finished a step that was scheduled; called once per step's output."""
        self._num_ended_steps += 1
        self.holds.add_hits(self._asking.values())
        self.pool.evict_ahead()
        while self._draining_until and self._draining_until[0][0] <= self._num_ended_steps:
            for slot in self._draining_until.pop(0)[1]:
                self.pool.unpin(slot)

    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping although it has no request.

        Not for what hangs in a tier, and what waits behind it: an idle engine costs nothing.
        Whenever that ends, the next step books it.
        """
        return bool(
            self._draining_until
            or self.touches
            or self.fresh.is_listing
            or self.events.has_more
            or self.cascade.can_go_on
            or any(level.transfers.has_news for level in self.levels)
        )

    # --- reset and close ----------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget everything, on every level, for every process that shares one.

        Blocks at most the drain deadline. Slots with transfers in flight drain first.

        Returns:
            False if a lower level has not taken the reset in time: a line says so, and the level
            stays unused until it has.
        """
        self.counters.resets += 1
        for level in self.levels:
            level.owe_reset()
        self._forget_all()
        self.events.hurry()
        self._quarantine_worker_slots()
        voiders = [level.voider for level in self.levels]
        in_time = wait_for_tries(voiders, self._limits.drain_deadline_s, self._clock)
        self.restores.refresh()
        return in_time

    def _forget_all(self) -> None:
        self.cascade.clear_waiting()
        self.touches.clear()
        for request in [*self.holds.requests.values(), *self._asking.values()]:
            self.holds.drop_all(request)
        for key, slot in list(self.pool.keys()):
            if self.pool.slots.states[slot] >= SlotState.READY:
                self.events.add(LEVEL_0, key, removed=True)
            self.pool.void(key, slot)
        self.stores.void_all()
        self.fresh.forget_all()
        self.telling.clear()
        for level in self.levels:
            level.void()
        self.restores.refresh()

    def forget_jobs(self) -> None:
        """As `reset` for what the workers have under way only; what is stored stays."""
        for request in [*self.holds.requests.values(), *self._asking.values()]:
            self.holds.drop_all(request)
        requests = [*self.stores.requests(), *self.loads.requests.values()]
        self._quarantine_worker_slots()
        for request in requests:
            self._touch_if_over(request)

    def _quarantine_worker_slots(self) -> None:
        """The engine drops the acks of jobs begun before its reset: hold their slots back.

        It orders the workers to finish those jobs in the next step; when that step has ended,
        nobody touches the slots any more.
        """
        held = self.stores.forget_all()
        held.extend(self.loads.forget_all())
        if held:
            self._draining_until.append((self._step + 1, held))

    def close(self) -> None:
        """Stop movers and close tiers; blocks at most the shutdown deadline. Twice is fine."""
        seconds = self._limits.shutdown_deadline_s
        deadline_s = self._clock.now_s() + seconds
        with ExitStack() as rest:  # from the last to the first, whichever of them fails
            for call in self.on_close:
                rest.callback(call, deadline_s)
            for_levels_s = deadline_s - (seconds / 16 if self.on_close else 0)
            self.on_close.clear()
            rest.callback(self.cascade.clear_waiting)
            rest.callback(self.poll)
            for index, level in reversed(list(enumerate(self.levels))):
                num_left = len(self.levels) - index
                rest.callback(close_level, level, num_left, for_levels_s, self._clock)
            self._flush(deadline_s - seconds / 4)

    def _flush(self, deadline_s: float) -> None:
        clock, levels = self._clock, self.levels
        flush(self.cascade, levels, book=self.poll, deadline_s=deadline_s, clock=clock)
