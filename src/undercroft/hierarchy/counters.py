"""What happened, as plain integers. One owner: the hierarchy; read by the adapter's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from undercroft.hierarchy.history import Note, note_nothing

__all__ = ["Counters"]


@dataclass
class Counters:
    """Totals since start. Keys of the `Counter`s are reasons or level names, unless it is said."""

    lookup_hits: int = 0
    lookup_pending: int = 0
    lookup_misses: Counter[str] = field(default_factory=Counter)
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
    resets: int = 0
    broken_invariants: int = 0

    def __post_init__(self) -> None:
        self.note: Note = note_nothing
        """Told of single chunks, for `undercroft explain`; does nothing unless a history is kept.
        Not a field: it is no number."""
