"""One level below level 0: a tier, who may come in, who goes first, and its movers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import islice
from typing import Any

from undercroft.admission.always import Always
from undercroft.admission.base import Admission, Budgeting, Observing
from undercroft.clock import Clock
from undercroft.errors import ConfigError, CorruptChunk, KvError, TierClosed, TierFull
from undercroft.hierarchy.alarm import Alarm
from undercroft.hierarchy.asked import Asked
from undercroft.hierarchy.breaker import BreakerState
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.follow import Follower
from undercroft.hierarchy.outcome import Done, Op
from undercroft.hierarchy.relief import Relief
from undercroft.hierarchy.spending import Spending
from undercroft.hierarchy.telling import Telling, Unlisted
from undercroft.hierarchy.transfers import Transfers
from undercroft.hierarchy.voiding import Voider
from undercroft.keys import ChunkKey
from undercroft.log import SparingLog
from undercroft.policies.base import Evicting, EvictionPolicy, InsertingMany, Learning
from undercroft.tiers.base import Bounded, Following, Indexed, Tier

__all__ = ["Level", "drop_reason"]

_LOG = logging.getLogger(__name__)
_MAX_EVICTIONS_PER_CALL = 64
_UNBOUNDED_CHUNKS = 1 << 40


def drop_reason(error: KvError) -> str:
    """The word under which a failure is counted."""
    if isinstance(error, CorruptChunk):
        return "corrupt"
    return type(error).__name__.removeprefix("Tier").lower()


def _evicted(policy: EvictionPolicy, num_keys: int) -> list[ChunkKey]:
    if isinstance(policy, Evicting):
        return policy.evict(num_keys, lambda _key: False)
    victims = list(islice(policy.victims(), num_keys))
    for key in victims:
        policy.on_evict(key)
    return victims


def _opened(admission: Admission, spending: Spending) -> Observing | None:
    """`admission` if it wants to be told of uses; shown the purse, if it wants to see it."""
    if isinstance(admission, Budgeting):
        admission.open(spending)
    return admission if isinstance(admission, Observing) else None


class _ClosedIndex:
    """The index of a tier that is closed, and must not be asked any more."""

    def has(self, key: ChunkKey) -> bool:
        del key
        return False

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        return ()


class Level:
    """A lower level. All methods run on the scheduler thread.

    Args:
        tier: Must be `Indexed`; the other protocols of `tiers.base` are used when there.
        transfers: Moves the tier's bytes.
        slot_bytes: Bytes of a chunk of each size class, as the tier sees them.
        class_of: The size class of a key.
        make_policy: Called once per size class with the number of chunks it could have.
        admission: Asked once per chunk offered, told once per request of each that is in.
        write_deadline_s: How long a queued write may take.
        write_rate_bytes: What may be written a second; None: no bound.

    Raises:
        ConfigError: The tier is not `Indexed`, or its budget is less than a chunk.
    """

    def __init__(  # noqa: PLR0913 - the one place where a level is put together
        self,
        tier: Tier,
        *,
        transfers: Transfers,
        slot_bytes: Sequence[int],
        class_of: Callable[[ChunkKey], int],
        make_policy: Callable[[int], EvictionPolicy],
        admission: Admission,
        clock: Clock,
        counters: Counters,
        events: LevelEvents,
        write_deadline_s: float,
        write_rate_bytes: int | None = None,
    ) -> None:
        if not isinstance(tier, Indexed):
            raise ConfigError(
                f"tier {tier.name!r} keeps no index in memory (`Indexed`), and such tiers are "
                "not served yet: leave it out, or give it one",
                tier=tier.name,
            )
        self.name = tier.name
        self.tier = tier
        asked: Any = Asked(tier, clock)
        self.asked: Asked = asked
        self._indexed: Indexed = asked
        self._bounded = asked if isinstance(asked, Bounded) else None
        self.transfers = transfers
        self._slot_bytes = tuple(slot_bytes)
        self._class_of = class_of
        self._admission = admission
        self.is_choosy = not isinstance(admission, Always)
        """Whether its admission may refuse a chunk, and so must not be asked twice for one use."""
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._counters = counters
        self._events = events
        self._write_deadline_s = write_deadline_s
        self._spending = Spending(
            asked, rate_bytes=write_rate_bytes, largest_bytes=max(slot_bytes), clock=clock
        )
        self._observing = _opened(admission, self._spending)
        self._alarm = Alarm(tier.name, clock)
        self._was_up = True
        self._policies = [make_policy(self._capacity_chunks(n)) for n in self._slot_bytes]
        self.learns = any(isinstance(policy, Learning) for policy in self._policies)
        """Whether a policy wants to be told of requests."""
        self._unlisted = Unlisted(len(self._slot_bytes))
        self._ahead = [
            max(1, min(32, self._capacity_chunks(n) // 64)) if self._bounded else 0
            for n in self._slot_bytes
        ]
        self._relief = Relief([1 + ahead for ahead in self._ahead], clock)
        self._writing: dict[ChunkKey, tuple[int, int]] = {}
        self._late_writes: dict[int, tuple[ChunkKey, int]] = {}
        self._generation = 0
        self._free: dict[int, int] = {}
        self._num_writing = [0] * len(self._slot_bytes)
        self._num_deleting = [0] * len(self._slot_bytes)
        self._is_closed = False
        self.voider = Voider(asked, transfers, evictable=tier.evictable, clock=clock)
        self._adopt(tier.evictable())
        self._following: Following | None = asked if isinstance(asked, Following) else None
        self._follower = Follower(self._following, self.name, clock) if self._following else None

    def _capacity_chunks(self, num_bytes: int) -> int:
        return self._bounded.capacity_bytes // num_bytes if self._bounded else _UNBOUNDED_CHUNKS

    def _adopt(self, chunks: Iterable[tuple[ChunkKey, int]]) -> None:
        classes = {num_bytes: c for c, num_bytes in enumerate(self._slot_bytes)}
        for key, num_bytes in chunks:
            size_class = classes.get(num_bytes)
            if size_class is not None and not self._is_booked(key, size_class):
                self._policies[size_class].on_insert(key)
                self._events.find(self.name, key)

    def ask(self, telling: Telling) -> None:
        """Before anything is written: who knows which chunks a policy may be told of."""
        if self.learns:
            self._unlisted.telling = telling

    @property
    def usable(self) -> bool:
        """Whether the level is asked at all: not void, and its breaker lets calls through."""
        return self.voider.is_over and self.asked.is_answering and self.transfers.available

    def has(self, key: ChunkKey) -> bool:
        """Whether a read of `key` is worth trying. No I/O."""
        return self._indexed.has(key)

    def free_for_writes(self, size_class: int) -> int:
        """Chunks that can be written without an eviction, those on their way counted."""
        if self._bounded is None:
            return _UNBOUNDED_CHUNKS
        free = self._free.get(size_class)
        if free is None:
            # Asking may cost a tier of many segments a millisecond: once a step.
            free = self._bounded.free_chunks(self._slot_bytes[size_class])
            free += self._num_deleting[size_class] - self._num_writing[size_class]
            self._free[size_class] = free
        return free

    def begin_step(self) -> None:
        """Ask the tier anew what is free, what has become ours to evict, and what is lost."""
        self._free.clear()
        self.asked.begin_step()
        if self._following is not None:
            self._adopt(self._following.take_adopted())
            for key, reason in self._following.take_lost():
                self._lose(key, reason)

    def _lose(self, key: ChunkKey, reason: str) -> None:
        """The tier has `key` no more, and it was not us."""
        size_class = self._class_of(key)
        if self._is_booked(key, size_class):
            self._forget(key, size_class)
        self._counters.dropped_chunks[self.name, reason] += 1
        self._counters.note(self.name, "dropped", reason, key)

    def is_busy(self, num_bytes: int) -> bool:
        """Whether a chunk has to wait; never while the level is unusable.

        The movers' queue is too full for it, or it would be written faster than the user allows.
        """
        queued, bound = self.transfers.queued_write_bytes, self.transfers.max_queued_write_bytes
        is_full = queued > 0 and queued + num_bytes > bound
        return (is_full or self._spending.is_too_early(num_bytes)) and self.usable

    def begin_offers(self) -> None:
        """What is offered from now on is of another request."""
        if self._observing is not None:
            self._observing.on_begin()

    def offer(self, key: ChunkKey, data: memoryview, *, again: bool = False) -> int | None:
        """Start writing `key`; returns the ticket, or None if it is not written (counted).

        Args:
            key: Which.
            data: Its bytes.
            again: It was let in, and there was no room: the admission is not asked twice.
        """
        size_class = self._class_of(key)
        if not self.usable:
            self._decline("unavailable", key)
            return None
        if key in self._writing:
            if self._writing[key][1] != self._generation:
                self._decline("before_reset", key)
            return None
        if self._indexed.has(key) or not self._may_come(key, len(data), again=again):
            return None
        self.make_room(size_class, 1)
        deadline_s = self._clock.now_s() + self._write_deadline_s
        ticket = self.transfers.write(key, data, deadline_s, self.voider.epoch_seen)
        if ticket is None:
            self._decline("backpressure", key)
            return None
        self._writing[key] = (size_class, self._generation)
        self._num_writing[size_class] += 1
        self._spending.begin(len(data))
        if size_class in self._free:
            self._free[size_class] -= 1
        return ticket

    def _may_come(self, key: ChunkKey, num_bytes: int, *, again: bool) -> bool:
        """What the level's admission and the day's budget say; a refusal is counted."""
        if not again and not self._admission.admit(key, num_bytes):
            self._decline("not_admitted", key)
            return False
        if self._spending.is_too_much(num_bytes):
            self._decline("write_budget", key)
            self._log.warning(
                "tier %s: the day's write_budget is spent; chunks are not copied to it until some "
                "of it comes back, at the turn of an hour",
                self.name,
            )
            return False
        return True

    def decline_waiting(self, reason: str, keys: Sequence[ChunkKey]) -> None:
        """`keys` waited too long for their turn to be written."""
        for key in keys:
            self._decline(reason, key)
        self._log.warning(
            "tier %s is written to more slowly than chunks are stored: some leave host memory "
            "before they are copied to it",
            self.name,
        )

    def _decline(self, reason: str, key: ChunkKey) -> None:
        self._counters.declined_chunks[self.name, reason] += 1
        self._counters.note(self.name, "declined", reason, key)

    def make_room(
        self, size_class: int, num_chunks: int, *, at_most: int = _MAX_EVICTIONS_PER_CALL
    ) -> int:
        """Delete the coldest chunks, so that `num_chunks` and a little more fit; how many went."""
        missing = num_chunks + self._ahead[size_class] - self.free_for_writes(size_class)
        if missing <= 0:
            return 0
        policy, wanted = self._policies[size_class], min(missing, at_most, _MAX_EVICTIONS_PER_CALL)
        victims = _evicted(policy, wanted)
        if len(victims) < wanted and self._unlisted.are_told(size_class):
            victims += _evicted(policy, wanted - len(victims))
        for key in victims:
            self.transfers.delete(key)
            self._num_deleting[size_class] += 1
            self._free[size_class] += 1
            self._counters.evicted_chunks[self.name] += 1
            self._counters.note(self.name, "evicted", "capacity", key)
            self._events.add(self.name, key, removed=True)
        return len(victims)

    def _relieve(self, size_class: int) -> None:
        """The tier said that it is full, whatever it said before."""
        self._free[size_class] = 0
        num_evicted = self.make_room(size_class, 1, at_most=self._relief.left(size_class))
        self._relief.spend(size_class, num_evicted)

    def learn(self, keys: Sequence[ChunkKey], now_s: float, *, kind: int, num_told: int) -> None:
        """See `undercroft.hierarchy.telling.Learner`."""
        policy = self._policies[self._class_of(keys[0])]
        if isinstance(policy, Learning):
            policy.on_request(keys, now_s, kind, num_told)

    def list_told(self, keys: Collection[ChunkKey]) -> None:
        """See `undercroft.hierarchy.telling.Learner`. What is not written yet comes later."""
        for size_class, come in self._unlisted.take(keys):
            policy = self._policies[size_class]
            if isinstance(policy, InsertingMany):
                policy.on_insert_all(come)
            else:
                for key in come:
                    policy.on_insert(key)

    def _is_booked(self, key: ChunkKey, size_class: int) -> bool:
        return key in self._policies[size_class] or key in self._unlisted.of(size_class)

    def _forget(self, key: ChunkKey, size_class: int) -> None:
        self._unlisted.drop(key, size_class)
        self._policies[size_class].on_drop(key)
        self._events.add(self.name, key, removed=True)

    def touch(self, keys: Sequence[ChunkKey], offered: Container[ChunkKey] = ()) -> None:
        """`keys`, a prefix from the root on, were used; `offered` are those that came for it."""
        observing = self._observing
        if self.learns and observing is None:
            return  # `learn` has said so
        for key in reversed(keys):
            policy = self._policies[self._class_of(key)]
            if key not in policy:
                continue
            if not self.learns:
                policy.on_hit(key)
            if observing is not None and key not in offered:
                observing.on_use(key)

    def settle(self, done: Done, *, again: bool = False) -> None:
        """Book the end of a write or delete, or the failure of a read.

        Args:
            done: What ended.
            again: It failed, but is not given up: nothing is lost yet.
        """
        key, error = done.outcome.key, done.outcome.error
        size_class = self._class_of(key)
        if done.op is Op.DELETE:
            self._num_deleting[size_class] -= 1
            if error is not None:
                self._keep_evictable(key)
        elif done.op is Op.WRITE:
            self._settle_write(done)
        elif self._is_gone(done):
            self._forget(key, size_class)
        self._alarm.see(error, self.transfers.breaker.state)
        self._note_state(error)
        if error is not None:
            if not again:
                self._counters.dropped_chunks[self.name, drop_reason(error)] += 1
                self._counters.note(self.name, "dropped", drop_reason(error), key)
            self._tell(done.op, error)
            if isinstance(error, TierFull) and done.op is Op.WRITE and not self._is_closed:
                self._relieve(size_class)

    def _note_state(self, error: KvError | None) -> None:
        is_up = self.transfers.breaker.state is BreakerState.CLOSED
        if is_up != self._was_up:
            self._was_up = is_up
            reason = drop_reason(error) if error is not None else "other"
            self._counters.note(self.name, "up" if is_up else "down", reason)

    def _is_gone(self, done: Done) -> bool:
        """A read found nothing good, and the tier no longer says that there is something.

        What it still says it has stays evictable, or it would take up room for ever.
        """
        outcome = done.outcome
        found_nothing = outcome.error is None and not outcome.found
        return (found_nothing or isinstance(outcome.error, CorruptChunk)) and not self._indexed.has(
            outcome.key
        )

    def _tell(self, op: Op, error: KvError) -> None:
        """Say why, once a minute; what is full, being reset or closed is no news."""
        if self.voider.is_over and not isinstance(error, TierFull | TierClosed | CorruptChunk):
            self._log.warning("tier %s failed to %s a chunk: %s", self.name, op.value, error)

    def _settle_write(self, done: Done) -> None:
        key, error = done.outcome.key, done.outcome.error
        size_class, generation = self._writing.pop(key)
        self._num_writing[size_class] -= 1
        self._spending.end(self._slot_bytes[size_class])
        if not done.buffer_free:
            self._late_writes[done.ticket] = (key, generation)
        if generation != self._generation:
            return
        if error is not None:
            self._keep_evictable(key)
            return
        if not done.outcome.num_bytes:
            self._decline("before_reset", key)
            return
        self._relief.helped(size_class)
        is_booked = self._is_booked(key, size_class) or self._unlisted.keeps(key, size_class)
        if not is_booked:
            self._policies[size_class].on_insert(key)
        self._counters.cascaded_chunks[self.name] += 1
        self._counters.cascaded_bytes[self.name] += done.outcome.num_bytes
        self._counters.cascade_seconds.see(done.outcome.seconds, self.name)
        self._events.add(self.name, key, removed=False)

    def released(self, ticket: int) -> None:
        """A write that had run out of time came back; it may have worked after all."""
        key, generation = self._late_writes.pop(ticket, (None, 0))
        if key is not None and generation == self._generation:
            self._keep_evictable(key)

    def _keep_evictable(self, key: ChunkKey) -> None:
        """If the tier holds `key` in spite of a failure, see to it that it can be evicted."""
        size_class = self._class_of(key)
        is_booked = self._is_booked(key, size_class)
        if self.voider.is_over and not is_booked and self._indexed.has(key):
            self._policies[size_class].on_insert(key)
            self._events.add(self.name, key, removed=False)

    # --- resets and the end -------------------------------------------------------------------

    def epoch_moved(self) -> bool:
        """Whether another process raised the epoch since this level was last made void."""
        return self.voider.epoch_moved()

    def owe_reset(self) -> None:
        """Before anything else is done about a reset of all processes; `void` has to follow."""
        self.voider.owe()

    def void(self) -> None:
        """Forget everything; the level is unusable until nothing old can be written any more.

        After `owe_reset`, what is stored becomes void for every process, durably; `wait_void`
        waits for that.
        """
        self._generation += 1
        self._counters.note(self.name, "reset", "other")
        self.transfers.cancel_queued()
        for size_class, policy in enumerate(self._policies):
            for key in [*policy.victims(), *self._unlisted.of(size_class)]:
                self._forget(key, size_class)
        self.voider.begin()

    def wait_void(self, timeout_s: float) -> bool:
        """Wait until the level is void; False if it is not by then, or is closed."""
        return self.voider.wait(timeout_s)

    def close(self, deadline_s: float) -> None:
        """Stop the movers and close the tier, bounded even if the tier hangs.

        What ended by then is still to be settled; the level holds nothing any more.
        """
        self._is_closed = True
        self.voider.close(max(0.0, deadline_s - self._clock.now_s()) / 4)
        if self._follower is not None:
            self._follower.close(max(0.0, deadline_s - self._clock.now_s()) / 4)
        try:
            self.transfers.close(deadline_s)
        finally:
            self._indexed, self._following = _ClosedIndex(), None
