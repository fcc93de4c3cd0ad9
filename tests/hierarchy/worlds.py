"""Hierarchies over real memory and real tiers, put together for tests."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from undercroft.admission.always import Always
from undercroft.admission.base import Admission
from undercroft.clock import Clock, SystemClock
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.hierarchy import Hierarchy, Limits
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.moves import Move
from undercroft.hierarchy.outcome import Done
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots, SlotState
from undercroft.hierarchy.transfers import TransferLimits, Transfers
from undercroft.keys import ChunkKey
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.lru import Lru
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import FaultyTier
from undercroft.testing.mini_engine import MiniEngine, chunk_key
from undercroft.tiers.base import Tier
from undercroft.tiers.wrapping import WrappingTier

CHUNK_BYTES = 4096


def num_held_up(level: Level) -> int:
    """Calls that hang in the level's tier until a test lets them go."""
    tier, num_hung = level.tier, 0
    while isinstance(tier, WrappingTier):
        num_hung += tier.num_hung if isinstance(tier, FaultyTier) else 0
        tier = tier.inner
    return num_hung


class Pause:
    """Between the steps of an engine: a moment, and a longer one when for many steps movers that
    have something to do have not got on.

    So a bound on steps is none on the time that a busy machine takes to run the movers.
    """

    NUM_SHORT = 100

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._seen: list[tuple[int, int]] = []
        self._num_same = 0

    def __call__(self, levels: Sequence[Level]) -> None:
        seen = [(len(level.transfers._moves), level.transfers.num_running) for level in levels]
        could_go_on = any(
            num_moves and (num_running > num_held_up(level) or not num_running)
            for level, (num_moves, num_running) in zip(levels, seen, strict=True)
        )
        self._num_same = self._num_same + 1 if could_go_on and seen == self._seen else 0
        self._seen = seen
        time.sleep(self._moment_s if self._num_same < self.NUM_SHORT else 0.05)


class CountedTransfers(Transfers):
    """Transfers that know which tickets are open, and fail when one is reported twice."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.open: set[int] = set()
        self.late: set[int] = set()

    def _submit(self, move: Move) -> int:
        ticket = super()._submit(move)
        assert ticket not in self.open
        self.open.add(ticket)
        return ticket

    def poll(self, max_outcomes: int = 1024) -> list[Done]:
        done = super().poll(max_outcomes)
        for each in done:
            self.open.remove(each.ticket)
            if not each.buffer_free:
                self.late.add(each.ticket)
        return done

    def take_released(self) -> list[int]:
        released = super().take_released()
        for ticket in released:
            self.late.remove(ticket)
        return released


@dataclass
class World:
    hierarchy: Hierarchy
    engine: MiniEngine
    clock: Clock

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

    def wait_for_tiers(self) -> None:
        """Until the movers have nothing left to do."""
        for level in self.hierarchy.levels:
            level.transfers.drain(level.transfers._clock.now_s() + 60.0)

    def close(self) -> None:
        """Hung calls are let go, and a manual clock runs on."""
        for level in self.hierarchy.levels:
            tier = level.tier
            while isinstance(tier, WrappingTier):
                if isinstance(tier, FaultyTier):
                    tier.release()
                tier = tier.inner
        closer = threading.Thread(target=self.hierarchy.close)
        closer.start()
        while closer.is_alive():
            if isinstance(self.clock, ManualClock):
                self.clock.advance(0.5)
            closer.join(0.005)


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
    max_queued_write_bytes: int = 1 << 30,
    transfer_limits: TransferLimits | None = None,
    write_deadline_s: float = 10.0,
    write_rate_bytes: int | None = None,
    ready_bytes: int | None = None,
    admission: Admission | None = None,
    host_admission: Admission | None = None,
    take_failed_stores: Callable[[], frozenset[int] | None] = frozenset,
) -> World:
    # By the system's clock a busy machine must make nothing late; tests of that move the time.
    patient = Limits(promote_deadline_s=60.0, drain_deadline_s=20.0, shutdown_deadline_s=20.0)
    limits = limits or (Limits() if clock else patient)
    clock = clock or SystemClock()
    counters = Counters()
    log = LevelEvents(enabled=events)
    total = num_slots * sum(slot_bytes)
    slots = Slots(total, slot_bytes)
    slots.set_ready_bytes(total if ready_bytes is None else ready_bytes)
    levels = [
        Level(
            tier,
            transfers=CountedTransfers(
                tier,
                clock=clock,
                num_threads=num_threads,
                max_queued_write_bytes=max_queued_write_bytes,
                limits=transfer_limits,
            ),
            slot_bytes=slot_bytes,
            class_of=class_of,
            make_policy=make_policy,
            admission=admission or Always(),
            clock=clock,
            counters=counters,
            events=log,
            write_deadline_s=write_deadline_s,
            write_rate_bytes=write_rate_bytes,
        )
        for tier in tiers
    ]
    hierarchy = Hierarchy(
        lambda on_evict: Pool(
            slots,
            make_policy=make_policy,
            class_of=class_of,
            on_evict=on_evict,
            admission=host_admission,
        ),
        levels,
        buffer=memoryview(mmap.mmap(-1, total)),
        clock=clock,
        counters=counters,
        events=log,
        limits=limits,
        take_failed_stores=take_failed_stores,
    )
    pause = Pause(0.003)
    engine = MiniEngine(hierarchy, between_steps or (lambda: pause(levels)))
    return World(hierarchy, engine, clock)


def made_worlds() -> Iterator[list[World]]:
    """For a fixture: a list whose worlds are closed at the end."""
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def keys_of(label: str, count: int) -> list[ChunkKey]:
    """So many keys; the same label gives the same."""
    return [chunk_key(f"{label}{i}") for i in range(count)]
