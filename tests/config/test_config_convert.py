"""Engine objects and JSON become ours and lose nothing."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.config import (
    EngineConfig,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    from_engine,
    from_json,
    to_json,
)
from undercroft.errors import ConfigError

names = st.text(min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def parallels(draw: st.DrawFn) -> OffloadingParallelConfig:
    tp, pp, pcp = (draw(st.integers(1, 4)) for _ in range(3))
    size = draw(st.integers(1, 4))
    return OffloadingParallelConfig(
        rank=draw(st.integers(0, tp * pp * pcp - 1)),
        world_size=tp * pp * pcp,
        tp_size=tp,
        pp_size=pp,
        pcp_size=pcp,
        dcp_size=draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0])),
        data_parallel_index=draw(st.integers(0, size - 1 if size > 1 else 9)),
        data_parallel_size=size,
        data_parallel_rank_local=draw(st.none() | st.integers(0, 3)),
        is_parallelism_agnostic=draw(st.booleans()),
    )


@st.composite
def configs(draw: st.DrawFn) -> OffloadingConfig:
    tokens_per_hash = draw(st.integers(1, 64))
    ids = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=3, unique=True))
    canonical = draw(st.booleans())
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=tokens_per_hash * draw(st.integers(1, 8)),
                layer_names=tuple(draw(st.lists(names, min_size=1, max_size=3, unique=True))),
                group_id=group_id,
            )
            for group_id in ids
        ),
        worker_kv_bytes_per_block=draw(st.integers(1, 2**50)),
        enable_kv_cache_events=draw(st.booleans()),
        extra_config=draw(st.dictionaries(names, plain, max_size=4)),
        engine_id=draw(names),
        model=OffloadingModelConfig(name=draw(names), dtype=draw(names)),
        cache=OffloadingCacheConfig(tokens_per_hash, draw(st.integers(1, 8))),
        parallel=draw(parallels()),
        replicated_layout=draw(st.booleans()),
        canonical_layout=canonical,
        kv_cache_layout=draw(names if canonical else st.none() | names),
    )


@settings(max_examples=30, deadline=None)
@given(configs(), st.dictionaries(names, plain, max_size=3))
def test_json_round_trip(config: OffloadingConfig, extras: dict[str, Any]) -> None:
    """What was written is what is read, extras included."""
    engine = EngineConfig(config, extras)
    text = to_json(engine)
    assert "\n" not in text
    assert from_json(text) == engine
    assert to_json(from_json(text)) == text


@settings(max_examples=20, deadline=None)
@given(configs())
def test_our_own_object_converts_to_itself(config: OffloadingConfig) -> None:
    """Conversion reads by attribute; ours has all attributes and nothing more."""
    assert from_engine(config) == EngineConfig(config, {})


def engine_config(extra_config: Mapping[str, Any]) -> Any:
    """A configuration made of vLLM's own classes."""
    vllm = pytest.importorskip("vllm.v1.kv_offload.config")
    return vllm.OffloadingConfig(
        groups=(
            vllm.OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=3),
        ),
        worker_kv_bytes_per_block=110592,
        enable_kv_cache_events=True,
        extra_config=extra_config,
        engine_id="engine_dp1",
        model=vllm.OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=vllm.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=vllm.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=1,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )


def test_vllm_objects_convert_field_by_field() -> None:
    """vLLM's real classes: every field arrives under its name, nothing is left over."""
    extra = {"host": "1GiB", "tiers": [{"type": "disk"}]}
    source = engine_config(extra)
    engine = from_engine(source)
    assert engine.extras == {}
    assert dataclasses.asdict(engine.config) == dataclasses.asdict(source)
    assert type(engine.config) is OffloadingConfig
    assert [f.name for f in dataclasses.fields(source)] == [
        f.name for f in dataclasses.fields(engine.config)
    ]


def test_a_stage_of_vllm_without_layers_of_a_group_is_refused_as_one() -> None:
    """Through vLLM's own classes, as a rank of the second stage gets them."""
    source = engine_config({"host": "1GiB"})
    empty = dataclasses.replace(source.groups[0], layer_names=(), group_id=1)
    parallel = dataclasses.replace(source.parallel, rank=1, world_size=2, pp_size=2)
    staged = dataclasses.replace(source, groups=(*source.groups, empty), parallel=parallel)
    with pytest.raises(ConfigError, match=r"stage 1 of 2 .* has no layers of KV cache group 1 "):
        from_engine(staged)


