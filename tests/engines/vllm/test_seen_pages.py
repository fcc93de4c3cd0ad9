"""What the tensors say of a rank's pages: as vLLM derives it where it does, and its like beyond."""

from typing import Any

import kv_fixtures  # noqa: F401 - first, because it imports the engine quietly
import pytest
import torch
from replicas import Layers, Replica, Sizes
from rig import Rig
from shapes import engine_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from undercroft.engines.vllm import UndercroftConnector, seen_pages
from undercroft.engines.vllm import rank_layout as module
from undercroft.engines.vllm.rank_layout import topology_of
from undercroft.engines.vllm.seen_pages import seen_pages as look
from undercroft.layout.page_map import PageMap
from undercroft.layout.pages import HeadsPage, Order, heads_page
from undercroft.layout.topology import Topology

NUM_BLOCKS, TOKENS, SIZE = 5, 8, 4


def _config(tp: int, pp: int = 1, *, rank: int = 0, heads: int = 8, **more: Any) -> Any:
    return engine_config(
        {},
        parallel_config__rank=rank,
        parallel_config__world_size=tp * pp,
        parallel_config__tensor_parallel_size=tp,
        parallel_config__pipeline_parallel_size=pp,
        model_config__get_total_num_kv_heads=lambda: heads,
        **more,
    )


def _cache(spec: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(["a"], spec)]
    return KVCacheConfig(NUM_BLOCKS, [], groups, kv_cache_layout="LBHNC")


def _spec(heads: int = 8, kind: Any = FullAttentionSpec, **more: Any) -> Any:
    shape = {"block_size": TOKENS, "num_kv_heads": heads, "head_size": SIZE, **more}
    return kind(**{"dtype": torch.bfloat16, **shape})


def _tensor(heads: int, order: Order = Order.HEADS, *, is_split: bool = False) -> Any:
    """As vLLM's backends make them, seen as vLLM registers them."""
    if is_split:
        if order is Order.TOKENS:
            return torch.zeros(NUM_BLOCKS, 2, TOKENS, heads, SIZE, dtype=torch.bfloat16)
        whole = torch.zeros(NUM_BLOCKS, 2, heads, TOKENS, SIZE, dtype=torch.bfloat16)
        return whole.permute(0, 1, 3, 2, 4)
    if order is Order.HEADS:
        return torch.zeros(NUM_BLOCKS, heads, TOKENS, 2 * SIZE, dtype=torch.bfloat16)
    whole = torch.zeros(NUM_BLOCKS, TOKENS, heads, 2 * SIZE, dtype=torch.bfloat16)
    return whole.permute(0, 2, 1, 3)


