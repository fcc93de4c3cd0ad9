"""What is known of prefixes, resident or not: how often and when they were used, and how so.

One row a prefix, in packed columns; a key is known by a fingerprint, the key itself is not kept.
Rows lie in sets of eight, as in a processor's cache: the fingerprint says which set, and the
longest unused row of a set makes way for a new one. So there is no index beside the rows, nothing
to rehash, and the bound holds by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from undercroft.keys import ChunkKey
from undercroft.policies.reuse_curves import ReuseCurves

__all__ = ["NUM_CLASSES", "KnownPrefixes", "Seen"]

_WAYS = 8
_KNOWN_PER_CHUNK_BELOW = 2
_KNOWN_PER_CHUNK, _MIN_KNOWN, _MAX_KNOWN = 64, 1 << 12, 1 << 22
_TICKS = 16  # a second
_MAX_SIGHTS = 127
_NEAR_END, _TRACKED = 1, 2
_CLS_SHIFT, _SIGHTS_SHIFT = 2, 9
_NUM_NEAR_END = 3
_GAPS_S = (5.0, 30.0, 300.0)
_NUM_GAPS, _NUM_KINDS, _NUM_SIGHTS = 4, 4, 4
NUM_CLASSES = 2 * _NUM_GAPS * _NUM_KINDS * _NUM_SIGHTS
"""Whether the request continued another; how long what it continued had waited; how it ended; and
how often the prefix has been seen: once, twice, up to 5 times, more often."""
_NEXT_SIGHTS = np.minimum(np.arange(_MAX_SIGHTS + 1) + 1, _MAX_SIGHTS)
_NEXT_CLASS = np.searchsorted((2, 3, 6), _NEXT_SIGHTS, side="right")
_NEXT_STATE = ((_NEXT_SIGHTS << _SIGHTS_SHIFT) | (_NEXT_CLASS << _CLS_SHIFT)).astype(np.uint16)
"""By how often a prefix was seen before: what one use more makes of it, other classes left out."""
_FEW = 12
"""To give so few prefixes their rows one by one is quicker than all at once."""
_MAX_OPEN = 1 << 14
_LEARN_EVERY = 256
_MAX_RECENT = 64
_INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class Seen:
    """What a request came to.

    Args:
        serial: Counts requests.
        now_s: When it ended, by the table's own time.
        rows: One a key, root first.
        starts: Where along the path a new class begins; the first is 0.
        classes: Of each of those stretches.
        num_known: Up to the deepest key that was known before.
    """

    serial: int
    now_s: float
    keys: Sequence[ChunkKey]
    rows: NDArray[np.int64]
    starts: list[int]
    classes: list[int]
    num_known: int = 0


class KnownPrefixes:
    """The table, shared by the policies of all levels, and the curves learned with it.

    Args:
        max_prefixes: How many prefixes are known at most, about.
        seed: Of the choice which waits are watched.

    Attributes:
        is_stopped: The clock has not moved for hundreds of requests: ages mean nothing.

    Threads: one. Memory: 14 bytes a row, all of it taken at once.
    """

    def __init__(self, max_prefixes: int, seed: int = 0) -> None:
        num_sets = 1
        while num_sets * _WAYS < max_prefixes:
            num_sets *= 2
        self.num_rows = num_sets * _WAYS
        self._shift = np.uint64(64 - (num_sets.bit_length() - 1)) if num_sets > 1 else None
        self._prints = np.zeros(self.num_rows, dtype=np.uint64)
        self._sets = self._prints.reshape(num_sets, _WAYS)
        self._used = np.zeros(self.num_rows, dtype=np.int32)
        self._used_sets = self._used.reshape(num_sets, _WAYS)
        self._state = np.zeros(self.num_rows, dtype=np.uint16)
        for column in (self._prints, self._used, self._state):
            column.fill(0)  # the scheduler's thread pays for no page when it comes to it
        self._prints_view, self._used_view = self._prints.data, self._used.data
        self._random = Random(seed)  # noqa: S311 - repeatable on purpose
        self.curves = ReuseCurves(NUM_CLASSES)
        self._open_rows = np.zeros(_MAX_OPEN, dtype=np.int32)
        self._open_since = np.zeros(_MAX_OPEN, dtype=np.int32)
        self._num_opened = 0
        self._recent: dict[ChunkKey, tuple[float, int, Seen | None]] = {}
        self._last_s: float | None = None
        self._elapsed_s = 0.0
        self._learned_at = -1
        self.is_stopped = False
        self.serial = 0
        self.in_use: list[Callable[[NDArray[np.int64]], NDArray[np.bool_]]] = []

    @classmethod
    def for_chunks(cls, num_chunks: int, num_below: int = 0) -> KnownPrefixes:
        """As many prefixes as pay for a level of `num_chunks`, and lower ones of `num_below`."""
        wanted = max(_KNOWN_PER_CHUNK * num_chunks, _KNOWN_PER_CHUNK_BELOW * num_below)
        return cls(min(max(wanted, _MIN_KNOWN), _MAX_KNOWN))

    # --- looking up ---------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> int:
        """The row of `key`, or -1. Cost: 1 us."""
        print_ = xxh3_64_intdigest(key) or 1
        first = (print_ >> int(self._shift)) * _WAYS if self._shift is not None else 0
        view = self._prints_view
        for row in range(first, first + _WAYS):
            if view[row] == print_:
                return row
        return -1

    def see(
        self, keys: Sequence[ChunkKey], now_s: float, kind: int, num_told: int = 0, after: int = 0
    ) -> Seen:
        """A request used `keys`, root first. Told of it by several levels, it is seen once.

        Args:
            keys: Of full chunks.
            now_s: The clock's time.
            kind: How it ended, two bits.
            num_told: Of so many this very request was seen before; it has grown since.
            after: Serial of what the level that tells saw last: this is another request. The same
                at the same time does not count as another use.
        """
        number = len(keys)
        told_at_s, told, seen = self._recent.get(keys[-1], (now_s, 0, None))
        if seen is not None and told == number and told_at_s == now_s:
            if seen.serial > after:
                return seen
            num_told = number
        # A clock that is set back, or stands, makes no age negative.
        if self._last_s is not None:
            self._elapsed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        seen = self._see(keys, kind & (_NUM_KINDS - 1), num_told)
        if len(self._recent) >= _MAX_RECENT:
            self._recent.clear()
        self._recent[keys[-1]] = now_s, number, seen
        return seen

    def _see(self, keys: Sequence[ChunkKey], kind: int, num_told: int) -> Seen:
        now_s = self._elapsed_s
        now = min(_INT32_MAX - 1, int(now_s * _TICKS) + 1)
        self.serial += 1
        each = list(map(xxh3_64_intdigest, keys))
        if len(set(each)) < len(each):
            first = dict(zip(reversed(each), reversed(keys), strict=True))
            each = list(dict.fromkeys(each))
            keys = [first[print_] for print_ in each]
        num = len(keys)
        rows, num_known = self._rows(np.array(each, np.uint64), now)
        if len(rows) < num:
            keys, num = keys[: len(rows)], len(rows)
            if not num:
                return Seen(self.serial, now_s, keys, rows, [], [])
        state = self._state[rows]
        used = self._used[rows]
        continued = 0
        if num_known and num_told:
            continued = _again(state[: min(num_told, num_known)])
        elif num_known:
            gap = bisect_right(_GAPS_S, (now - int(used[num_known - 1])) / _TICKS)
            continued = (int(state[num_known - 1]) & _NEAR_END) * _NUM_GAPS + gap
        for i in (state & _TRACKED).nonzero()[0].tolist():
            age_s = (now - int(used[i])) / _TICKS
            self.curves.finish(int(state[i]) >> _CLS_SHIFT & (NUM_CLASSES - 1), age_s)
        sights = state >> _SIGHTS_SHIFT
        by_sights = _NEXT_CLASS.take(sights)
        first_class = (continued * _NUM_KINDS + kind) * _NUM_SIGHTS
        starts = [0, *((by_sights[1:] != by_sights[:-1]).nonzero()[0] + 1).tolist()]
        classes = [first_class + int(by_sights[start]) for start in starts]
        state = _NEXT_STATE.take(sights)
        state += first_class << _CLS_SHIFT
        state[-_NUM_NEAR_END:] |= _NEAR_END
        self._watch(state, rows, starts, classes, now)
        self._state[rows] = state
        self._used[rows] = now
        if self.serial % _LEARN_EVERY == 0:
            self._learn(now)
        else:
            self.curves.go_on()
        return Seen(self.serial, now_s, keys, rows, starts, classes, num_known)

    def _watch(
        self,
        state: NDArray[np.uint16],
        rows: NDArray[np.int64],
        starts: Sequence[int],
        classes: Sequence[int],
        now: int,
    ) -> None:
        """Of each class of a request, watch how long one prefix waits."""
        voted: set[int] = set()
        for i, start in enumerate(starts):
            if classes[i] in voted:
                continue
            voted.add(classes[i])
            stop = starts[i + 1] if i + 1 < len(starts) else len(rows)
            at = start + int(self._random.random() * (stop - start))
            state[at] |= _TRACKED
            slot = self._num_opened % _MAX_OPEN
            self._open_rows[slot] = rows[at]
            self._open_since[slot] = now
            self._num_opened += 1

    def _rows(self, prints: NDArray[np.uint64], now: int) -> tuple[NDArray[np.int64], int]:
        """A row for each, and the number up to the deepest that was known.

        Shorter where all rows of a set are in use.
        """
        np.maximum(prints, 1, out=prints)
        if self._shift is None:
            sets = np.zeros(len(prints), dtype=np.int64)
        else:
            sets = (prints >> self._shift).astype(np.int64)
        match = self._sets.take(sets, axis=0) == prints[:, None]
        rows = sets * _WAYS + match.argmax(axis=1)
        absent = (self._prints[rows] != prints).nonzero()[0]
        if not len(absent):
            return rows, len(prints)
        num_known = int(absent[0])
        if len(absent) < len(prints) - num_known:
            known = np.ones(len(prints), dtype=bool)
            known[absent] = False
            num_known = int(np.flatnonzero(known)[-1]) + 1
        num_found = self._give_rows(rows, sets, absent)
        absent = absent[: np.searchsorted(absent, num_found)]
        new = rows[absent]
        self._prints[new] = prints[absent]
        self._state[new] = 0
        self._used[new] = now
        return rows[:num_found], min(num_found, num_known)

    def _give_rows(
        self, rows: NDArray[np.int64], sets: NDArray[np.int64], absent: NDArray[np.int64]
    ) -> int:
        """Choose a row for each at `absent`, put into `rows`; up to where there was one."""
        rows[absent] = -1
        mine = set(rows.tolist())
        if len(absent) > _FEW:
            of_sets = sets[absent]
            chosen = of_sets * _WAYS + self._used_sets.take(of_sets, axis=0).argmin(axis=1)
            is_taken = self._are_taken(chosen, mine)
            rows[absent] = np.where(is_taken, -1, chosen)
            absent = absent[is_taken]
            if len(absent):
                mine.update(rows.tolist())
        for at in absent.tolist():
            row = self._spare_row(int(sets[at]) * _WAYS, mine)
            if row < 0:
                return int(at)
            mine.add(row)
            rows[at] = row
        return len(rows)

    def _are_taken(self, rows: NDArray[np.int64], mine: set[int]) -> NDArray[np.bool_]:
        """Which `rows` are needed, in `mine`, or there before."""
        each = rows.tolist()
        is_taken = np.zeros(len(each), dtype=bool)
        if len(set(each)) < len(each):
            is_taken[:] = True
            is_taken[np.unique(rows, return_index=True)[1]] = False
        if self._used[rows].any():  # else nobody has ever had them
            is_taken |= self._are_needed(rows)
            if not mine.isdisjoint(each):
                is_taken |= [row in mine for row in each]
        return is_taken

    def _are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        needed = np.zeros(len(rows), dtype=bool)
        for in_use in self.in_use:
            needed |= in_use(rows)
        return needed

    def _spare_row(self, first: int, mine: set[int]) -> int:
        """The longest unused row of a set that nobody needs, nor is in `mine`; else -1."""
        ways = self._used_view[first : first + _WAYS].tolist()
        way = ways.index(min(ways))
        if ways[way] or first + way in mine:
            used = np.array(ways)
            candidates = np.arange(first, first + _WAYS)
            used[self._are_needed(candidates)] = _INT32_MAX
            for row in mine.intersection(range(first, first + _WAYS)):
                used[row - first] = _INT32_MAX
            way = int(used.argmin())
            if used[way] == _INT32_MAX:
                return -1
        return first + way

    # --- learning -----------------------------------------------------------------------------

    def _learn(self, now: int) -> None:
        num = min(self._num_opened, _MAX_OPEN)
        rows, since = self._open_rows[:num], self._open_since[:num]
        state = self._state[rows]
        is_open = np.flatnonzero((state & _TRACKED != 0) & (self._used[rows] == since))
        cls = (state[is_open] >> _CLS_SHIFT & (NUM_CLASSES - 1)).astype(np.int64)
        self.curves.learn(cls, (now - since[is_open]) / _TICKS, now / _TICKS)
        self.is_stopped = now == self._learned_at
        self._learned_at = now


def _again(state: NDArray[np.uint16]) -> int:
    """What a request was seen to have before, it has again: not used twice, nor waited for since.

    Returns:
        Of its class, what it continued, and after how long.
    """
    cls = int(state[-1]) >> _CLS_SHIFT & (NUM_CLASSES - 1)
    state &= ~np.uint16(_TRACKED)
    state -= np.minimum(state >> _SIGHTS_SHIFT, 1) << _SIGHTS_SHIFT
    return cls // (_NUM_KINDS * _NUM_SIGHTS)
