"""The end of a hierarchy: each level gets its share of the time, whatever another does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from undercroft.clock import Clock
from undercroft.hierarchy.cascade import Cascade
from undercroft.hierarchy.level import Level

__all__ = ["close_level", "flush"]

_TURN_S = 0.1


def flush(
    cascade: Cascade,
    levels: Sequence[Level],
    *,
    book: Callable[[], None],
    deadline_s: float,
    clock: Clock,
) -> None:
    """Give chunks that are not yet copied down a last chance, in all levels at once.

    Blocks, up to `deadline_s`. A level that hangs is waited for in turns, between which the others
    get more to write.

    Args:
        cascade: What waits.
        levels: Those that may still be written to.
        book: Books what the movers have done.
        deadline_s: When to be back.
        clock: Of `deadline_s`.
    """
    has_more = len(cascade) > 0
    while has_more and (left_s := deadline_s - clock.now_s()) > 0:
        cascade.submit()
        hopeful = [level for level in levels if level.usable]
        turn_s = min(left_s, _TURN_S) / max(1, len(hopeful))
        is_done = [level.transfers.drain(clock.now_s() + turn_s) for level in hopeful]
        book()
        has_more = not all(is_done) or any(map(cascade.can_go_on_to, hopeful))


def close_level(level: Level, num_left: int, deadline_s: float, clock: Clock) -> None:
    """Close one of `num_left` levels in its share of the time until `deadline_s`. Blocks."""
    now_s = clock.now_s()
    level.close(now_s + max(0.0, deadline_s - now_s) / num_left)
