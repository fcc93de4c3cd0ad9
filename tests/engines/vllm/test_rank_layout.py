"""What a rank makes of the engine's word on its pages, and what ranks say to one another."""

import dataclasses
import logging
from typing import Any

import pytest
from replicas import Layers, Replica, Sizes
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalPageMapping, CopyRun

from undercroft.engines.vllm import rank_layout as module
from undercroft.engines.vllm.rank_layout import RankLayout, Ranks, topology_of
from undercroft.errors import ConfigError, LayoutMismatch
from undercroft.layout.page_map import PageMap
from undercroft.layout.plan import GroupGeometry, PageRef
from undercroft.layout.stored import Decision, StoredLayout

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
        with Replica(LLAMA, Sizes(tp=2, pp=2), canonical_layout=True) as replica:
            assert replica.stored == "direct"
        (line,) = warnings()
        assert "group 0, layer g0.layer0: the engine certifies none of its pages" in line
        with Replica(LLAMA, Sizes(tp=2, pp=2)):
            assert warnings() == []
        with Replica(MISTRAL, Sizes(tp=2), canonical_layout=True) as replica:
            assert replica.stored == "canonical"
        assert warnings() == []


def test_stages_are_named_in_model_order() -> None:
    """The manifest of two stages is that of one rank, though no process of vLLM sees all layers."""
    with Replica(LLAMA, Sizes(pp=2)) as replica:
        (group,) = replica.namespace.manifest["groups"]
    assert group["layer_names"] == ["g0.layer0", "g0.layer1"]
