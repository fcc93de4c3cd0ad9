"""A hierarchy of host memory and one tier, as two of the cases need it."""

from __future__ import annotations

from undercroft.admission.always import Always
from undercroft.clock import SystemClock
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.hierarchy import Hierarchy, Limits
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots
from undercroft.hierarchy.transfers import Transfers
from undercroft.policies.lru import Lru
from undercroft.tiers.base import Tier


def hierarchy_over(
    tier: Tier,
    buffer: memoryview,
    chunk_bytes: int,
    *,
    max_queued_write_bytes: int,
    limits: Limits,
) -> Hierarchy:
    """Level 0 is all of `buffer`; chunks of one size, LRU, everything admitted."""
    clock, counters = SystemClock(), Counters()
    events = LevelEvents(enabled=False)
    slots = Slots(len(buffer), [chunk_bytes])
    slots.set_ready_bytes(len(buffer))
    level = Level(
        tier,
        transfers=Transfers(tier, clock=clock, max_queued_write_bytes=max_queued_write_bytes),
        slot_bytes=(chunk_bytes,),
        class_of=lambda _: 0,
        make_policy=Lru,
        admission=Always(),
        clock=clock,
        counters=counters,
        events=events,
        write_deadline_s=30.0,
    )
    return Hierarchy(
        lambda on_evict: Pool(slots, make_policy=Lru, class_of=lambda _: 0, on_evict=on_evict),
        [level],
        buffer=buffer,
        clock=clock,
        counters=counters,
        events=events,
        limits=limits,
    )
