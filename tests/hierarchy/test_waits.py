"""What came in time is used: models of several groups whose reads are late, fail, or vanish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hierarchy.invariants import check_quiet
from tests.hierarchy.test_groups import LARGE, SMALL, TWO_FULL, class_of, models, tier_with
from tests.hierarchy.worlds import World, made_worlds, make_world, num_held_up

from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.transfers import TransferLimits
from undercroft.hierarchy.waits import RESERVE_RATIO
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, both, on_verb
from undercroft.testing.injectors import Call
from undercroft.testing.machines import Group, GroupEngine, GroupRequest
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)

DEADLINE_S = 2.0
STEP_S = DEADLINE_S / 16
PROMPT = "a" * 33
FULL, WINDOW = Group(0, 2), Group(3, 2, window=2)
HYBRID = (FULL, WINDOW)
TWO_WINDOWS = (FULL, WINDOW, Group(7, 4, window=1))


def reads_of(keys: Iterable[ChunkKey]) -> Callable[[Call], bool]:
    wanted = frozenset(keys)
    return both(on_verb("read_into"), lambda call: call.key in wanted)


class Rig:
    """An engine over host memory and one tier, by a clock that moves a sixteenth of the deadline
    a step; between steps the tier's threads get on as far as they can."""

    def __init__(
        self,
        worlds: list[World],
        groups: tuple[Group, ...],
        effect: Effect,
        keys: Iterable[ChunkKey],
        *,
        without: tuple[ChunkKey, ...] = (),
        num_threads: int = 2,
        seconds: float = 0.0,
        load_margin: float | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.injector = Injector(effect, reads_of(keys), seconds=seconds)
        self.inner = tier_with(PROMPT, groups, without)
        self.faulty = FaultyTier(self.inner, self.injector, clock=self.clock)
        tier = self.faulty
        if effect is Effect.FLIPPED_BIT:
            self.inner = MemoryTier(1 << 24, name="below")
            self.faulty = FaultyTier(self.inner, self.injector)
            tier = Checked(self.faulty)
            plain, out = tier_with(PROMPT, groups, without), bytearray(LARGE)
            for key in (key for group in groups for key in group.keys(PROMPT)):
                view = memoryview(out)[: LARGE if class_of(key) == 0 else SMALL]
                if plain.read_into(key, view):
                    tier.write_from(key, view)
        self.world = make_world(
            64,
            [tier],
            slot_bytes=(LARGE, SMALL),
            class_of=class_of,
            clock=self.clock,
            num_threads=num_threads,
            limits=Limits(promote_deadline_s=DEADLINE_S, load_margin=load_margin),
            transfer_limits=TransferLimits(failures_to_open=1000, num_extra_threads=20),
        )
        worlds.append(self.world)
        self.level = self.world.hierarchy.levels[0]
        self.engine = GroupEngine(self.world.hierarchy, groups, self.clock.now_s)
        self.counters = self.world.counters

    def let_movers_on(self) -> None:
        """Until every read has ended, hangs, sleeps, or has no thread."""
        transfers = self.level.transfers
        until_s = time.monotonic() + 20
        num_quiet = 0
        while num_quiet < 3:
            asleep = self.clock._num_sleepers() + num_held_up(self.level)
            with transfers._lock:
                free = transfers._crew.num_threads - asleep
                is_quiet = transfers.num_running <= asleep
                is_quiet &= free <= 0 or not transfers.num_queued_reads
            num_quiet = num_quiet + 1 if is_quiet else 0
            time.sleep(0.0005)
            assert time.monotonic() < until_s, "the movers do not get on"

    def step(self, seconds: float = STEP_S) -> None:
        self.engine.step()
        self.let_movers_on()
        self.clock.advance(seconds)
        self.let_movers_on()

    def run(self, *prompts: str) -> list[GroupRequest]:
        entries = [self.engine.submit(prompt) for prompt in prompts]
        for _ in range(200):
            self.step()
            if all(entry.num_hit_tokens is not None for entry in entries):
                return entries
        raise AssertionError("waits for ever")

    def end(self) -> None:
        """What hung comes back, and nothing is left."""
        self.faulty.release()
        for _ in range(100):
            self.step()
            is_open = self.level.transfers.open or self.level.transfers.late
            if self.engine.idle and not is_open and not self.world.hierarchy.has_pending_work():
                break
        check_quiet(self.world.hierarchy)


def hits_with(
    worlds: list[World],
    effect: Effect,
    keys: Iterable[ChunkKey],
    groups: tuple[Group, ...] = HYBRID,
    **more: float,
) -> tuple[int, Rig]:
    """Tokens that were hits; nobody waited beyond the deadline and a step."""
    rig = Rig(worlds, groups, effect, keys, **more)
    (entry,) = rig.run(PROMPT)
    assert rig.engine.longest_wait_s <= DEADLINE_S + STEP_S
    assert rig.injector.num_fired
    assert entry.num_hit_tokens is not None
    rig.end()
    return entry.num_hit_tokens, rig


EFFECTS = [Effect.HANG, Effect.ERROR, Effect.FLIPPED_BIT]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("place", [2, 7, 14])
def test_a_chunk_of_full_attention_does_not_come(
    worlds: list[World], effect: Effect, place: int
) -> None:
    """All before it is a hit: the window at the cut is read, in the same wait, and no more."""
    num_tokens, rig = hits_with(worlds, effect, [FULL.keys(PROMPT)[place]])
    assert num_tokens == 2 * place
    # Of both windows, and of full attention all but the one.
    num_window = len(set(range(14, 16)) | set(range(place - 2, place)))
    assert rig.counters.promoted_chunks["below"] == 15 + num_window


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("place", [14, 15])
def test_a_chunk_of_a_window_does_not_come(worlds: list[World], effect: Effect, place: int) -> None:
    """The hit ends before it, where the window is there or can be read."""
    num_tokens, _ = hits_with(worlds, effect, [WINDOW.keys(PROMPT)[place]])
    assert num_tokens == 2 * place


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_window_longer_than_the_prefix(worlds: list[World], effect: Effect) -> None:
    """It needs nothing else at a shorter cut: what is there of it suffices."""
    groups = (FULL, Group(3, 2, window=100))
    for group in groups:
        num_tokens, rig = hits_with(worlds, effect, [group.keys(PROMPT)[9]], groups)
        assert num_tokens == 18
        assert rig.counters.promoted_chunks["below"] == 31


@pytest.mark.parametrize("groups", [HYBRID, TWO_WINDOWS, (WINDOW,), TWO_FULL])
def test_a_tier_that_is_too_slow_for_all(worlds: list[World], groups: tuple[Group, ...]) -> None:
    """Reads of all groups go in prefix order, so that each has the same part when time is up."""
    keys = [key for group in groups for key in group.keys(PROMPT)]
    num_tokens, _ = hits_with(worlds, Effect.SLOW, keys, groups, num_threads=1, seconds=STEP_S)
    # A read takes a step. Full attention alone has the whole wait of 16; with windows it has three
    # quarters, then they are read. A window that is alone comes first.
    assert num_tokens >= 2 * (7 if groups == TWO_FULL else 11 if groups != (WINDOW,) else 16)


def test_a_step_that_spans_the_reserve(worlds: list[World]) -> None:
    """That something is late shows only after the deadline: the reserve begins then."""
    rig = Rig(worlds, HYBRID, Effect.HANG, [FULL.keys(PROMPT)[7]])
    entry = rig.engine.submit(PROMPT)
    rig.step(DEADLINE_S * (1 + RESERVE_RATIO))
    for _ in range(2):
        rig.step(DEADLINE_S * RESERVE_RATIO / 2)
    assert entry.num_hit_tokens == 14
    rig.end()


def test_what_hangs_again_is_not_waited_for_again(worlds: list[World]) -> None:
    """The window at the cut hangs as well: the wait is over at the deadline, and no hit is left."""
    keys = [FULL.keys(PROMPT)[7], *WINDOW.keys(PROMPT)[:7]]
    num_tokens, _ = hits_with(worlds, Effect.HANG, keys)
    assert num_tokens == 0


def test_a_tier_that_hangs_for_good(worlds: list[World]) -> None:
    """A wait is as long as it was: the deadline, once."""
    keys = [key for group in HYBRID for key in group.keys(PROMPT)]
    num_tokens, rig = hits_with(worlds, Effect.HANG, keys)
    assert num_tokens == 0
    assert rig.engine.longest_wait_s <= DEADLINE_S + STEP_S


@pytest.mark.parametrize("group", [FULL, Group(3, 2, window=1)])
def test_a_request_of_one_chunk_has_the_whole_wait(worlds: list[World], group: Group) -> None:
    """There is no shorter cut that time should be set aside for; at the end of more there is."""
    rig = Rig(worlds, (group,), Effect.HANG, group.keys(PROMPT))
    (short,) = rig.run(PROMPT[:3])
    assert short.num_hit_tokens == 0
    assert DEADLINE_S - STEP_S <= rig.engine.longest_wait_s <= DEADLINE_S + STEP_S
    waits = rig.world.hierarchy.restores.waits
    long = rig.engine.submit(PROMPT)
    rig.step()
    assert long.request.reserve_s == (RESERVE_RATIO * waits.deadline_s if group.window else 0.0)
    rig.end()


def test_two_requests_of_one_prompt(worlds: list[World]) -> None:
    """Who joined the reads of another has the same part of them, whenever it came."""
    for num_steps in (0, 1, 5, 11):
        rig = Rig(worlds, HYBRID, Effect.HANG, [FULL.keys(PROMPT)[7]])
        first = rig.engine.submit(PROMPT)
        for _ in range(num_steps):
            rig.step()
        (second,) = rig.run(PROMPT)
        assert first.num_hit_tokens == second.num_hit_tokens == 14
        assert rig.engine.longest_wait_s <= DEADLINE_S + STEP_S
        assert rig.counters.promoted_chunks["below"] == 15 + 4
        rig.end()


def test_who_joined_a_longer_wait(worlds: list[World]) -> None:
    """Reads that others may take longer for are given up in time, and windows come from there."""
    rig = Rig(worlds, HYBRID, Effect.HANG, [FULL.keys(PROMPT)[7]])
    rig.level.transfers.speeds.served(Op.READ, 1.0, 10 * LARGE)  # 4 deadlines for all
    rig.engine.submit(PROMPT)
    rig.step()
    (second,) = rig.run(PROMPT[:20] + "b" * 13)
    assert second.num_hit_tokens == 14
    assert rig.engine.longest_wait_s <= DEADLINE_S + 2 * STEP_S
    rig.end()


@pytest.mark.parametrize("group", HYBRID)
def test_chunks_that_are_evicted_again(worlds: list[World], group: Group) -> None:
    """What came and went is a cut as any other."""
    key = group.keys(PROMPT)[14]
    rig = Rig(worlds, HYBRID, Effect.SLOW, [FULL.keys(PROMPT)[0]], seconds=2 * STEP_S)
    entry = rig.engine.submit(PROMPT)
    rig.step()
    rig.step()
    rig.world.hierarchy.poll()
    pool, request = rig.world.hierarchy.pool, entry.request
    rig.world.hierarchy.holds.drop(request, [pool.find(key)])
    pool.void(key, pool.find(key))
    rig.run()
    while entry.num_hit_tokens is None:
        rig.step()
    assert entry.num_hit_tokens == 28
    assert rig.counters.lookup_misses["below", "evicted_again"]
    rig.end()


def test_what_is_too_slow_is_cut_where_a_window_is_read(worlds: list[World]) -> None:
    """Reading is worth it up to a token: the window that ends there is read, and a hit."""
    rig = Rig(worlds, HYBRID, Effect.ERROR, (), load_margin=1.0)
    for _ in range(8):
        rig.level.transfers.speeds.served(Op.READ, LARGE / 1e6, LARGE)
    worth = rig.world.hierarchy.restores.worth
    worth._probe_at_s = {"below": float("inf")}
    # Attention over what came before makes later tokens dear; here the first 16 are, and no other.
    worth.compute_s = lambda begin, end: 0.02 * max(0, min(end, 16) - begin)
    (entry,) = rig.run(PROMPT)
    assert entry.num_hit_tokens == 16
    assert rig.counters.lookup_misses["below", "too_slow"]
    assert rig.counters.promoted_chunks["below"] == 8 + 2
    rig.end()


@given(data=st.data(), groups=models())
@settings(max_examples=40, deadline=None)
def test_late_is_as_good_as_absent(data, groups: tuple[Group, ...]) -> None:
    """Whatever the groups: a chunk that hangs costs no more than not to have it, but for time, and
    where chunks of groups differ in length a part of one."""
    num_tokens = data.draw(st.integers(4, 33))
    keys = [key for group in groups for key in group.keys(PROMPT[:num_tokens])]
    missing = data.draw(st.sampled_from(keys))
    hits = []
    for effect, without in ((Effect.HANG, ()), (Effect.ERROR, (missing,))):
        worlds: list[World] = []
        try:
            rig = Rig(worlds, groups, effect, [missing], without=without)
            (entry,) = rig.run(PROMPT[:num_tokens])
            assert rig.engine.longest_wait_s <= DEADLINE_S + STEP_S
            hits.append(entry.num_hit_tokens)
            rig.end()
        finally:
            for world in worlds:
                world.close()
    sizes = {group.tokens_per_chunk for group in groups}
    assert hits[0] >= hits[1] - (max(sizes) if len(sizes) > 1 else 0)
