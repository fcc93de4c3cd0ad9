"""What the engine could not be given although a lookup said HIT.

Nobody knows whether the slot or the way to the engine is at fault, so the chunk is dropped from
level 0: the next lookup finds it in a lower level, or misses. Lower levels keep theirs: what they
read is verified.
"""

from __future__ import annotations

from collections.abc import Container

from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.fresh import Fresh
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.stores import LEVEL_0

__all__ = ["drop_failed"]


def drop_failed(
    request: Request,
    offsets: Container[int],
    pool: Pool,
    fresh: Fresh,
    told: tuple[Counters, LevelEvents],
) -> int:
    """Drop the chunks of `request`'s load whose slots begin at `offsets`.

    Returns:
        How many chunks of the load failed. Those that left level 0 by this, and not in a reset
        meanwhile, are counted, and there is an event for each.
    """
    counters, events = told
    failed = [
        (key, slot) for key, slot in request.loading.items() if pool.slots.offset(slot) in offsets
    ]
    fresh.discard({slot for _key, slot in failed})
    for key, slot in failed:
        del request.loading[key]
        request.loaded.pop(key, None)
        if pool.find(key) == slot:
            pool.void(key, slot)
            counters.dropped_chunks[LEVEL_0, "load_failed"] += 1
            events.add(LEVEL_0, key, removed=True)
        pool.unpin(slot)
    return len(failed)
