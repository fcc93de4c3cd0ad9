"""Engines that share a directory: each learns what others did, and can evict what it inherits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.hierarchy.invariants import check_no_orphans
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, make_world

from undercroft.clock import SystemClock
from undercroft.hierarchy.follow import Follower
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk import DiskTier

NAMESPACE = Namespace({"model": "test"})


def disk(path: Path, capacity_chunks: int, num_replicas: int = 1) -> DiskTier:
    return DiskTier(
        str(path),
        name="disk",
        namespace=NAMESPACE,
        capacity_bytes=capacity_chunks * 2 * CHUNK_BYTES + (1 << 20),
        clock=SystemClock(),
        free_space_floor_bytes=0,
        num_replicas=num_replicas,
    )


def test_an_idle_engine_sees_what_another_stored(tmp_path: Path) -> None:
    """No request, no step, no I/O of its own: within moments it knows the other's chunks."""
    writer, reader = (make_world(16, [disk(tmp_path, 64, 2)]) for _ in range(2))
    try:
        keys = keys_of("a", 8)
        writer.engine.run(keys)
        tier = reader.hierarchy.levels[0].tier
        deadline_s = time.monotonic() + 60.0
        while not all(tier.has(key) for key in keys) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert reader.engine.run(keys).num_hits == 8
        reader.assert_quiet()
    finally:
        writer.close()
        reader.close()


def fill(world: World, label: str, num_prompts: int) -> None:
    for n in range(num_prompts):
        world.engine.run(keys_of(f"{label}{n}-", 8))


def test_chunks_of_adopted_segments_can_be_evicted(tmp_path: Path) -> None:
    """What a dead engine left is adopted when room is needed, and then evicted by the policy."""
    heir = make_world(16, [disk(tmp_path, 128, 2)])
    others = [make_world(16, [disk(tmp_path, 128, 2)]) for _ in range(2)]
    try:
        for number, other in enumerate(others):
            fill(other, f"old{number}-", 16)
        for other in others:
            other.close()
        tier = heir.hierarchy.levels[0].tier
        assert isinstance(tier, DiskTier)
        assert tier.stats()["adopted"] == 0
        fill(heir, "new", 40)
        assert tier.stats()["adopted"] > 0, "nothing was adopted while running"
        check_no_orphans(heir.hierarchy)
        assert heir.engine.run(keys_of("new39-", 8)).num_hits == 8
    finally:
        heir.close()


def test_chunks_that_go_with_a_segment_are_told_of(tmp_path: Path) -> None:
    """Another key space comes and takes its share: what we lose is counted, noted and published."""
    world = make_world(16, [disk(tmp_path, 64)])
    notes: list[tuple[str, str, str, bytes]] = []
    world.counters.note = lambda *note: notes.append((*note, b"")[:4])  # type: ignore[assignment]
    there: set[ChunkKey] = set()

    def follow_events() -> None:
        for event in world.hierarchy.events.take():
            if event.level == "disk":
                (there.difference_update if event.removed else there.update)(event.keys)

    tier = world.hierarchy.levels[0].tier
    assert isinstance(tier, DiskTier)
    other = None
    try:
        for number in range(24):
            world.engine.run(keys_of(f"{number}-", 8))
            follow_events()
        before = {key for key, _ in tier.evictable()}
        assert there == before
        other = DiskTier(
            str(tmp_path),
            name="disk",
            namespace=Namespace({"model": "another"}),
            capacity_bytes=tier.capacity_bytes,
            clock=SystemClock(),
            free_space_floor_bytes=0,
        )
        deadline_s = time.monotonic() + 60.0
        while not world.counters.dropped_chunks and time.monotonic() < deadline_s:
            time.sleep(0.05)
            world.engine.step()
        for _ in range(3):
            world.engine.step()
        follow_events()
        left = {key for key, _ in tier.evictable()}
        assert there == left
        assert len(left) < len(before)
        number = len(before - left)
        assert world.counters.dropped_chunks == {("disk", "given_up"): number}
        dropped = {key for *what, key in notes if what == ["disk", "dropped", "given_up"]}
        assert dropped == before - left
        policy = world.hierarchy.levels[0]._policies[0]
        assert set(policy.victims()) == left
    finally:
        if other is not None:
            other.close()
        world.close()


def test_a_strangers_error_does_not_end_the_following() -> None:
    """A tier that is not ours may raise anything; it is asked again all the same."""

    class Stranger:
        def __init__(self) -> None:
            self.num_refreshes = 0
            self.asked_again = threading.Event()

        def refresh(self) -> None:
            self.num_refreshes += 1
            if self.num_refreshes > 1:
                self.asked_again.set()
            raise OSError(5, "injected")

    tier = Stranger()
    follower = Follower(tier, "stranger", SystemClock())  # type: ignore[arg-type] # as far as asked
    assert tier.asked_again.wait(30.0)
    follower.close(30.0)
