"""Hierarchies over real memory and real tiers, put together for tests."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from undercroft.admission.always import Always
from undercroft.clock import Clock, SystemClock
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.hierarchy import Hierarchy, Limits
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots, SlotState
from undercroft.hierarchy.transfers import Transfers
from undercroft.keys import ChunkKey
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.lru import Lru
from undercroft.testing.mini_engine import MiniEngine
from undercroft.tiers.base import Tier

CHUNK_BYTES = 4096


@dataclass
class World:
    hierarchy: Hierarchy
    engine: MiniEngine

    @property
    def counters(self) -> Counters:
        return self.hierarchy.counters

    def assert_quiet(self) -> None:
        """After everything ended: nothing pinned, nothing filling, nothing draining."""
        slots = self.hierarchy.pool.slots
        assert slots.num_pinned == sum(1 for pins in slots.pins if pins) == 0
        states = {slots.states[slot] for slot in slots.taken()}
        assert states <= {SlotState.READY}, f"slots left in states {states}"
        assert len(slots.taken()) == len(self.hierarchy.pool.table)

    def close(self) -> None:
        self.hierarchy.close()


def make_world(
    num_slots: int,
    tiers: Sequence[Tier] = (),
    *,
    slot_bytes: Sequence[int] = (CHUNK_BYTES,),
    class_of: Callable[[ChunkKey], int] = lambda _key: 0,
    clock: Clock | None = None,
    limits: Limits | None = None,
    make_policy: Callable[[int], EvictionPolicy] = Lru,
    between_steps: Callable[[], None] | None = None,
    events: bool = True,
    num_threads: int = 2,
) -> World:
    clock = clock or SystemClock()
    counters = Counters()
    log = LevelEvents(enabled=events)
    total = num_slots * sum(slot_bytes)
    slots = Slots(total, slot_bytes)
    slots.set_ready_bytes(total)
    levels = [
        Level(
            tier,
            transfers=Transfers(
                tier, clock=clock, num_threads=num_threads, max_queued_write_bytes=1 << 30
            ),
            slot_bytes=slot_bytes,
            class_of=class_of,
            make_policy=make_policy,
            admission=Always(),
            clock=clock,
            counters=counters,
            events=log,
            write_deadline_s=10.0,
        )
        for tier in tiers
    ]
    hierarchy = Hierarchy(
        lambda on_evict: Pool(slots, make_policy=make_policy, class_of=class_of, on_evict=on_evict),
        levels,
        buffer=memoryview(mmap.mmap(-1, total)),
        clock=clock,
        counters=counters,
        events=log,
        limits=limits or Limits(),
    )
    engine = MiniEngine(hierarchy, between_steps or (lambda: time.sleep(0.003)))
    return World(hierarchy, engine)
