"""Bring chunks up from lower levels for waiting requests: decide first, then read.

A lookup only notes what a lower level has. At the end of the step the noted keys are weighed: the
longest usable prefix that fits the free share of level 0 is read, in order of arrival; what does
not fit is answered MISS and recomputed. A chunk brought up is pinned for the requests that wait for
it, so restores do not evict each other, and no byte is read for a key beyond the final hit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from undercroft.errors import TierTimeout
from undercroft.hierarchy.counters import NO_LEVEL, Counters
from undercroft.hierarchy.cut import (
    common_end,
    cut_at,
    deny_all,
    from_root,
    least_end,
    positions_below,
)
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.outcome import Done, Op
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Answer, Request, Walk
from undercroft.hierarchy.stores import LEVEL_0
from undercroft.hierarchy.waits import MOST_DEADLINES, Waits
from undercroft.hierarchy.worth import PROBE_CHUNKS, Worth
from undercroft.keys import ChunkKey

__all__ = ["Restores"]

_MAX_WEIGHED = 3


@dataclass(slots=True)
class _Promotion:
    key: ChunkKey
    slot: int
    level: Level
    waiting: list[Request]


class Restores:
    """Promotions under way, and the requests that want some. Threads: the scheduler's.

    Args:
        share_ratio: The part of level 0 that restores may hold at once, 0 to 1.
        deadline_s: See `Waits`.
        view_of: The bytes of a slot.
        hold: Pins a READY slot for a request until it loads, ends, or runs out of time.
        let_go: Takes such pins away again, where there are any.
        make_room: Makes evictable what requests other than the named one keep for themselves.
        num_busy_slots: Slots that stores, loads and cascades will let go of by themselves.
        on_arrival: Told each chunk that is readable in level 0 from now on.
        load_margin: See `Worth`.
    """

    def __init__(  # noqa: PLR0913 - wired once, by the hierarchy
        self,
        pool: Pool,
        levels: Sequence[Level],
        *,
        share_ratio: float,
        deadline_s: float,
        view_of: Callable[[int], memoryview],
        hold: Callable[[Request, int, ChunkKey], None],
        let_go: Callable[[Request, Sequence[int]], None],
        make_room: Callable[[str], bool],
        num_busy_slots: Callable[[], int],
        on_arrival: Callable[[ChunkKey], None],
        counters: Counters,
        load_margin: float | None = None,
    ) -> None:
        self._pool = pool
        self._levels = levels
        self._share_ratio = share_ratio
        self.waits = Waits(deadline_s)
        self._view_of = view_of
        self._hold = hold
        self._let_go = let_go
        self._make_room = make_room
        self._num_busy_slots = num_busy_slots
        self._on_arrival = on_arrival
        self._counters = counters
        self._queue: dict[str, Request] = {}
        self._by_ticket: dict[tuple[str, int], _Promotion] = {}
        self._by_key: dict[ChunkKey, _Promotion] = {}
        self._late: dict[tuple[str, int], int] = {}
        self._usable: list[Level] = []
        self.worth = Worth(
            load_margin,
            level_of=self._level_of,
            bytes_of=lambda key: pool.slots.slot_bytes[pool.class_of(key)],
        )
        self.refresh()

    def __len__(self) -> int:
        return len(self._by_ticket)

    @property
    def num_waiting(self) -> int:
        """Requests whose restore is not finished."""
        return len(self._queue)

    @property
    def has_levels(self) -> bool:
        """Whether there is any lower level that may be asked."""
        return bool(self._usable)

    def level_with(self, key: ChunkKey) -> Level | None:
        """The nearest usable lower level that has `key`."""
        for level in self._usable:
            if level.has(key):
                return level
        return None

    def why_absent(self, key: ChunkKey) -> tuple[str, str]:
        """Of a key that no usable level has: the level that would have it, and why it is a miss."""
        if len(self._usable) < len(self._levels):
            for level in self._levels:
                if not level.usable and level.has(key):
                    return level.name, "unavailable"
        return NO_LEVEL, "absent"

    def source_of(self, key: ChunkKey) -> str:
        """The level that a chunk is being read from; empty if it is not."""
        promotion = self._by_key.get(key)
        return promotion.level.name if promotion is not None else ""

    def why_not_here(self, key: ChunkKey, request: Request) -> tuple[str, str]:
        """Of a key that is on its way, but not for `request`: from which level, and why not."""
        level = self.source_of(key)
        is_skipped = level and request.why_denied == "too_slow" and request.denies(key)
        return level or LEVEL_0, "too_slow" if is_skipped else "deadline"

    def refresh(self) -> None:
        """Look again which levels may be asked; once a step is enough."""
        self._usable = [level for level in self._levels if level.usable]

    def find(self, request_id: str) -> Request | None:
        """The waiting request of that id."""
        return self._queue.get(request_id)

    def join(self, key: ChunkKey, request: Request) -> None:
        """`request` also waits for a chunk that is being promoted, if it is."""
        promotion = self._by_key.get(key)
        if promotion is not None and request not in promotion.waiting:
            promotion.waiting.append(request)

    def want(self, request: Request, now_s: float) -> None:
        """Note that `request` found chunks below in this step."""
        if not request.queued:
            request.queued = True
            request.queued_s = now_s
            self._queue[request.id] = request
            self.waits.begin(request, now_s)

    def gives_up(self, key: ChunkKey, request: Request, now_s: float) -> bool:
        """Whether `request` waits no longer for `key`, which is on its way."""
        if not self.waits.is_late(request, now_s):
            return self.waits.is_over(request, now_s)
        # For good: the reserve is for what is asked for in its place.
        request.denied.add(key)
        request.failed_reads[key] = (self.source_of(key) or LEVEL_0, "deadline")
        request.is_late = True
        return True

    def leave(self, request: Request) -> None:
        """`request` wants nothing any more; what is on its way arrives unpinned."""
        if request.queued:
            request.queued = False
            self._queue.pop(request.id, None)

    def admit(self, step: int, now_s: float) -> None:
        """Start the reads of as many waiting requests as fit, in order of arrival."""
        for request in list(self._queue.values()):
            if request.step != step:
                continue
            self.waits.mind_reserve(request, now_s)
            wanted = self._wanted(request)
            if wanted is not None:
                wanted = self._worthwhile(request, wanted, now_s)
            if not wanted:
                continue
            fits = self._fits_by(request, wanted, now_s)
            while not fits and self._make_room(request.id):
                fits = self._fits_by(request, wanted, now_s)
            if fits:
                self._start(request, wanted, now_s)
            elif now_s < request.admit_by_s and self._others_hold(request):
                # Whoever came first will let go soon.
                return
            else:
                self._trim(request, now_s)

    def read_ahead(self, scout: Request, now_s: float) -> None:
        """Read what `scout` noted, whole or not at all, for nobody in particular yet."""
        wanted = self._wanted(scout)
        if wanted and self._end_worthwhile(scout, wanted) is None:
            self._read_for_nobody(scout, wanted, now_s)

    def _read_for_nobody(self, scout: Request, keys: list[ChunkKey], now_s: float) -> None:
        twice = {size_class: 2 * count for size_class, count in self._by_class(keys).items()}
        if self._fits(twice):
            self._start(scout, keys, now_s)

    def _end_worthwhile(self, request: Request, wanted: Sequence[ChunkKey]) -> int | None:
        counts = self._by_class(wanted)
        num_bytes = sum(n * self._pool.slots.slot_bytes[c] for c, n in counts.items())
        return self.worth.end_of(request, num_bytes, self._usable)

    def _worthwhile(
        self, request: Request, wanted: list[ChunkKey], now_s: float
    ) -> list[ChunkKey] | None:
        """Those of `wanted` whose reading is predicted to pay; asked once, unless groups are cut.

        None: it is walked again in the next step, over what is left.
        """
        if request.num_weighed >= _MAX_WEIGHED:
            return wanted
        request.num_weighed += 1
        end = self._end_worthwhile(request, wanted)
        if end is None:
            request.num_weighed = _MAX_WEIGHED
            return wanted
        request.why_denied = "too_slow"
        if not (end and cut_at(request, end)):
            deny_all(request)
        position_of = request.position_of
        given_up = [key for key in wanted if (position_of(key) or 0) > end]
        request.denied.update(given_up)
        slow = self._level_of(given_up[0]) if given_up else None
        if slow is not None:
            self._counters.skipped_restores[slow.name] += 1
            self._probe(slow, request, given_up, now_s)
        if len(request.walks) > 1:
            return None
        request.num_weighed = _MAX_WEIGHED
        return [key for key in wanted if (position_of(key) or 0) <= end]

    def _probe(self, level: Level, request: Request, keys: list[ChunkKey], now_s: float) -> None:
        """Now and then read a little that nobody waits for: the level may be quicker by now."""
        largest = max(self._pool.slots.slot_bytes)
        if self.worth.probes(level, largest, now_s):
            scout = Request(f"{request.id} (probe)", request.position_of, request.group_of)
            scout.deadline_s = now_s + MOST_DEADLINES * self.waits.deadline_s
            probed = [key for key in keys if self.level_with(key) is level]
            self._read_for_nobody(scout, probed[:PROBE_CHUNKS], now_s)

    def _level_of(self, key: ChunkKey) -> Level | None:
        """The level that `key` is being read from, or would be."""
        promotion = self._by_key.get(key)
        if promotion is not None:
            return promotion.level
        return self.level_with(key) if self._pool.find(key) < 0 else None

    def _wanted(self, request: Request) -> list[ChunkKey] | None:
        """Keys to read so that the walks of this step end in hits; None if they cannot."""
        wanted: list[ChunkKey] = []
        position_of = request.position_of
        for walk in request.walks.values():
            usable = walk.usable(position_of)
            if not usable:
                return None
            wanted += [walk.keys[i] for i in usable if walk.answers[i] == Answer.BELOW]
        if len(request.walks) > 1:
            end = common_end(request)
            if end is not None and end < least_end(list(request.walks.values()), position_of):
                deny_all(request)
                return None
            if end is not None and cut_at(request, end):
                return None  # walked again in the next step, over what all groups can have
        missing = [key for key in dict.fromkeys(wanted) if self._pool.find(key) < 0]
        # What comes in time is a prefix of all groups.
        return request.in_order(missing) if len(request.walks) > 1 else missing

    def _fits_by(self, request: Request, keys: Sequence[ChunkKey], now_s: float) -> bool:
        counts = self._by_class(keys)
        if self._fits(counts):
            return True
        if now_s >= request.admit_by_s or len(self._pool.slots.slot_bytes) == 1:
            return False
        return self._pool.reclaim(counts) and self._fits(counts)

    def _by_class(self, keys: Sequence[ChunkKey]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for key in keys:
            size_class = self._pool.class_of(key)
            counts[size_class] = counts.get(size_class, 0) + 1
        return counts

    def _room(self, size_class: int) -> int:
        slots = self._pool.slots
        share = self._share_left_bytes() // slots.slot_bytes[size_class]
        return min(self._pool.available(size_class), share)

    def _share_left_bytes(self) -> int:
        """What restores may still take of their share; one chunk they always may."""
        slots = self._pool.slots
        share = int(slots.num_extents * slots.extent_bytes * self._share_ratio)
        held: set[int] = set()
        if self._share_ratio < 1:
            held = {promotion.slot for promotion in self._by_ticket.values()}
            for request in self._queue.values():
                held.update(slot for slot, key in request.holds.items() if key in request.promoted)
        return max(share, *slots.slot_bytes) - sum(map(slots.size, held))

    def _fits(self, counts: Mapping[int, int]) -> bool:
        num_bytes = sum(n * self._pool.slots.slot_bytes[c] for c, n in counts.items())
        return num_bytes <= self._share_left_bytes() and self._pool.fits(counts)

    def _others_hold(self, request: Request) -> bool:
        if self._num_busy_slots():
            return True
        if any(p.waiting and request not in p.waiting for p in self._by_ticket.values()):
            return True
        return any(other is not request and other.holds for other in self._queue.values())

    def _longest_prefix(self, request: Request, walk: Walk) -> list[ChunkKey]:
        """Cut a walk from the root where it stops fitting; the keys to read before the cut.

        Hits beyond the cut are of no use without what comes before: their slots count as room, and
        are let go of. What another request began to read in this step is waited for, not read.
        """
        usable = walk.usable(request.position_of)
        room = self._room(self._pool.class_of(walk.keys[0]))
        slots = [self._pool.find(k) for k in walk.keys]
        held = [slot in request.holds for slot in slots]
        below = [a == Answer.BELOW and s < 0 for a, s in zip(walk.answers, slots, strict=True)]
        spare = sum(held[i] for i in usable)
        needed, cut = 0, len(usable)
        for i in usable:
            spare -= held[i]
            needed += below[i]
            if needed > room + spare:
                cut = i
                break
        if cut < len(walk.keys):
            request.denied.add(walk.keys[cut])
            self._let_go(request, slots[cut:])
        return [walk.keys[i] for i in range(cut) if below[i]]

    def _trim(self, request: Request, now_s: float) -> None:
        """Deny what does not fit. With one walk from the root the rest is read at once."""
        walks = list(request.walks.values())
        if len(walks) == 1 and not walks[0].descends(request.position_of):
            self._start(request, self._longest_prefix(request, walks[0]), now_s)
            return
        # Several groups must be cut at the same token. Nothing is read yet: the engine walks again
        # next step over the shorter prefix, and groups walked from the end ask for other keys.
        self._cut_walks(request, walks)

    def _cut_walks(self, request: Request, walks: list[Walk]) -> None:
        position_of = request.position_of
        windows = [w for w in walks if not from_root(w, position_of)]
        in_windows = [w.keys[i] for w in windows for i in w.usable(position_of)]
        window_counts = Counter(map(self._pool.class_of, in_windows))
        below = [
            (self._pool.class_of(walk.keys[0]), positions_below(walk, position_of))
            for walk in walks
            if from_root(walk, position_of)
        ]

        def fits_up_to(end: int) -> bool:
            counts = window_counts.copy()
            for size_class, positions in below:
                counts[size_class] += bisect_right(positions, end)
            return self._fits(counts)

        least = least_end(walks, position_of)
        ends = sorted({end for _, positions in below for end in positions if end >= least})
        num_fitting = 0
        num_not = len(ends) + 1
        while num_not - num_fitting > 1:
            middle = (num_fitting + num_not) // 2
            if fits_up_to(ends[middle - 1]):
                num_fitting = middle
            else:
                num_not = middle
        if not (num_fitting and cut_at(request, ends[num_fitting - 1])):
            deny_all(request)

    def _start(self, request: Request, keys: Sequence[ChunkKey], now_s: float) -> None:
        levels: list[Level] = []
        for key in keys:
            level = self.level_with(key)
            if level is None:
                request.denied.add(key)
                break
            levels.append(level)
        slots = self._pool.allocate(keys[: len(levels)])
        if len(slots) < len(levels):
            request.denied.add(keys[len(slots)])
        started = [
            _Promotion(key, slot, level, [request])
            for key, slot, level in zip(keys, slots, levels, strict=False)
        ]
        deadline_s = self.waits.extend(request, self._predicted_s(started), now_s)
        for promotion in started:
            ticket = promotion.level.transfers.read(
                promotion.key, self._view_of(promotion.slot), deadline_s
            )
            self._by_ticket[promotion.level.name, ticket] = promotion
            self._by_key[promotion.key] = promotion

    def _predicted_s(self, started: list[_Promotion]) -> float | None:
        if not started:
            return None
        size = self._pool.slots.size
        return sum(
            size(promotion.slot) * (promotion.level.transfers.speeds.average(Op.READ) or 0.0)
            for promotion in started
        )

    def settle(self, level: Level, done: Done) -> None:
        """Book the end of one read."""
        promotion = self._by_ticket.pop((level.name, done.ticket), None)
        if promotion is None:
            return
        key, slot, outcome = promotion.key, promotion.slot, done.outcome
        if self._by_key.get(key) is promotion:
            del self._by_key[key]
        if self._pool.find(key) != slot:  # voided by a reset while on its way
            self._release(level, done, slot)
            return
        if outcome.error is None and outcome.found:
            self._pool.make_ready(key, slot)
            self._on_arrival(key)
            self._counters.promoted_chunks[level.name] += 1
            self._counters.promoted_bytes[level.name] += outcome.num_bytes
            self._counters.promote_seconds.see(outcome.seconds, level.name)
            for request in promotion.waiting:
                if request.queued:
                    request.promoted[key] = level.name
                    self._hold(request, slot, key)
            return
        if outcome.error is None:
            self._counters.dropped_chunks[level.name, "vanished"] += 1
            self._counters.note(level.name, "dropped", "vanished", key)
        is_late = isinstance(outcome.error, TierTimeout)
        why = (level.name, "deadline" if is_late else "read_failed")
        for request in promotion.waiting:
            request.denied.add(key)
            request.failed_reads[key] = why
            request.is_late |= is_late
        self._pool.abandon(key, slot, buffer_free=done.buffer_free)
        if not done.buffer_free:
            self._late[level.name, done.ticket] = slot

    def _release(self, level: Level, done: Done, slot: int) -> None:
        if done.buffer_free:
            self._pool.slots.give_back(slot)
        else:
            self._late[level.name, done.ticket] = slot

    def released(self, level: Level, ticket: int) -> None:
        """A read that had run out of time came back: nobody writes into its slot any more."""
        slot = self._late.pop((level.name, ticket), None)
        if slot is not None:
            self._pool.slots.give_back(slot)
