"""What every eviction policy must hold; yours too.

::

    class TestMyPolicy(PolicySuite):
        def make(self, capacity_chunks):
            return MyPolicy(capacity_chunks)
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from random import Random

import pytest

from undercroft.errors import Bug
from undercroft.keys import ChunkKey
from undercroft.policies.base import EvictionPolicy, InRuns

__all__ = ["PolicySuite", "evict_skipping", "make_keys", "play_history"]

_MAX_RUN = 1024


def make_keys(num_keys: int, start: int = 0) -> list[ChunkKey]:
    """Distinct keys of 36 bytes, as long as vLLM's. Equal arguments, equal keys."""
    return [
        ChunkKey((index * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") * 4 + b"\0\0\0\1")
        for index in range(start, start + num_keys)
    ]


def evict_skipping(policy: EvictionPolicy, pinned: set[ChunkKey]) -> tuple[ChunkKey, int]:
    """Evict one key as a level does: step over what is pinned, then touch what was stepped over.

    Returns:
        The evicted key, and how many pinned ones were stepped over. At least one must be unpinned.
    """
    skipped: list[ChunkKey] = []
    for victim in policy.victims():
        if victim not in pinned:
            policy.on_evict(victim)
            for key in skipped:
                policy.on_hit(key)
            return victim, len(skipped)
        skipped.append(victim)
    raise AssertionError(f"no victim among {len(skipped)} residents that is not pinned")


def play_history(
    policy: EvictionPolicy, keys: list[ChunkKey], num_steps: int, seed: int
) -> set[ChunkKey]:
    """Random calls that the seam allows.

    Returns:
        The keys that are resident afterwards.
    """
    random = Random(seed)  # noqa: S311 - repeatable on purpose
    resident: set[ChunkKey] = set()
    for _ in range(num_steps):
        key = random.choice(keys)
        if key not in resident:
            if random.randrange(10) == 0:
                policy.on_drop(key)  # a ghost or a stranger
            policy.on_insert(key)
            resident.add(key)
            continue
        verb = random.choice((policy.on_hit, policy.on_hit, policy.on_evict, policy.on_drop))
        verb(key)
        if verb != policy.on_hit:
            resident.discard(key)
    return resident


def _garbage_collector_work() -> tuple[int, int]:
    """Objects that a full collection visits, and pointers that it follows from them.

    Called between `gc.freeze` and `gc.unfreeze`: what was there before is not looked at.
    """
    gc.collect()
    tracked = gc.get_objects()
    return len(tracked), sum(len(gc.get_referents(found)) for found in tracked)


class PolicySuite:
    """Subclass it as `Test...`, give it `make`, and pytest runs what is below."""

    def make(self, capacity_chunks: int) -> EvictionPolicy:
        """A new policy for a level of `capacity_chunks` chunks."""
        raise NotImplementedError

    def test_has_a_name(self) -> None:
        """The name under which users choose the policy is a plain lower-case word."""
        assert self.make(4).name.isidentifier()
        assert self.make(4).name == self.make(4).name.lower()

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("num_keys", [1, 7, 900])
    def test_victims_are_a_permutation_of_the_residents(self, num_keys: int, seed: int) -> None:
        """Each resident comes up exactly once, and nobody else does."""
        policy = self.make(num_keys)
        resident = play_history(policy, make_keys(num_keys), 4 * num_keys, seed)
        victims = list(policy.victims())
        assert len(victims) == len(resident)
        assert set(victims) == resident

    def test_victims_change_nothing(self) -> None:
        """To ask is free: asked again, wholly or in part, the answer is the same."""
        policy = self.make(500)
        play_history(policy, make_keys(500), 2_000, seed=1)
        victims = list(policy.victims())
        list(islice(policy.victims(), len(victims) // 2))
        assert list(policy.victims()) == victims

    def test_victims_are_lazy(self) -> None:
        """The first victim of 20,000 costs no memory in proportion."""
        num_keys = 20_000
        policy = self.make(num_keys)
        for key in make_keys(num_keys):
            policy.on_insert(key)
        tracemalloc.start()
        try:
            next(policy.victims())
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < num_keys, "victims() copies the residents"

    def test_an_empty_policy_has_no_victims(self) -> None:
        """Before the first insertion, and after the last eviction."""
        policy = self.make(3)
        assert list(policy.victims()) == []
        for key in make_keys(3):
            policy.on_insert(key)
        for key in make_keys(3):
            policy.on_evict(key)
        assert list(policy.victims()) == []

    @pytest.mark.parametrize("verb", ["on_hit", "on_evict"])
    def test_calls_about_strangers_are_bugs(self, verb: str) -> None:
        """A key that never was, that was evicted, or that was dropped is not resident."""
        policy = self.make(4)
        never, evicted, dropped = make_keys(3)
        for key in (evicted, dropped):
            policy.on_insert(key)
        policy.on_evict(evicted)
        policy.on_drop(dropped)
        for key in (never, evicted, dropped):
            call: Callable[[ChunkKey], None] = getattr(policy, verb)
            with pytest.raises(Bug):
                call(key)
        assert list(policy.victims()) == []

    def test_inserting_a_resident_is_a_bug(self) -> None:
        """And it leaves the residents as they were."""
        policy = self.make(4)
        keys = make_keys(2)
        for key in keys:
            policy.on_insert(key)
        with pytest.raises(Bug):
            policy.on_insert(keys[0])
        assert sorted(policy.victims()) == sorted(keys)

    def test_dropping_is_always_fine(self) -> None:
        """Unknown, resident, ghost, twice."""
        policy = self.make(4)
        resident, ghost, never = make_keys(3)
        for key in (resident, ghost):
            policy.on_insert(key)
        policy.on_evict(ghost)
        for key in (never, ghost, resident, ghost, resident):
            policy.on_drop(key)
        assert list(policy.victims()) == []

    def test_a_dropped_key_comes_back_as_a_stranger(self) -> None:
        """The order after its return is that of a policy that never saw it."""
        *others, key, stand_in = make_keys(42)
        orders = []
        for first in (key, stand_in):
            policy = self.make(60)
            for other in others:
                policy.on_insert(other)
            for other in others[::3]:
                policy.on_hit(other)
            policy.on_insert(first)
            policy.on_evict(first)
            policy.on_drop(first)
            policy.on_insert(key)
            orders.append(list(policy.victims()))
        assert orders[0] == orders[1], "on_drop left a ghost"

    def test_pinned_keys_get_out_of_the_way(self) -> None:
        """Each pinned key is stepped over a bounded number of times, not at every eviction."""
        num_keys = 2_000
        policy = self.make(num_keys)
        keys = make_keys(num_keys)
        for key in keys:
            policy.on_insert(key)
        pinned = set(keys[: num_keys // 10])
        num_skipped = 0
        for newcomer in make_keys(num_keys, start=num_keys):
            num_skipped += evict_skipping(policy, pinned)[1]
            policy.on_insert(newcomer)
        assert num_skipped <= 3 * len(pinned)
        assert pinned <= set(policy.victims())

    def test_runs_are_the_victims_in_pieces(self) -> None:
        """Where a policy has them: the same keys, each once, in pieces that are short and lazy."""
        policy = self.make(3_000)
        resident = play_history(policy, make_keys(3_000), 12_000, seed=2)
        if not isinstance(policy, InRuns):
            return
        pieces = [list(run) for run in policy.runs()]
        keys = [key for piece in pieces for key in piece]
        assert len(keys) == len(resident)
        assert set(keys) == resident
        assert max(map(len, pieces)) <= _MAX_RUN, "a run is not short"
        assert len(pieces) <= 2 + len(resident) // 16, "runs are not worth a stride"
        heads = [next(run, None) for run in policy.runs(3)]
        firsts = [piece[0] if piece else None for piece in pieces]
        assert heads[0] == firsts[0]
        assert set(heads) <= set(firsts)
        assert len(pieces) / 3 <= len(heads) <= len(pieces) / 3 + 2

    def test_memory_is_bounded(self) -> None:
        """What has left for good leaves no trace: ghosts are bounded by the capacity."""
        capacity, laps = 1_000, 10
        tracemalloc.start()
        try:
            policy = self.make(capacity)
            lap_bytes = []
            for lap in range(laps):
                for number, key in enumerate(make_keys(2 * capacity, start=2 * capacity * lap)):
                    if lap > 0 or number >= capacity:
                        evict_skipping(policy, set())
                    policy.on_insert(key)
                lap_bytes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert lap_bytes[-1] < 1.2 * lap_bytes[2], f"memory after each lap: {lap_bytes}"

    def test_the_garbage_collector_does_not_see_keys(self) -> None:
        """A full collection has nothing more to visit for 20,000 keys than for none."""
        num_keys = 20_000
        keys = make_keys(num_keys)
        gc.freeze()
        try:
            policy = self.make(num_keys)
            objects_before, pointers_before = _garbage_collector_work()
            for key in keys:
                policy.on_insert(key)
            for key in keys[::2]:
                policy.on_hit(key)
            objects_after, pointers_after = _garbage_collector_work()
        finally:
            gc.unfreeze()
        assert objects_after - objects_before < num_keys / 20
        if sys.version_info < (3, 14):  # later ones track every dict
            assert pointers_after - pointers_before < num_keys / 4
        assert next(policy.victims())

    def test_same_history_same_order(self) -> None:
        """Nothing but the calls decides."""
        orders = []
        for _ in range(2):
            policy = self.make(400)
            play_history(policy, make_keys(600), 3_000, seed=5)
            orders.append(list(policy.victims()))
        assert orders[0] == orders[1]

    def test_eviction_costs_the_same_at_any_size(self) -> None:
        """With the oldest tenth pinned, 100,000 keys against 10,000: at most 3 times."""
        small, large = (self._eviction_ns(num_keys) for num_keys in (10_000, 100_000))
        assert large <= 3 * small, f"{small} ns an eviction at 10,000 keys, {large} at 100,000"

    def _eviction_ns(self, num_keys: int) -> int:
        """Thread time of one eviction and one insertion, the best of 20 runs of 200."""
        policy = self.make(num_keys)
        keys = make_keys(num_keys)
        for key in keys:
            policy.on_insert(key)
        pinned = set(keys[: num_keys // 10])
        evict_skipping(policy, pinned)  # steps over the pinned, once
        newcomers = iter(make_keys(4_000, start=num_keys))
        best_ns = sys.maxsize
        for _ in range(20):
            batch = list(islice(newcomers, 200))
            start_ns = time.thread_time_ns()
            for key in batch:
                evict_skipping(policy, pinned)
                policy.on_insert(key)
            best_ns = min(best_ns, time.thread_time_ns() - start_ns)
        return best_ns // 200
