"""What a rank makes of the engine's word on its pages, and what ranks say to one another."""

import dataclasses
import logging
import zlib
from typing import Any

import pytest
import torch
from replicas import Layers, Replica, Sizes
from shapes import ONE_GROUP, OURS, Group, engine_config, kv_cache_config
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalPageMapping, CopyRun

from undercroft.engines.vllm import UndercroftSpec, spec
from undercroft.engines.vllm import rank_layout as module
from undercroft.engines.vllm.rank_layout import RankLayout, Ranks, topology_of
from undercroft.errors import ConfigError, LayoutMismatch
from undercroft.hierarchy.region import RegionConfig
from undercroft.hierarchy.rendezvous import region_path
from undercroft.layout.page_map import PageMap
from undercroft.layout.plan import GroupGeometry, PageRef
from undercroft.layout.stored import Decision, StoredLayout
from undercroft.settings.limits import Bound, HostLimits

LLAMA = (Layers(2, 8, 8),)
MISTRAL = (Layers(2, 8, 8, window=16),)


@pytest.fixture(scope="module")
def config() -> Any:
    """Of a replica of two ranks."""
    with Replica(LLAMA, Sizes(tp=2)) as replica:
        return replica.spec._engine.config


GOOD = CanonicalPageMapping(
    canonical_page_size_bytes=16,
    local_page_size_bytes=8,
    runs=(CopyRun(0, 8, 8, 1, 8, 8),),
    num_writers=1,
    writer_index=0,
    parallelism_agnostic=True,
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"runs": ()}, "cover"),
        ({"runs": (CopyRun(0, 8, 4, 1, 4, 4),)}, "cover"),
        ({"runs": (CopyRun(0, 12, 8, 1, 8, 8),)}, "outside"),
        ({"canonical_page_size_bytes": 24}, "do not write 24 bytes 1 times"),
        ({"num_writers": 2}, "do not write 16 bytes 2 times"),
        ({"writer_index": 1}, "writer 1 of 1"),
        ({"local_page_size_bytes": 16, "runs": (CopyRun(0, 0, 16, 1, 16, 16),)}, "do not write"),
        ({"parallelism_agnostic": False}, "cannot say"),
    ],
)
def test_copy_runs_are_proven_before_they_are_believed(
    config: Any, changed: Any, said: str
) -> None:
    """What is wrong with them makes the page one of which nothing is known, and is named."""

    def page(**changes: Any) -> PageMap:
        mapping = dataclasses.replace(GOOD, **changes)
        ref = CanonicalKVCacheRef(0, 8, mapping)
        return module._page_map(ref, config, topology_of(config), is_one_layer=True)

    assert page().is_portable
    wrong = page(**changed)
    assert not wrong.is_portable
    assert said in wrong.why


def _note(stored: StoredLayout, *layers: str, why: str = "") -> bytes:
    group = GroupGeometry((PageRef(0, 8),), 1)
    return RankLayout(Decision(stored, why, bool(why)), (group,), (layers,)).note()


NOTE = _note(StoredLayout.CANONICAL, "a")


def test_ranks_that_decide_otherwise_are_refused_and_both_are_named(config: Any) -> None:
    """At the scheduler's start: they would overwrite each other's bytes."""
    canonical = _note(StoredLayout.CANONICAL, "a")
    direct = _note(StoredLayout.DIRECT, "a", why="group 0, layer a: no runs")
    with pytest.raises(
        ConfigError, match=r"rank 0 stores canonical.*rank 1 stores direct.*layer a"
    ):
        Ranks.of(config, [canonical, direct], [(8,), (8,)])
    other = _note(StoredLayout.CANONICAL, "b")
    with pytest.raises(ConfigError, match=r"rank 0 and rank 1.*other layers"):
        Ranks.of(config, [canonical, other], [(8,), (8,)])
    with pytest.raises(LayoutMismatch, match=r"rank 0 8, rank 1 16"):
        Ranks.of(config, [canonical, canonical], [(8,), (16,)])
    together = Ranks.of(config, [canonical, canonical], [(8,), (8,)])
    assert (together.stored, together.layer_names) == (StoredLayout.CANONICAL, (("a",),))
    assert together.shares == ((8, (0, 0)),)


def test_canonical_pages_that_cannot_be_are_one_warning(caplog: Any) -> None:
    """It names the group, the layer and why; what was not asked for is no word."""

    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [line for line in found if "canonical" in line]

    with caplog.at_level(logging.INFO):
        blind = {"sees_tensors": False}
        with Replica(LLAMA, Sizes(tp=2, pp=2), canonical_layout=True, **blind) as replica:
            assert replica.stored == "direct"
        (line,) = warnings()
        assert "group 0, layer g0.layer0: the engine certifies none of its pages" in line
        with Replica(LLAMA, Sizes(tp=2, pp=2), **blind):
            assert warnings() == []
        with Replica(MISTRAL, Sizes(tp=2), canonical_layout=True) as replica:
            assert replica.stored == "canonical"
        assert warnings() == []


