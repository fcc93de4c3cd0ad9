"""What a router hears over ZMQ of a real engine is what each level holds."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import one_by_one
from tests.engines.vllm.lab import damage
from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery, prompt
from tests.engines.vllm.lab.router import Router

LEVELS = {"host": ("CPU", None), "fast": ("STORAGE", "fast"), "slow": ("STORAGE", "slow")}
PROMPTS = [prompt(320, seed=900 + number) for number in range(16)]  # ten chunks of 64 KiB each


def offload(folder: Path) -> dict[str, Any]:
    """Host memory of 32 chunks over a disk of some 60 and one of some 100."""
    tiers = [
        {"type": "disk", "path": str(folder / name), "capacity": size, "name": name}
        for name, size in (("fast", "5MiB"), ("slow", "8MiB"))
    ]
    return {**OFFLOADER, "host": "2MiB", "tiers": tiers}


def compare(engine: Engine, router: Router) -> dict[str, list[int]]:
    """With nothing under way, the events say what is there, level by level."""
    engine.settle()
    router.follow()
    held = engine.inside("router:holdings")
    assert {name: sorted(router.held[level]) for name, level in LEVELS.items()} == held
    assert not router.doubts
    return held


@pytest.mark.timeout(300)
def test_a_router_knows_what_every_level_holds(nursery: Nursery, tmp_path: Path) -> None:
    """Stores, evictions of three levels, restores, a kill and a restart, damage, a reset."""
    with Router() as router:
        engine = nursery.engine("llama", offload(tmp_path), kv_events_config=router.config)
        for each in PROMPTS:
            one_by_one(engine, [each], max_tokens=2)
            engine.settle()  # so that all of it reaches both disks
        held = compare(engine, router)
        assert min(map(len, held.values())) >= 10
        assert min(router.num_removed[level] for level in LEVELS.values()) > 0
        engine.reset()
        one_by_one(engine, PROMPTS[-4:][::-1], max_tokens=2)  # the oldest of them is below only
        assert engine.metrics()["vllm:undercroft_promoted_chunks_total|level=fast"] > 0
        compare(engine, router)
        engine.kill()

    damage.flip_payloads(tmp_path / "fast")
    with Router() as router:
        engine = nursery.engine("llama", offload(tmp_path), kv_events_config=router.config)
        held = compare(engine, router)
        assert not held["host"]
        assert min(len(held["fast"]), len(held["slow"])) >= 10, "found at start, and told of"
        one_by_one(engine, PROMPTS[-1:], max_tokens=2)
        compare(engine, router)
        assert router.num_removed["STORAGE", "fast"] > 0, "damaged chunks are no more"
        engine.reset(connector=True)
        held = compare(engine, router)
        assert held == {"host": [], "fast": [], "slow": []}
        one_by_one(engine, PROMPTS[:1], max_tokens=2)
        assert min(map(len, compare(engine, router).values())) == 10
        engine.close()
