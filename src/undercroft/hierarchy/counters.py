"""What happened, as plain numbers. One owner: the hierarchy; read by the adapter's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from undercroft.hierarchy.history import Note, note_nothing

__all__ = ["NO_LEVEL", "Counters", "Samples"]

NO_LEVEL = "none"
"""Stands for a level where a miss is the fault of none: nobody has the chunk."""

_MAX_KEPT = 64
"""Of one label between two calls of `take`; what metrics cost does not depend on the load."""


class Samples:
    """Durations of one kind, for a histogram; of many, a part that is spread evenly.

    Every n-th is kept, with n doubled each time there are `_MAX_KEPT`, so that neither the first
    nor the last of a burst, which wait least and most, count for more than the others.

    Threads: one (the scheduler's). Cost: a `see` 0.1 us in a loop, some 0.4 us between
    other work.
    """

    __slots__ = ("_by_label",)

    def __init__(self) -> None:
        self._by_label: dict[str, _Kept] = {}

    def see(self, seconds: float, label: str = "") -> None:
        """Something took `seconds`, at the level of that name if it has one."""
        kept = self._by_label.get(label)
        if kept is None:
            kept = self._by_label[label] = _Kept()
        if kept.num_to_skip:
            kept.num_to_skip -= 1
            return
        kept.seconds.append(seconds)
        kept.num_to_skip = kept.stride - 1
        if len(kept.seconds) == _MAX_KEPT:
            del kept.seconds[1::2]
            kept.stride *= 2

    def take(self) -> dict[str, list[float]]:
        """What was kept since the last call, by label."""
        kept, self._by_label = self._by_label, {}
        return {label: each.seconds for label, each in kept.items()}


class _Kept:
    __slots__ = ("num_to_skip", "seconds", "stride")

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.stride = 1
        self.num_to_skip = 0


@dataclass
class Counters:
    """Totals since start. Keys of the `Counter`s are reasons or level names, unless it is said."""

    lookup_hits: int = 0
    lookup_pending: int = 0
    lookup_misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (level, reason); the level is `NO_LEVEL` for what none has."""
    hit_chunks: Counter[str] = field(default_factory=Counter)
    """Chunks that requests went on to load, by the level they came from."""
    hit_tokens: Counter[str] = field(default_factory=Counter)
    saved_prefill_seconds: dict[str, float] = field(default_factory=dict)
    """An estimate, by level."""
    stored_chunks: int = 0
    stored_bytes: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    declined_chunks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (level, reason)."""
    promoted_chunks: Counter[str] = field(default_factory=Counter)
    promoted_bytes: Counter[str] = field(default_factory=Counter)
    cascaded_chunks: Counter[str] = field(default_factory=Counter)
    cascaded_bytes: Counter[str] = field(default_factory=Counter)
    evicted_chunks: Counter[str] = field(default_factory=Counter)
    dropped_chunks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (level, reason)."""
    skipped_restores: Counter[str] = field(default_factory=Counter)
    """Restores given up, or cut, since computing was predicted to be quicker; by level."""
    requests: Counter[str] = field(default_factory=Counter)
    """That began to run, by what became of their lookups."""
    self_check_warnings: Counter[str] = field(default_factory=Counter)
    """By cause."""
    recorded_requests: Counter[str] = field(default_factory=Counter)
    """By what became of them: of a recorder, if there is one, and partly of its thread."""
    resets: int = 0
    broken_invariants: int = 0
    store_seconds: Samples = field(default_factory=Samples, compare=False)
    load_seconds: Samples = field(default_factory=Samples, compare=False)
    restore_wait_seconds: Samples = field(default_factory=Samples, compare=False)
    promote_seconds: Samples = field(default_factory=Samples, compare=False)
    """By level."""
    cascade_seconds: Samples = field(default_factory=Samples, compare=False)
    """By level."""

    def __post_init__(self) -> None:
        self.note: Note = note_nothing
        """Told of single chunks, for `undercroft explain`; does nothing unless a history is kept.
        Not a field: it is no number."""
