"""Days of prompts and a level that keeps what it is given, for tests of who gets in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from undercroft.admission.base import Admission, Observing
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock

CHUNK_BYTES = 1 << 20
PROMPT_CHUNKS = 8
DAY_S = 86_400.0


def prompt(number: int) -> list[ChunkKey]:
    """The keys of a prompt, root first."""
    return [
        ChunkKey(number.to_bytes(8, "big") + index.to_bytes(4, "big"))
        for index in range(PROMPT_CHUNKS)
    ]


def make_requests(
    num_days: float, seed: int, *, every_s: float = 30.0, one_off_ratio: float = 0.6
) -> Iterator[tuple[float, Sequence[ChunkKey]]]:
    """Times and prompts: one-offs, and some that return two hours later on average, ten times."""
    random = Random(seed)
    due: list[tuple[float, int]] = []
    now_s, number = 0.0, 0
    while now_s < num_days * DAY_S:
        now_s += random.expovariate(1 / every_s)
        while due and due[0][0] < now_s:
            at_s, which = due.pop(0)
            yield at_s, prompt(which)
            if random.random() < 0.9:
                due.append((at_s + random.expovariate(1 / 7200.0), which))
                due.sort()
        number += 1
        yield now_s, prompt(number)
        if random.random() >= one_off_ratio:
            due.append((now_s + random.expovariate(1 / 7200.0), number))
            due.sort()


@dataclass
class Shelf:
    """A level without an end: it keeps what was let in, and counts."""

    admission: Admission
    clock: ManualClock
    kept: set[ChunkKey] = field(default_factory=set)
    writes: list[tuple[float, int]] = field(default_factory=list)
    by_hour: Counter[int] = field(default_factory=Counter)
    num_hits: int = 0
    num_chunks: int = 0

    def serve(self, at_s: float, keys: Sequence[ChunkKey], *, may_write: int = 1 << 62) -> None:
        """One request: what is there from the root on is a hit; the rest is offered."""
        self.clock.advance(at_s - self.clock.now_s())
        self.num_chunks += len(keys)
        self.num_hits += next((i for i, k in enumerate(keys) if k not in self.kept), len(keys))
        observing = self.admission if isinstance(self.admission, Observing) else None
        if observing is not None:
            observing.on_begin()
        for key in keys:
            if key in self.kept:
                if observing is not None:
                    observing.on_use(key)
            elif self.admission.admit(key, CHUNK_BYTES) and self.written_since(at_s) < may_write:
                self.kept.add(key)
                self.writes.append((at_s, CHUNK_BYTES))
                self.by_hour[int(at_s // 3600)] += CHUNK_BYTES

    def written_since(self, now_s: float) -> int:
        """Bytes in the clock hour of `now_s` and the 24 before it."""
        hour = int(now_s // 3600)
        return sum(self.by_hour[each] for each in range(hour - 24, hour + 1))

    @property
    def hit_ratio(self) -> float:
        return self.num_hits / self.num_chunks


def worst_day(writes: Sequence[tuple[float, int]]) -> int:
    """The most bytes that any 24 hours saw."""
    worst = total = first = 0
    for at_s, num_bytes in writes:
        total += num_bytes
        while writes[first][0] <= at_s - DAY_S:
            total -= writes[first][1]
            first += 1
        worst = max(worst, total)
    return worst
