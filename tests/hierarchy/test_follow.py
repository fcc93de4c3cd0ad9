"""Engines that share a directory: each learns what others did, and can evict what it inherits."""

from __future__ import annotations

import time
from pathlib import Path

from tests.hierarchy.invariants import check_no_orphans
from tests.hierarchy.worlds import CHUNK_BYTES, World, make_world

from undercroft.clock import SystemClock
from undercroft.keys import ChunkKey, Namespace
from undercroft.testing.mini_engine import chunk_key
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


def keys_of(label: str, count: int) -> list[ChunkKey]:
    return [chunk_key(f"{label}{i}") for i in range(count)]


def test_an_idle_engine_sees_what_another_stored(tmp_path: Path) -> None:
    """No request, no step, no I/O of its own: within moments it knows the other's chunks."""
    writer, reader = (make_world(16, [disk(tmp_path, 64, 2)]) for _ in range(2))
    try:
        keys = keys_of("a", 8)
        writer.engine.run(keys)
        tier = reader.hierarchy.levels[0].tier
        deadline_s = time.monotonic() + 10.0
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