def test_stages_are_named_in_model_order() -> None:
    """The manifest of two stages is that of one rank, though no process of vLLM sees all layers."""
    with Replica(LLAMA, Sizes(pp=2)) as replica:
        (group,) = replica.namespace.manifest["groups"]
    assert group["layer_names"] == ["g0.layer0", "g0.layer1"]


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"not compressed",
        *map(zlib.compress, (b"not json", b"[]", b'{"stored": "canonical"}')),
        zlib.compress(zlib.decompress(NOTE).replace(b"canonical", b"another")),
    ],
    ids=["none", "not compressed", "not JSON", "a list", "less", "an unknown layout"],
)
def test_a_rank_that_speaks_otherwise_is_named(config: Any, note: bytes) -> None:
    """One of another version: one line, instead of a fault in whatever reads it."""
    with pytest.raises(ConfigError, match=r"rank 1 .*another version of undercroft"):
        Ranks.of(config, [NOTE, note], [(8,), (8,)])


def test_layers_of_different_sizes_in_one_group_start() -> None:
    """vLLM shows its scheduler one of them only, so that it judges the layout otherwise."""
    specs = {f"layer{n}": Group(head_size=32 << n).spec() for n in range(2)}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(16, specs))
    shown = KVCacheConfig(8, [], [group], kv_cache_layout="LBHNC")
    engine = engine_config({"host": "1MiB", **OURS})
    rank = build_offloading_config(engine, shown)
    scheduler = build_offloading_config(engine, generate_scheduler_kv_cache_config([shown]))
    assert rank.parallel.is_parallelism_agnostic != scheduler.parallel.is_parallelism_agnostic
    identities = [UndercroftSpec(config)._region_config.identity for config in (rank, scheduler)]
    assert identities[0] == identities[1]


def test_blocks_that_are_not_in_one_piece_are_refused() -> None:
    """With heads outside of blocks, vLLM hands out the first head of the first layer alone."""
    cache = kv_cache_config(ONE_GROUP, 8, "LHBNC")
    engine = engine_config(
        {"host": "1MiB", **OURS},
        cache_config__kv_cache_layout="LHBNC",
        model_config__get_total_num_kv_heads=lambda: 2,
    )
    for group in cache.kv_cache_groups:
        object.__setattr__(group.kv_cache_spec, "num_kv_heads", 2)
    worker = OffloadingConnectorWorker(
        UndercroftSpec(build_offloading_config(engine, cache)), engine, cache
    )
    tensors = {
        name: torch.zeros(2, 8, 16, 64).transpose(0, 1)
        for name in cache.kv_cache_groups[0].layer_names
    }
    with (
        set_current_vllm_config(engine),
        pytest.raises(ConfigError, match=r"LHBNC.*VLLM_KV_CACHE_LAYOUT"),
    ):
        worker.register_kv_caches(tensors)


def test_a_tier_too_small_for_all_ranks_chunks_is_refused(tmp_path: Any) -> None:
    """A chunk has the bytes of all ranks, also where the limit is compared with it."""
    tier = {"type": "disk", "path": str(tmp_path), "capacity": "48KiB"}
    with (
        pytest.raises(ConfigError, match=r"the capacity of tier disk is 49152 .* needs 65536"),
        Replica(MISTRAL, Sizes(tp=2), bpc=8, tiers=[tier]),
    ):
        pass


def test_what_one_rank_has_taken_is_not_missing_for_the_next(monkeypatch: Any) -> None:
    """All ranks map one region: `host` may be all that there was before the first of them."""
    host_bytes, file = 4 << 20, region_path(RegionConfig("r", 2, 1, b"x").directory, "r")

    def limits() -> HostLimits:
        used = file.stat().st_blocks * 512 if file.exists() else 0
        return HostLimits((Bound("/dev/shm", host_bytes - used, ""),))

    monkeypatch.setattr(spec, "host_limits", limits)
    with Replica(LLAMA, Sizes(tp=2)) as replica:
        assert replica.stored == "canonical"
    host_bytes -= 1
    with pytest.raises(ConfigError, match="can be had here"), Replica(LLAMA, Sizes(tp=2)):
        pass


def test_ranks_of_two_versions_are_refused(monkeypatch: Any) -> None:
    """They may lay out slots otherwise, though they are configured alike; both are named."""
    versions = iter(("0.3.0", "0.4.0"))
    monkeypatch.setattr(spec, "own_version", lambda: next(versions))
    said = r"rank 1 and those already there differ: version 0\.3\.0 there, 0\.4\.0 here"
    with pytest.raises(ConfigError, match=said), Replica(LLAMA, Sizes(tp=2)):
        pass
