"""What is known of prefixes, resident or not: how often and when they were used, and how so.

One row a prefix, in packed columns; a key is known by a fingerprint, the key itself is not kept.
Rows lie in sets of eight, as in a processor's cache: the fingerprint says which set, and the
longest unused row of a set makes way for a new one. So there is no index beside the rows, nothing
to rehash, and the bound holds by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from undercroft.keys import ChunkKey
from undercroft.policies.reuse_curves import ReuseCurves

__all__ = ["NUM_CLASSES", "InUse", "KnownPrefixes", "Seen"]

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
_NEXT_CLASSES: list[int] = _NEXT_CLASS.tolist()
_NEXT_STATES: list[int] = _NEXT_STATE.tolist()
_NEW_STATE = _NEXT_STATES[0]
_FEW = 12
"""So few prefixes are quicker one by one than in arrays."""
_PRINT_BITS = 64
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
        num_known: Up to the deepest key that was known before; rows that are deeper were given to
            these keys just now.
    """

    serial: int
    now_s: float
    keys: Sequence[ChunkKey]
    rows: NDArray[np.int64]
    starts: list[int]
    classes: list[int]
    num_known: int


class InUse(Protocol):
    """Who needs rows: they must not be given to another prefix."""

    def are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `rows`."""
        ...

    def is_needed(self, row: int) -> bool:
        """Whether this one."""
        ...


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
        self._shift = _PRINT_BITS - (num_sets.bit_length() - 1)
        self._prints = np.zeros(self.num_rows, dtype=np.uint64)
        self._sets = self._prints.reshape(num_sets, _WAYS)
        self._used = np.zeros(self.num_rows, dtype=np.int32)
        self._used_sets = self._used.reshape(num_sets, _WAYS)
        self._state = np.zeros(self.num_rows, dtype=np.uint16)
        for column in (self._prints, self._used, self._state):
            column.fill(0)  # the scheduler's thread pays for no page when it comes to it
        self._prints_view, self._used_view = self._prints.data, self._used.data
        self._state_view = self._state.data
        self._random = Random(seed)  # noqa: S311 - repeatable on purpose
        self.curves = ReuseCurves(NUM_CLASSES)
        self._open_rows = np.zeros(_MAX_OPEN, dtype=np.int32)
        self._open_since = np.zeros(_MAX_OPEN, dtype=np.int32)
        self._open_rows_view, self._open_since_view = self._open_rows.data, self._open_since.data
        self._num_opened = 0
        self._recent: dict[ChunkKey, tuple[float, int, Seen | None]] = {}
        self._last_s: float | None = None
        self._elapsed_s = 0.0
        self._learned_at = -1
        self.is_stopped = False
        self.serial = 0
        self.in_use: list[InUse] = []

    @classmethod
    def for_chunks(cls, num_chunks: int, num_below: int = 0) -> KnownPrefixes:
        """As many prefixes as pay for a level of `num_chunks`, and lower ones of `num_below`."""
        wanted = max(_KNOWN_PER_CHUNK * num_chunks, _KNOWN_PER_CHUNK_BELOW * num_below)
        return cls(min(max(wanted, _MIN_KNOWN), _MAX_KNOWN))

    # --- looking up ---------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> int:
        """The row of `key`, or -1. Cost: 1 us."""
        print_ = xxh3_64_intdigest(key) or 1
        first = (print_ >> self._shift) * _WAYS
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
        prints = list(map(xxh3_64_intdigest, keys))
        distinct = set(prints)
        if len(distinct) < len(prints) or 0 in distinct:
            keys, prints = _distinct(keys, prints)
        find = self._rows_of_few if len(prints) <= _FEW else self._rows_of_many
        rows, num_known = find(prints)
        if len(rows) < len(keys):
            keys = keys[: len(rows)]
            if not keys:
                return Seen(self.serial, now_s, keys, rows, [], [], 0)
        first_class, starts, classes = kind * _NUM_SIGHTS, [0], [kind * _NUM_SIGHTS]
        if num_known:
            use = self._use_few if num_known <= _FEW and not num_told else self._use_many
            first_class, starts, classes = use(rows[:num_known], kind, num_told, now)
        if num_known < len(rows):
            if num_known and classes[-1] != first_class:
                starts.append(num_known)
                classes.append(first_class)
            self._state[rows[num_known:]] = _NEW_STATE + (first_class << _CLS_SHIFT)
        self._used[rows] = now
        view = self._state_view
        for row in rows[-_NUM_NEAR_END:].tolist():
            view[row] |= _NEAR_END
        self._watch(rows, starts, classes, now)
        if self.serial % _LEARN_EVERY == 0:
            self._learn(now)
        else:
            self.curves.go_on()
        return Seen(self.serial, now_s, keys, rows, starts, classes, num_known)

    def _use_few(
        self, known: NDArray[np.int64], kind: int, _num_told: int, now: int
    ) -> tuple[int, list[int], list[int]]:
        """One use more of rows that were known; the class of what was not, and the stretches.

        A stretch is of one class: where each starts, and which.
        """
        view, used, rows = self._state_view, self._used_view, known.tolist()
        gap = bisect_right(_GAPS_S, (now - used[rows[-1]]) / _TICKS)
        continued = (view[rows[-1]] & _NEAR_END) * _NUM_GAPS + gap
        first_class = (continued * _NUM_KINDS + kind) * _NUM_SIGHTS
        of_request, starts, classes, last = first_class << _CLS_SHIFT, [], [], -1
        for at, row in enumerate(rows):
            state = view[row]
            if state & _TRACKED:
                self.curves.finish(_class_in(state), (now - used[row]) / _TICKS)
            sights = state >> _SIGHTS_SHIFT
            view[row] = _NEXT_STATES[sights] + of_request
            by_sights = _NEXT_CLASSES[sights]
            if by_sights != last:
                starts.append(at)
                classes.append(first_class + by_sights)
                last = by_sights
        return first_class, starts, classes

    def _use_many(
        self, known: NDArray[np.int64], kind: int, num_told: int, now: int
    ) -> tuple[int, list[int], list[int]]:
        """The same, of many, or of a request that was told of before."""
        state, used = self._state[known], self._used_view
        if num_told:
            continued = _again(state[:num_told])
        else:
            last = int(known[-1])
            gap = bisect_right(_GAPS_S, (now - used[last]) / _TICKS)
            continued = (int(state[-1]) & _NEAR_END) * _NUM_GAPS + gap
        for i in (state & _TRACKED).nonzero()[0].tolist():
            age_s = (now - used[int(known[i])]) / _TICKS
            self.curves.finish(_class_in(int(state[i])), age_s)
        sights = state >> _SIGHTS_SHIFT
        by_sights = _NEXT_CLASS.take(sights)
        first_class = (continued * _NUM_KINDS + kind) * _NUM_SIGHTS
        starts = [0, *((by_sights[1:] != by_sights[:-1]).nonzero()[0] + 1).tolist()]
        classes = [first_class + int(by_sights[start]) for start in starts]
        state = _NEXT_STATE.take(sights)
        state += first_class << _CLS_SHIFT
        self._state[known] = state
        return first_class, starts, classes

    def _watch(
        self, rows: NDArray[np.int64], starts: Sequence[int], classes: Sequence[int], now: int
    ) -> None:
        """Of each class of a request, watch how long one prefix waits."""
        voted: set[int] = set()
        for i, start in enumerate(starts):
            if classes[i] in voted:
                continue
            voted.add(classes[i])
            stop = starts[i + 1] if i + 1 < len(starts) else len(rows)
            row = int(rows[start + int(self._random.random() * (stop - start))])
            self._state_view[row] |= _TRACKED
            slot = self._num_opened % _MAX_OPEN
            self._open_rows_view[slot] = row
            self._open_since_view[slot] = now
            self._num_opened += 1

    # --- rows ---------------------------------------------------------------------------------

    def _rows_of_few(self, prints: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """A row for each, and the number up to the deepest that was known.

        Shorter where all rows of a set are in use.
        """
        view, shift = self._prints_view, self._shift
        rows, absent = [], []
        for at, print_ in enumerate(prints):
            first = (print_ >> shift) * _WAYS
            ways = view[first : first + _WAYS].tolist()
            if print_ in ways:
                rows.append(first + ways.index(print_))
            else:
                rows.append(first)
                absent.append(at)
        if not absent:
            return np.array(rows), len(rows)
        num_known = _deepest(absent, len(rows))
        mine = set(rows[:num_known])
        if num_known + len(absent) > len(rows):
            mine = {row for at, row in enumerate(rows) if at not in absent}
        return self._give(np.array(rows), absent, prints, num_known, mine)

    def _rows_of_many(self, each: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """The same."""
        prints = np.array(each, np.uint64)
        if self._shift < _PRINT_BITS:
            sets = (prints >> np.uint64(self._shift)).view(np.int64)
        else:
            sets = np.zeros(len(prints), dtype=np.int64)
        match = self._sets.take(sets, axis=0) == prints[:, None]
        known = match.ravel().nonzero()[0]
        rows = sets * _WAYS
        if len(known) == len(rows):
            rows += known & (_WAYS - 1)
            return rows, len(rows)
        num_known = int(known[-1]) // _WAYS + 1 if len(known) else 0
        if num_known == len(known):
            rows[:num_known] += known & (_WAYS - 1)
            mine = set(rows[:num_known].tolist())
            return self._give(rows, range(num_known, len(rows)), prints, num_known, mine)
        at = known // _WAYS
        rows[at] += known & (_WAYS - 1)
        mine = set(rows[at].tolist())
        absent = np.delete(np.arange(len(rows)), at).tolist()
        return self._give(rows, absent, prints, num_known, mine)

    def _give(
        self,
        rows: NDArray[np.int64],
        absent: Sequence[int],
        prints: Sequence[int] | NDArray[np.uint64],
        num_known: int,
        mine: set[int],
    ) -> tuple[NDArray[np.int64], int]:
        """Rows for those at `absent`, for which `rows` has the first of the set.

        Args:
            rows: One a prefix; complete afterwards, or cut short.
            absent: Ascending.
            prints: An array, if there are many.
            num_known: Up to the deepest that was known.
            mine: The rows of those that were.
        """
        num_found = self._choose_rows(rows, absent, mine)
        if num_found < len(rows):
            rows, absent = rows[:num_found], absent[: bisect_left(absent, num_found)]
            num_known = min(num_found, num_known)
        if len(absent) <= _FEW or not isinstance(prints, np.ndarray):
            for at in absent:
                self._prints_view[int(rows[at])] = int(prints[at])
        else:
            there = slice(absent[0], len(rows)) if isinstance(absent, range) else absent
            self._prints[rows[there]] = prints[there]
        for at in absent:
            if at >= num_known:
                break
            self._state_view[int(rows[at])] = 0
        return rows, num_known

    def _choose_rows(self, rows: NDArray[np.int64], absent: Sequence[int], mine: set[int]) -> int:
        """Choose a row for each at `absent`, put into `rows`; up to where there was one."""
        if len(absent) > _FEW:
            there = slice(absent[0], None) if isinstance(absent, range) else list(absent)
            firsts = rows[there]
            chosen = firsts + self._used_sets.take(firsts // _WAYS, axis=0).argmin(axis=1)
            each, is_needed = chosen.tolist(), self._are_needed(chosen)
            if len(set(each)) == len(each) and mine.isdisjoint(each) and not is_needed.any():
                rows[there] = chosen
                return len(rows)
            is_taken = [row in mine for row in each] | is_needed
            is_taken[_repeated(each)] = True
            firsts = firsts[is_taken]
            rows[there] = chosen
            absent = np.array(absent)[is_taken].tolist()
            rows[absent] = firsts
            mine.update(np.array(each)[~is_taken].tolist())
        for at in absent:
            row = self._spare_row(int(rows[at]), mine)
            if row < 0:
                return at
            mine.add(row)
            rows[at] = row
        return len(rows)

    def _are_needed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        if not self.in_use:
            return np.zeros(len(rows), dtype=bool)
        needed = self.in_use[0].are_needed(rows)
        for in_use in self.in_use[1:]:
            needed |= in_use.are_needed(rows)
        return needed

    def _spare_row(self, first: int, mine: set[int]) -> int:
        """The longest unused row of a set that nobody needs, nor is in `mine`; else -1."""
        ways = self._used_view[first : first + _WAYS].tolist()
        row = first + ways.index(min(ways))
        if self._is_spare(row, mine):
            return row
        by_use = sorted(range(_WAYS), key=ways.__getitem__)
        return next((first + way for way in by_use if self._is_spare(first + way, mine)), -1)

    def _is_spare(self, row: int, mine: set[int]) -> bool:
        return row not in mine and not any(each.is_needed(row) for each in self.in_use)

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


def _class_in(state: int) -> int:
    return state >> _CLS_SHIFT & (NUM_CLASSES - 1)


def _distinct(keys: Sequence[ChunkKey], prints: Sequence[int]) -> tuple[list[ChunkKey], list[int]]:
    """Of those that cannot be told apart the first one counts; 0 is no fingerprint."""
    first: dict[int, ChunkKey] = {}
    for print_, key in zip(prints, keys, strict=True):
        first.setdefault(print_ or 1, key)
    return list(first.values()), list(first)


def _deepest(absent: Sequence[int], num: int) -> int:
    """One more than the greatest position below `num` that is not in `absent`; or 0."""
    for at in reversed(absent):
        if at != num - 1:
            break
        num = at
    return num


def _repeated(rows: Sequence[int]) -> list[int]:
    """Positions of those that were there before."""
    before: set[int] = set()
    again: list[int] = []
    for at, row in enumerate(rows):
        if row in before:
            again.append(at)
        before.add(row)
    return again


def _again(state: NDArray[np.uint16]) -> int:
    """What a request was seen to have before, it has again: not used twice, nor waited for since.

    Returns:
        Of its class, what it continued, and after how long.
    """
    cls = int(state[-1]) >> _CLS_SHIFT & (NUM_CLASSES - 1)
    state &= ~np.uint16(_TRACKED)
    state -= np.minimum(state >> _SIGHTS_SHIFT, 1) << _SIGHTS_SHIFT
    return cls // (_NUM_KINDS * _NUM_SIGHTS)
