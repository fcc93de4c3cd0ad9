"""The five dataclasses refuse what cannot be right, and say which field, value and fix."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from undercroft.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from undercroft.errors import ConfigError

GROUP = OffloadingGroupConfig(tokens_per_block=32, layer_names=("l.0", "l.1"), group_id=0)
MODEL = OffloadingModelConfig(name="org/model", dtype="bfloat16")
CACHE = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)
PARALLEL = OffloadingParallelConfig(
    rank=0,
    world_size=1,
    tp_size=1,
    pp_size=1,
    pcp_size=1,
    dcp_size=1,
    data_parallel_index=0,
    data_parallel_size=1,
    data_parallel_rank_local=None,
    is_parallelism_agnostic=False,
)
CONFIG = OffloadingConfig(
    groups=(GROUP,),
    worker_kv_bytes_per_block=4096,
    enable_kv_cache_events=False,
    extra_config={"host": "1GiB"},
    engine_id="engine-1",
    model=MODEL,
    cache=CACHE,
    parallel=PARALLEL,
)

SEED = {
    OffloadingGroupConfig: ["tokens_per_block", "layer_names", "group_id"],
    OffloadingModelConfig: ["name", "dtype"],
    OffloadingCacheConfig: ["tokens_per_hash", "blocks_per_chunk"],
    OffloadingParallelConfig: [
        "rank",
        "world_size",
        "tp_size",
        "pp_size",
        "pcp_size",
        "dcp_size",
        "data_parallel_index",
        "data_parallel_size",
        "data_parallel_rank_local",
        "is_parallelism_agnostic",
    ],
    OffloadingConfig: [
        "groups",
        "worker_kv_bytes_per_block",
        "enable_kv_cache_events",
        "extra_config",
        "engine_id",
        "model",
        "cache",
        "parallel",
        "replicated_layout",
        "canonical_layout",
        "kv_cache_layout",
    ],
}


def test_fields_are_the_seeds() -> None:
    """Names, order, and defaults are those of the engine's document; all are frozen."""
    for kind, names in SEED.items():
        assert [f.name for f in dataclasses.fields(kind)] == names
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    defaults = {
        f.name: f.default
        for f in dataclasses.fields(OffloadingConfig)
        if f.default is not dataclasses.MISSING
    }
    assert defaults == {
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.engine_id = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        (GROUP, {"tokens_per_block": 0}, "tokens_per_block is 0.*>= 1"),
        (GROUP, {"tokens_per_block": True}, "tokens_per_block is True"),
        (GROUP, {"tokens_per_block": 16.0}, "tokens_per_block is 16.0"),
        (GROUP, {"layer_names": ["a"]}, "layer_names is .*tuple"),
        (GROUP, {"layer_names": ("a", "")}, "layer_names is ''"),
        (GROUP, {"layer_names": ("a", "a")}, "layer_names .*each layer once"),
        (GROUP, {"group_id": -1}, "group_id is -1.*>= 0"),
        (MODEL, {"name": " "}, "model.name is ' '.*non-empty"),
        (MODEL, {"dtype": ""}, "model.dtype is ''"),
        (CACHE, {"tokens_per_hash": 0}, "cache.tokens_per_hash is 0"),
        (CACHE, {"blocks_per_chunk": -2}, "cache.blocks_per_chunk is -2"),
        (PARALLEL, {"rank": 1}, "parallel.rank is 1.*below world_size 1"),
        (PARALLEL, {"rank": -1}, "parallel.rank is -1"),
        (PARALLEL, {"world_size": 2}, r"world_size is 2.*1 \* 1 \* 1 = 1"),
        (PARALLEL, {"tp_size": 2}, r"world_size is 1.*2 \* 1 \* 1 = 2"),
        (PARALLEL, {"pp_size": 3}, r"world_size is 1.*1 \* 3 \* 1 = 3"),
        (PARALLEL, {"pcp_size": 2}, r"world_size is 1.*1 \* 1 \* 2 = 2"),
        (PARALLEL, {"dcp_size": 2}, "dcp_size is 2.*divisor of tp_size 1"),
        (PARALLEL, {"dcp_size": 0}, "dcp_size is 0"),
        (PARALLEL, {"data_parallel_index": -1}, "data_parallel_index is -1"),
        (PARALLEL, {"data_parallel_size": 0}, "data_parallel_size is 0"),
        (
            PARALLEL,
            {"data_parallel_size": 2, "data_parallel_index": 2},
            "data_parallel_index is 2.*below data_parallel_size 2",
        ),
        (PARALLEL, {"data_parallel_rank_local": -1}, "data_parallel_rank_local is -1"),
        (PARALLEL, {"is_parallelism_agnostic": 1}, "is_parallelism_agnostic is 1.*True or False"),
        (CONFIG, {"groups": ()}, "groups is .*at least one"),
        (CONFIG, {"groups": [GROUP]}, "groups is .*tuple"),
        (CONFIG, {"groups": (MODEL,)}, r"groups\[0\] is .*from_engine"),
        (CONFIG, {"worker_kv_bytes_per_block": 0}, "worker_kv_bytes_per_block is 0"),
        (CONFIG, {"enable_kv_cache_events": "no"}, "enable_kv_cache_events is 'no'"),
        (CONFIG, {"extra_config": None}, "extra_config is None.*mapping"),
        (CONFIG, {"extra_config": {3: 4}}, "extra_config key is 3"),
        (CONFIG, {"engine_id": ""}, "engine_id is ''"),
        (CONFIG, {"model": {"name": "x"}}, "model is .*OffloadingModelConfig"),
        (CONFIG, {"cache": None}, "cache is None"),
        (CONFIG, {"parallel": None}, "parallel is None"),
        (CONFIG, {"replicated_layout": None}, "replicated_layout is None"),
        (CONFIG, {"canonical_layout": 0}, "canonical_layout is 0"),
        (CONFIG, {"canonical_layout": True}, "kv_cache_layout is None.*canonical_layout"),
        (CONFIG, {"kv_cache_layout": ""}, "kv_cache_layout is ''"),
        (CONFIG, {"groups": (GROUP, GROUP)}, "group_id is 0.*unique"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(part: Any, change: dict, words: str) -> None:
    """Every field is checked: one bad value, one line with the field and the value."""
    with pytest.raises(ConfigError, match=words) as caught:
        dataclasses.replace(part, **change)
    assert "\n" not in str(caught.value)


def test_every_field_is_checked_at_least_once() -> None:
    """No field of the boundary escapes: a value of a wrong type is refused for each."""
    for part in (GROUP, MODEL, CACHE, PARALLEL, CONFIG):
        for f in dataclasses.fields(part):
            with pytest.raises(ConfigError, match=re.escape(f.name)):
                dataclasses.replace(part, **{f.name: 1.5})


def test_hash_that_does_not_divide_a_block_names_group_and_both_numbers() -> None:
    """A group of 4-token blocks under 8704-token hashes: the message names all and a way out."""
    indexer = OffloadingGroupConfig(tokens_per_block=4, layer_names=("l.0.indexer",), group_id=5)
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(
            CONFIG,
            groups=(dataclasses.replace(GROUP, tokens_per_block=8704), indexer),
            cache=OffloadingCacheConfig(tokens_per_hash=8704, blocks_per_chunk=1),
        )
    message = str(caught.value)
    for part in ("group 5", "l.0.indexer", " 4 ", "8704", "--prefix-match-unit 4"):
        assert part in message


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_a_stage_without_layers_of_a_group_is_named(rank: int, stage: int) -> None:
    """vLLM gives a rank the layers of its own stage: a group may have none there."""
    parallel = dataclasses.replace(PARALLEL, rank=rank, world_size=6, tp_size=2, pp_size=3)
    empty = OffloadingGroupConfig(tokens_per_block=64, layer_names=(), group_id=4)
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, groups=(GROUP, empty), parallel=parallel)
    message = str(caught.value)
    named = f"pipeline stage {stage} of 3 (counted from 0) has no layers of KV cache group 4"
    for part in (named, "VLLM_PP_LAYER_PARTITION", "tensor_parallel_size"):
        assert part in message
    assert "\n" not in message


def test_a_group_without_layers_and_stages_is_a_wrong_field() -> None:
    """Where there is one stage, nobody has the layers."""
    empty = dataclasses.replace(GROUP, layer_names=())
    with pytest.raises(ConfigError, match=r"layer_names is \(\), but must name a layer") as caught:
        dataclasses.replace(CONFIG, groups=(empty,))
    assert "stage" not in str(caught.value)


def test_group_ids_need_not_be_consecutive() -> None:
    """Ids are the engine's own: 3 and 7 are as good as 0 and 1."""
    groups = tuple(dataclasses.replace(GROUP, group_id=i) for i in (7, 3))
    assert [g.group_id for g in dataclasses.replace(CONFIG, groups=groups).groups] == [7, 3]


def test_independent_replicas_count_beyond_their_own_size() -> None:
    """vLLM sets data_parallel_size 1 in each replica of a dense model and keeps the index."""
    assert dataclasses.replace(PARALLEL, data_parallel_index=3).data_parallel_index == 3
