"""Whether a prefix is read from lower levels, or computed since that is quicker.

What reading takes follows from what a level's movers saw lately and have to do already; what
computing takes the engine's adapter tells. As long as either is not known everything is read. Time
counts as its user sees it: until the request's prompt is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from undercroft.hierarchy.cut import common_end, from_root
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.request import Answer, Request, Walk
from undercroft.keys import ChunkKey

__all__ = ["PROBE_CHUNKS", "Worth"]

PROBE_CHUNKS = 5
"""Read in vain now and then from a level that is too slow, to see whether it still is: enough for
the median of its last reads to move."""
_LEAST_PROBE_INTERVAL_S, _MOST_PROBE_INTERVAL_S = 5.0, 60.0
_PROBE_SHARE = 0.1
"""Of a slow level's time, what probes may take up."""
_MAX_ENDS = 64
"""Places to cut at that are weighed, however long a prefix is."""


def _not_known(_begin: int, _end: int) -> float | None:
    return None


@dataclass(slots=True)
class _Reads:
    """What would be read from one level."""

    level: Level
    s_per_byte: float
    num_bytes: int = 0
    largest: int = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.largest = max(self.largest, num_bytes)

    @property
    def seconds(self) -> float:
        """Behind what is queued already, by all threads; no less than one chunk takes."""
        transfers = self.level.transfers
        in_all = self.num_bytes + transfers.queued_read_bytes
        return self.s_per_byte * max(in_all / transfers.num_threads, self.largest)


@dataclass(slots=True)
class _Bill:
    """The reads of a restore, as far as their levels' speeds are known."""

    level_of: Callable[[ChunkKey], Level | None]
    bytes_of: Callable[[ChunkKey], int]
    reads: dict[str, _Reads] = field(default_factory=dict)

    def add(self, key: ChunkKey) -> None:
        level = self.level_of(key)
        if level is None:
            return
        reads = self.reads.get(level.name)
        if reads is None:
            s_per_byte = level.transfers.speeds.read_s_per_byte
            reads = self.reads[level.name] = _Reads(level, s_per_byte or 0.0)
        reads.add(self.bytes_of(key))

    @property
    def seconds(self) -> float:
        """Levels are read at the same time."""
        return max((reads.seconds for reads in self.reads.values()), default=0.0)


class Worth:
    """Decides how much of a prefix is worth reading. Threads: the scheduler's.

    Args:
        margin: Reading is given up if it takes so many times longer than computing; None: never.
        level_of: The level that a key's chunk is, or is being, read from.
        bytes_of: What a read of that key moves.

    Cost: O(1) if the levels are quick, or nothing is known; else O(keys), once a request.
    """

    def __init__(
        self,
        margin: float | None,
        *,
        level_of: Callable[[ChunkKey], Level | None],
        bytes_of: Callable[[ChunkKey], int],
    ) -> None:
        self._margin = margin
        self._level_of = level_of
        self._bytes_of = bytes_of
        self._probe_at_s: dict[str, float] = {}
        self.compute_s: Callable[[int, int], float | None] = _not_known
        """Seconds that the engine needs for the tokens of a prompt from one position to another;
        None: not known. The engine's adapter puts its own here."""

    def end_of(self, request: Request, num_bytes: int, levels: list[Level]) -> int | None:
        """The token at which to cut what `request` would read; 0: read nothing. None: no cut.

        Args:
            request: Its walks of this step, common end and all.
            num_bytes: What it would read.
            levels: Those it may read from.
        """
        margin = self._margin
        speeds = [level.transfers.speeds.read_s_per_byte for level in levels]
        if margin is None or not any(speeds):
            return None
        walks = list(request.walks.values())
        roots = [walk for walk in walks if from_root(walk, request.position_of)]
        end = common_end(request)
        if end is None or self.compute_s(0, end) is None:
            return None
        begin = min((_begin(walk, request) for walk in roots), default=0)
        if len(walks) == len(roots) == 1:
            most_s = max(
                _Reads(level, speed or 0.0, num_bytes, num_bytes).seconds
                for level, speed in zip(levels, speeds, strict=True)
            )
            if most_s <= margin * (self.compute_s(_first_missing(walks[0], request), end) or 0.0):
                return None
        best = self._best(request, roots, begin, end)
        return None if best >= end else best

    def _best(self, request: Request, roots: list[Walk], begin: int, end: int) -> int:
        """Where the time to read up to there, and compute the rest, is least."""
        bill = _Bill(self._level_of, self._bytes_of)
        for walk in request.walks.values():
            if walk not in roots:
                for i in walk.usable(request.position_of):
                    if walk.answers[i] != Answer.HIT:
                        bill.add(walk.keys[i])
        if not roots:
            return end if self._balance(bill, begin, end) <= 0 else 0
        best, least = 0, 0.0
        events = _events(request, roots)
        stride, last = max(1, len(events) // _MAX_ENDS), len(events) - 1
        for index, (position, key, answer) in enumerate(events):
            if answer != Answer.HIT:
                bill.add(key)
            is_edge = index == last or events[index + 1][2] != answer
            if is_edge or not index % stride:
                balance = self._balance(bill, begin, min(position, end))
                if balance <= least:
                    best, least = min(position, end), balance
        return best

    def _balance(self, bill: _Bill, begin: int, end: int) -> float:
        """Seconds to read, less those to compute as often as the margin says."""
        return bill.seconds - (self._margin or 1.0) * (self.compute_s(begin, end) or 0.0)

    def probes(self, level: Level, largest: int, now_s: float) -> bool:
        """Whether it is time to read a little from a level that is too slow."""
        transfers = level.transfers
        if transfers.queued_read_bytes or now_s < self._probe_at_s.get(level.name, now_s):
            return False
        takes_s = PROBE_CHUNKS * largest * (transfers.speeds.read_s_per_byte or 0.0)
        pause_s = min(_MOST_PROBE_INTERVAL_S, takes_s / transfers.num_threads / _PROBE_SHARE)
        self._probe_at_s[level.name] = now_s + max(_LEAST_PROBE_INTERVAL_S, pause_s)
        return True


def _events(request: Request, roots: list[Walk]) -> list[tuple[int, ChunkKey, int]]:
    """Position, key and answer of what walks from the root may end in, by position."""
    position_of = request.position_of
    events = [
        (position_of(walk.keys[i]) or 0, walk.keys[i], walk.answers[i])
        for walk in roots
        for i in walk.usable(position_of)
    ]
    if len(roots) > 1:
        events.sort(key=lambda event: event[0])
    return events


def _begin(walk: Walk, request: Request) -> int:
    """The token at which a walk from the root began."""
    first, second = (request.position_of(key) or 0 for key in walk.keys[:2])
    return max(0, 2 * first - second)


def _first_missing(walk: Walk, request: Request) -> int:
    """The token up to which level 0 has all that a walk from the root asked for."""
    num_hits = len(walk.answers) - len(walk.answers.lstrip(bytes([Answer.HIT])))
    if not num_hits:
        return _begin(walk, request)
    return request.position_of(walk.keys[num_hits - 1]) or 0