def _vllms(config: Any, spec: Any, tensor: Any) -> PageMap:
    """What vLLM derives, in our words."""
    mapping = derive_canonical_mappings(config, _cache(spec), {"a": tensor})["a"]
    ref = module.CanonicalKVCacheRef(0, mapping.local_page_size_bytes, mapping)
    parallel = config.parallel_config
    topology = Topology(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return module._engines_map(ref, mapping, topology)


LAYOUTS = {Order.HEADS: "LBHNC", Order.TOKENS: "LBNHC"}


@pytest.mark.parametrize("is_split", [False, True], ids=["packed", "split"])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("kind", [FullAttentionSpec, SlidingWindowSpec])
def test_tensors_say_what_vllm_derives(kind: Any, order: Order, is_split: bool) -> None:
    """Of every rank of all tensor parallel sizes; ranks of any stage are those of the only one."""
    window = {"sliding_window": 16} if kind is SlidingWindowSpec else {}
    num_seen = 0
    for tp in (1, 2, 4, 8):
        for heads in (1, 2, 3, 4, 6, 8):
            local = max(1, heads // tp)
            spec, tensor = _spec(local, kind, **window), _tensor(local, order, is_split=is_split)
            for rank in range(tp):
                more = {"heads": heads, "cache_config__kv_cache_layout": LAYOUTS[order]}
                theirs = _vllms(_config(tp, rank=rank, **more), spec, tensor)
                page = HeadsPage(heads, TOKENS, SIZE * (2 if is_split else 4), order, is_split)
                formula = heads_page(page, Topology(tp), rank)
                assert formula.is_portable == theirs.is_portable
                if theirs.is_portable:
                    assert formula == theirs
                for pp in (1, 2):
                    for stage in range(pp):
                        config = _config(tp, pp, rank=stage * tp + rank, **more)
                        seen = look(config, _cache(spec), {"a": tensor})
                        assert seen == ({"a": theirs} if heads % tp == 0 else {})
                        num_seen += len(seen)
    assert num_seen > 50


def test_latents_are_whole_on_every_rank() -> None:
    """As vLLM says of one stage."""
    spec = _spec(1, MLAAttentionSpec, max_tp_shards=1)
    tensor = torch.zeros(NUM_BLOCKS, TOKENS, SIZE, dtype=torch.bfloat16)
    for tp in (1, 2, 4):
        for rank in range(tp):
            theirs = _vllms(_config(tp, rank=rank, heads=1), spec, tensor)
            assert theirs.is_portable
            for config in (_config(tp, rank=rank), _config(tp, 2, rank=tp + rank)):
                assert look(config, _cache(spec), {"a": tensor}) == {"a": theirs}


STRIDED = torch.zeros(NUM_BLOCKS, 4, TOKENS, 4 * SIZE, dtype=torch.bfloat16)[..., : 2 * SIZE]


@pytest.mark.parametrize(
    ("spec", "tensor"),
    [
        (_spec(4, RSWASpec, rswa_window=16), _tensor(4)),
        (_spec(4, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), _tensor(4)),
        (_spec(4, kv_quant_mode=KVQuantMode.NVFP4), _tensor(4)),
        (_spec(4, tokens_per_state=2), _tensor(4)),
        (_spec(4, head_size_v=SIZE // 2), _tensor(4)),
        (_spec(4, num_head_slots=2), _tensor(4)),
        (_spec(4, state_content_bytes=8), _tensor(4)),
        (_spec(2), _tensor(2)),  # of another number of heads than the model's
        (_spec(4), _tensor(4, Order.TOKENS)),  # in another order than the engine names
        (_spec(4), _tensor(4, Order.TOKENS, is_split=True)),
        (_spec(4), STRIDED),
        (_spec(4), torch.zeros(2 * NUM_BLOCKS, 4, TOKENS // 2, 2 * SIZE, dtype=torch.bfloat16)),
        (_spec(4), [_tensor(4)]),
        (_spec(4), None),
        (_spec(4, MLAAttentionSpec), _tensor(4)),
        (_spec(4, MLAAttentionSpec, max_tp_shards=1, tokens_per_state=2), _tensor(4)),
    ],
)
def test_what_is_not_plain_is_not_certified(spec: Any, tensor: Any) -> None:
    """Another kind, way to keep elements, shape or order: nothing is said of it."""
    config = _config(2, 2)
    assert look(config, _cache(_spec(4)), {"a": _tensor(4)})
    assert look(config, _cache(spec), {"a": tensor}) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"parallel_config__prefill_context_parallel_size": 2, "parallel_config__world_size": 8},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__world_size": 8},
        {"cache_config__kv_cache_layout": None},
        {"cache_config__kv_cache_layout": "LHBNC"},
        {"cache_config__kv_cache_layout": "BLHNC"},
    ],
)
def test_other_topologies_and_orders_are_not_certified(changed: Any) -> None:
    """Context parallelism, ranks that are none of these, and orders in which pages are mixed."""
    config = _config(2, 2)
    for name, value in changed.items():
        room, _, leaf = name.partition("__")
        setattr(getattr(config, room), leaf, value)
    assert look(config, _cache(_spec(4)), {"a": _tensor(4)}) == {}


def test_a_fault_while_looking_certifies_nothing(caplog: Any) -> None:
    """Engine internals are read; an engine that has moved them starts all the same."""
    config = _config(2, 2)
    del config.model_config.get_total_num_kv_heads
    assert look(config, _cache(_spec(4)), {"a": _tensor(4)}) == {}
    assert "fault while looking at pages" in caplog.text


def test_copy_runs_that_are_not_what_the_tensors_say_are_not_believed() -> None:
    """Two derivations that disagree: at least one of them is wrong."""
    with Replica((Layers(2, 8, 8),), Sizes(tp=2)) as replica:
        assert replica.stored == "canonical"
        config = replica.spec._engine.config
    mapping = derive_canonical_mappings(_config(2), _cache(_spec(4)), {"a": _tensor(4)})["a"]
    ref = module.CanonicalKVCacheRef(0, mapping.local_page_size_bytes, mapping)
    right = look(_config(2), _cache(_spec(4)), {"a": _tensor(4)})["a"]
    wrong = look(_config(2, rank=1), _cache(_spec(4)), {"a": _tensor(4)})["a"]

    def page(seen: Any) -> PageMap:
        return module._page_map(ref, config, topology_of(config), seen, is_one_layer=True)

    assert page(right) == page(None) == right
    assert "not what its tensors say" in page(wrong).why
    assert not page(wrong).is_portable


def test_a_page_of_another_length_is_not_what_was_seen() -> None:
    """As where vLLM hands out blocks of all layers in one piece."""
    with Replica((Layers(2, 8, 8),), Sizes(tp=2, pp=2)) as replica:
        config = replica.spec._engine.config
    seen = look(_config(2, 2), _cache(_spec(4)), {"a": _tensor(4)})["a"]

    def page(num_bytes: int) -> PageMap:
        ref = module.CanonicalKVCacheRef(0, num_bytes)
        return module._page_map(ref, config, topology_of(config), seen, is_one_layer=True)

    assert page(seen.local_bytes) == seen
    assert not page(2 * seen.local_bytes).is_portable


def test_our_connector_shows_its_spec_the_tensors() -> None:
    """Before the spec decides; stock's connector shows nothing."""
    for connector, names in ((UndercroftConnector, {"g0.layer0", "g0.layer1"}), (None, set())):
        rig = Rig({"host": "1MiB"}, connector=connector)
        try:
            assert rig.on_worker.connector_worker.spec.seen.keys() == names
        finally:
            rig.close()


def test_proof_is_asked_for(monkeypatch: Any) -> None:
    """Ranks whose runs leave a hole are an error of the formula: nothing is certified."""
    monkeypatch.setattr(
        seen_pages, "heads_page", lambda page, topology, _rank: heads_page(page, topology, 0)
    )
    assert look(_config(2, 2), _cache(_spec(4)), {"a": _tensor(4)}) == {}
