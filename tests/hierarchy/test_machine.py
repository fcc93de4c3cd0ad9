"""The hierarchy against whatever an engine, its clients, tiers and replicas do, in any order."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.hierarchy.invariants import check_all, check_quiet
from tests.hierarchy.worlds import World, make_world

from undercroft.errors import TierFull
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.hierarchy.waits import MOST_DEADLINES
from undercroft.keys import ChunkKey
from undercroft.policies.arc import Arc
from undercroft.policies.hazard import Hazard
from undercroft.policies.lru import Lru
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector
from undercroft.testing.machines import Group, GroupEngine, Job
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

DEADLINE_S = 2.0
LONGEST_ADVANCE_S = 3.0
OTHERS = ("other replica", "other replica, new weights")
LARGE, SMALL = 8192, 4096
PROMPTS = ["a" * 16, "a" * 8 + "b" * 8, "d" * 16, "e" * 16, "a" * 12 + "f" * 4, "g" * 16]
ONE_GROUP = (Group(0, 1),)
THREE_GROUPS = (Group(0, 2), Group(3, 2, window=2), Group(7, 4, window=1))


def class_of_group(key: ChunkKey) -> int:
    return 0 if key[-1] == 0 else 1


EFFECTS = [effect for effect in Effect if effect is not Effect.KILLED]
"""A process that is killed has no hierarchy to look at."""


@dataclass
class Below:
    """One lower tier and its faults."""

    memory: MemoryTier
    faulty: FaultyTier
    tier: Checked
    injectors: dict[Effect, Injector]


def make_below(name: str, capacity_bytes: int, clock: ManualClock) -> Below:
    injectors = {effect: Injector(effect, seconds=1.5) for effect in EFFECTS}
    for injector in injectors.values():
        injector.active = False
    memory = MemoryTier(capacity_bytes, name=name)
    faulty = FaultyTier(memory, *injectors.values(), clock=clock)
    return Below(memory, faulty, Checked(faulty), injectors)


def fill(below: Below, groups: tuple[Group, ...]) -> None:
    with suppress(TierFull):
        for prompt in PROMPTS[:3]:
            for group in groups:
                for key in group.keys(prompt):
                    size = SMALL if group.id else LARGE
                    below.tier.write_from(key, memoryview(content_of(key, size)))


class HierarchyMachine(RuleBasedStateMachine):
    world: World
    usual: Effect | None = None

    @initialize(
        groups=st.sampled_from([ONE_GROUP, THREE_GROUPS]),
        num_tiers=st.sampled_from([1, 2, 0]),
        num_slots=st.sampled_from([12, 6, 20, 4]),
        tier_chunks=st.sampled_from([200, 40, 16]),
        policy=st.sampled_from([Lru, Arc, Hazard]),
        num_threads=st.integers(1, 2),
        share=st.sampled_from([1.0, 0.5]),
        ready=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def build(  # noqa: PLR0917 - drawn
        self, groups, num_tiers, num_slots, tier_chunks, policy, num_threads, share, ready
    ) -> None:
        self.clock = ManualClock()
        names = ["near", "far"][:num_tiers]
        self.below = [
            make_below(n, tier_chunks * (LARGE + Checked.overhead_bytes), self.clock) for n in names
        ]
        many = len(groups) > 1
        for below in self.below:  # as after a restart
            fill(below, groups)
        sizes = (LARGE, SMALL) if many else (LARGE,)
        self.num_grown = self.num_steps = 0
        self.world = make_world(
            num_slots,
            [below.tier for below in self.below],
            slot_bytes=sizes,
            class_of=class_of_group if many else lambda _key: 0,
            clock=self.clock,
            limits=Limits(
                promote_deadline_s=DEADLINE_S,
                drain_deadline_s=0.02,
                restore_share_ratio=share,
                max_cascade_waiting=12,
            ),
            make_policy=policy,
            num_threads=num_threads,
            transfer_limits=TransferLimits(
                retry_pause_s=0.25, failures_to_open=3, first_pause_s=1.0, max_pause_s=4.0
            ),
            write_deadline_s=4.0,
            ready_bytes=int(num_slots * sum(sizes) * ready),
            take_failed_stores=self.failed_stores,
        )
        self.hierarchy = self.world.hierarchy
        if self.below and self.usual is not None:
            self.below[0].injectors[self.usual].active = True
        self.engine = GroupEngine(self.hierarchy, groups, self.clock.now_s)

    def failed_stores(self) -> frozenset[int] | None:
        return self.engine.take_failed_stores()

    # --- helpers ------------------------------------------------------------------------------

    def let_movers_run(self) -> None:
        """Until every mover is idle, hung, or waits for the clock; so that runs repeat."""
        for _ in range(1000):
            if all(self._at_rest(level) for level in self.hierarchy.levels):
                return
            time.sleep(0.001)

    def _at_rest(self, level) -> bool:
        transfers = level.transfers
        held_up = sum(below.faulty.num_hung for below in self.below) + self.clock._num_sleepers()
        if transfers.num_running:
            return transfers.num_running <= held_up
        return not transfers._queue and level.voider.is_over

    def chosen(self, mask: int, job: Job) -> bool:
        return (
            bool(mask >> self.engine.jobs.index(job) % 4 & 1) if job in self.engine.jobs else True
        )

    # --- rules --------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.sampled_from([16, 9, 6]),
        more=st.sampled_from(PROMPTS),
    )
    def submit(self, prompt: str, length: int, more: str) -> None:
        for tokens in (prompt[:length], more):
            if len(self.engine.waiting) < 6:
                self.engine.submit(tokens)

    def one_step(self, copied: int, acknowledged: int, **how) -> None:
        """As in vLLM, what was begun in a step is copied in a later one."""
        self.num_steps += 1
        older = list(self.engine.jobs)
        self.engine.schedule(**how)
        for entry in self.engine.waiting:
            if entry.waits_since_s is not None:
                assert entry.request.deadline_s is not None, "waits without a deadline"
        self.engine.work(lambda job: job in older and self.chosen(copied, job))
        self.engine.acknowledge(partial(self.chosen, acknowledged))
        check_all(self.hierarchy)
        self.let_movers_run()

    @rule(
        copied=st.sampled_from([15, 15, 0, 5, 10]),
        acknowledged=st.sampled_from([15, 15, 0, 3, 12]),
        blocked=st.sampled_from([False, False, False, True]),
        fails=st.sampled_from([False, False, False, True]),
        num_tokens=st.sampled_from([2, 5, 16]),
        num_steps=st.integers(1, 3),
    )
    def step(self, copied, acknowledged, blocked, fails, num_tokens, num_steps) -> None:
        for _ in range(num_steps):
            self.one_step(copied, acknowledged, blocked=blocked, num_tokens=num_tokens, fails=fails)

    @rule(num_steps=st.integers(1, 5))
    def step_freely(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.one_step(15, 15)

    @rule(seconds=st.sampled_from([0.1, 1.0, LONGEST_ADVANCE_S, LONGEST_ADVANCE_S]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.let_movers_run()
        self.one_step(0, 0, blocked=True)  # nobody is asked less often than this

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        entries = self.engine.waiting + self.engine.running
        if entries:
            self.engine.abort(entries[which % len(entries)])

    @rule(kind=st.sampled_from(["same weights", "new weights", *OTHERS, "lost", "grow"]))
    def upset(self, kind: str) -> None:
        if kind not in {"lost", "grow"}:
            # Seldom, or there is never anything to lose.
            if self.num_steps < 12:
                return
            self.num_steps = 0
        if kind in OTHERS:
            for below in self.below:
                below.memory.raise_epoch()
            self.engine.version += bool(self.below) and kind == "other replica, new weights"
        elif kind == "lost":
            self.engine.failed_stores = None
        elif kind == "grow":
            self.num_grown += 1
            ready_bytes = len(self.hierarchy._buffer) * self.num_grown // 2
            self.hierarchy.pool.slots.set_ready_bytes(ready_bytes)
        else:
            self.engine.reset(new_weights=kind == "new weights")

    @precondition(lambda self: self.below)
    @rule(
        begins=st.sampled_from([True, True, True, False]),
        other=st.sampled_from([None, None, None, *EFFECTS]),
        which=st.integers(0, 1),
    )
    def fault(self, begins: bool, other: Effect | None, which: int) -> None:
        """One more fault, or an end of them all."""
        effect = other or self.usual
        if begins and effect is not None:
            self.below[which % len(self.below)].injectors[effect].active = True
            return
        self.end_faults()
        self._release_all()
        self.let_movers_run()
        for below in self.below:
            below.faulty.faults.released = False

    def end_faults(self) -> None:
        for below in self.below:
            for injector in below.injectors.values():
                injector.active = False

    def _release_all(self) -> None:
        for below in self.below:
            below.faulty.release()
        for _ in range(3000):
            if not any(below.faulty.num_hung for below in self.below):
                return
            time.sleep(0.001)

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        check_all(self.hierarchy)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        # Its turn, its reads, and the step in which it is told. What was seen to be slow may take
        # longer, within a bound.
        lagging = (Effect.SLOW, Effect.HANG)
        slow = any(below.injectors[e].num_fired for below in self.below for e in lagging)
        reads_s = DEADLINE_S * (MOST_DEADLINES if slow else 1)
        assert self.engine.longest_wait_s <= DEADLINE_S + reads_s + LONGEST_ADVANCE_S

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.end_faults()
            self._release_all()
            self._drain()
            astray = any(b.injectors[Effect.MISDIRECTED_WRITE].num_fired for b in self.below)
            check_quiet(self.hierarchy, orphans=astray)
            for prompt in PROMPTS:
                self.engine.submit(prompt)
            self._drain()
            check_quiet(self.hierarchy, orphans=astray)
        finally:
            for below in self.below:
                below.faulty.release()
            self.clock.advance(100.0)
            began_s = time.perf_counter()
            self.world.close()
            assert time.perf_counter() - began_s < 30.0

    def _drain(self) -> None:
        for _ in range(60):
            late = any(level.transfers.late for level in self.hierarchy.levels)
            under_way = any(level.transfers.open for level in self.hierarchy.levels)
            if self.engine.idle and not (self.hierarchy.has_pending_work() or late or under_way):
                return
            self.engine.step()
            self.clock.advance(1.0)
            self.let_movers_run()
        assert not self.engine.waiting, "a request was never answered"
        levels = [(level.transfers.open, level.transfers.late) for level in self.hierarchy.levels]
        raise AssertionError(
            f"work is pending for ever: {len(self.engine.running)} run, {self.engine.jobs} jobs, "
            f"{len(self.hierarchy.restores)} restores, {len(self.hierarchy.cascade)} cascades, "
            f"quarantine {self.hierarchy._draining_until}, tickets {levels}"
        )


@pytest.mark.parametrize("effect", [None, *EFFECTS])
def test_nothing_breaks_the_hierarchy(effect: Effect | None) -> None:
    """Under every effect in turn, mixed with a few others: see what must hold, above."""
    machine = type("Machine", (HierarchyMachine,), {"usual": effect})
    # Left to itself hypothesis tries few of the effects, and seldom long enough.
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_bad_chunks_that_a_read_only_tier_kept_give_way_to_new_ones() -> None:
    """What could not be deleted when it was found to be bad is listed by no level any more."""
    machine = HierarchyMachine()
    machine.build(ONE_GROUP, 1, 12, 200, Lru, 1, 1.0, 1.0)
    (below,) = machine.below
    machine.submit(PROMPTS[0], 16, PROMPTS[0])
    for effect in (Effect.SHORT_READ, Effect.READ_ONLY):
        below.injectors[effect].active = True
    for _ in range(4):
        machine.advance(0.1)
    num_kept = len(below.tier.suspects)
    assert num_kept > 0
    assert {*below.tier.suspects} <= {key for key, _ in below.tier.evictable()}
    machine.teardown()
    assert len(below.tier.suspects) < num_kept