def test_extra_config_is_a_copy() -> None:
    """Neither side sees the other's changes, however deep."""
    extra = {"tiers": [{"type": "disk"}]}
    engine = from_engine(engine_config(extra))
    extra["tiers"][0]["type"] = "changed"
    assert engine.config.extra_config == {"tiers": [{"type": "disk"}]}


class Window(enum.Enum):
    SMALL = 1


@dataclasses.dataclass(frozen=True)
class NewerGroup:
    tokens_per_block: Any
    layer_names: Any
    group_id: int
    sliding_window_size_in_chunks: Any = None


@dataclasses.dataclass(frozen=True)
class NewerModel:
    name: str
    dtype: str
    max_model_len: int


def newer(**changes: Any) -> Any:
    """An object as vLLM 0.33 makes it: the fields of 0.32 and two more."""

    class Newer:
        pass

    source = Newer()
    for f in dataclasses.fields(engine_config({})):
        setattr(source, f.name, getattr(engine_config({}), f.name))
    source.groups = [NewerGroup(np.int64(64), ["a"], 3, 8), NewerGroup(32, ("b",), 5)]
    source.model = NewerModel("org/model", "fp8", 8192)
    for name, value in changes.items():
        setattr(source, name, value)
    return source


def test_fields_of_a_newer_engine_are_carried_by_name() -> None:
    """vLLM 0.33's additions are kept beside the seed's fields, group by group id."""
    engine = from_engine(newer())
    assert engine.extras == {
        "groups[3].sliding_window_size_in_chunks": 8,
        "groups[5].sliding_window_size_in_chunks": None,
        "model.max_model_len": 8192,
    }
    assert engine.config.groups[0] == OffloadingGroupConfig(64, ("a",), 3)
    assert type(engine.config.groups[0].tokens_per_block) is int
    assert from_json(to_json(engine)) == engine


def test_extras_are_plain_data() -> None:
    """Enums, sets, dataclasses and tuples become the same JSON data in every process."""
    engine = from_engine(
        newer(window=Window.SMALL, sizes={3, 1, 2}, more=NewerModel("n", "d", 1), pair=(1, 2.5))
    )
    assert engine.extras["window"] == "SMALL"
    assert engine.extras["sizes"] == [1, 2, 3]
    assert engine.extras["more"] == {"name": "n", "dtype": "d", "max_model_len": 1}
    assert engine.extras["pair"] == [1, 2.5]
    json.dumps(engine.extras)


def test_an_extra_that_means_nothing_elsewhere_is_refused() -> None:
    """An object whose text holds an address can't be compared between processes."""
    with pytest.raises(ConfigError, match="thing of the engine's configuration"):
        from_engine(newer(thing=object()))


@pytest.mark.parametrize("name", ["engine_id", "parallel", "groups", "model"])
def test_a_missing_field_is_named(name: str) -> None:
    """An engine older than 0.32 is told which field it lacks."""
    source = newer()
    delattr(source, name)
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        from_engine(source)


def test_fields_with_defaults_may_be_missing() -> None:
    """The defaults are the seed's."""
    source = newer()
    del source.kv_cache_layout, source.canonical_layout
    assert from_engine(source).config.kv_cache_layout is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", r"document is \[\]"),
        ('{"config": {}}', "config lacks groups, worker_kv_bytes_per_block"),
        ('{"config": {}, "extra": 1}', "document has unknown fields extra"),
        ('{"config": {"groups": 1}}', "config lacks"),
    ],
)
def test_bad_json_is_refused(text: str, words: str) -> None:
    """Each kind of damage has its own line."""
    with pytest.raises(ConfigError, match=words):
        from_json(text)


def test_every_field_of_the_json_is_needed_and_judged() -> None:
    """Leave out, or spoil, any field of the written configuration: it is refused by name."""
    whole = json.loads(to_json(from_engine(newer())))
    optional = {"replicated_layout", "canonical_layout", "kv_cache_layout"}
    for part in ("model", "cache", "parallel", None):
        fields = whole["config"] if part is None else whole["config"][part]
        for name in [n for n in fields if n not in optional]:
            spoilt = json.loads(json.dumps(whole))
            target = spoilt["config"] if part is None else spoilt["config"][part]
            target[name] = 1.5
            with pytest.raises(ConfigError, match=name):
                from_json(json.dumps(spoilt))
            del target[name]
            with pytest.raises(ConfigError, match=name):
                from_json(json.dumps(spoilt))


def test_what_json_cannot_hold_is_refused() -> None:
    """Not-a-number has no JSON form; the error says so instead of writing something else."""
    config = dataclasses.replace(from_engine(newer()).config, extra_config={"x": float("nan")})
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        to_json(EngineConfig(config))
