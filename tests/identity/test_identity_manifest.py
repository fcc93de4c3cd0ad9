"""The namespace changes with all that decides bytes, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from undercroft.config import (
    EngineConfig,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from undercroft.errors import ConfigError
from undercroft.identity import (
    EngineFacts,
    Fingerprint,
    KeyHash,
    key_hash,
    namespace,
)
from undercroft.keys import Namespace, first_difference

CONFIG = OffloadingConfig(
    groups=(
        OffloadingGroupConfig(tokens_per_block=32, layer_names=("l.0", "l.1"), group_id=3),
        OffloadingGroupConfig(tokens_per_block=64, layer_names=("l.2",), group_id=5),
    ),
    worker_kv_bytes_per_block=4096,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="engine-1",
    model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0,
        world_size=8,
        tp_size=2,
        pp_size=2,
        pcp_size=2,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=2,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    ),
    kv_cache_layout="LBHNC",
)
ENGINE = EngineConfig(CONFIG, {"model.max_model_len": 8192})
WEIGHTS = Fingerprint("files", "abc")
FACTS = EngineFacts(
    name="vllm",
    version="0.32.0",
    kv_format=1,
    chunk_bytes={3: 8192, 5: 4096},
    key_hash=KeyHash("sha256", "the engine's default"),
    model={"quantization": None},
)
BASE = namespace(ENGINE, WEIGHTS, FACTS)


def changed(field: str, value: Any) -> OffloadingConfig:
    part, _, name = field.rpartition(".")
    if part == "groups":
        first = dataclasses.replace(CONFIG.groups[0], **{name: value})
        return dataclasses.replace(CONFIG, groups=(first, CONFIG.groups[1]))
    if part:
        inner = dataclasses.replace(getattr(CONFIG, part), **{name: value})
        return dataclasses.replace(CONFIG, **{part: inner})
    return dataclasses.replace(CONFIG, **{field: value})


DECIDES = {
    "groups.tokens_per_block": (48, "groups[0].tokens_per_block: 32 here, 48 there"),
    "groups.layer_names": (("l.0",), "groups[0].layer_names[1]: 'l.1' here, absent there"),
    "groups.group_id": (4, "groups[0].group_id: 3 here, 4 there"),
    "model.name": ("org/other", "model.name: 'org/model' here, 'org/other' there"),
    "model.dtype": ("fp8", "model.dtype: 'bfloat16' here, 'fp8' there"),
    "cache.tokens_per_hash": (8, "cache.tokens_per_hash: 16 here, 8 there"),
    "cache.blocks_per_chunk": (2, "cache.blocks_per_chunk: 1 here, 2 there"),
    "parallel.dcp_size": (2, "topology.dcp_size: 1 here, 2 there"),
    "kv_cache_layout": ("LBNHC", "layout.kv_cache_layout: 'LBHNC' here, 'LBNHC' there"),
}
TOGETHER = {"world_size", "tp_size", "pp_size", "pcp_size"}
# How many bytes a block takes is in the groups' chunk_bytes; a rank's slot holds all ranks' bytes.
# The three flags decide the stored layout, which is in the manifest (tests/layout/test_stored.py).
PLACES = {
    "worker_kv_bytes_per_block": 8192,
    "parallel.rank": 1,
    "parallel.is_parallelism_agnostic": True,
    "replicated_layout": True,
    "canonical_layout": True,
    "enable_kv_cache_events": True,
    "extra_config": {"host": "1GiB"},
    "engine_id": "engine-2",
    "parallel.data_parallel_index": 1,
    "parallel.data_parallel_size": 4,
    "parallel.data_parallel_rank_local": 1,
}


@pytest.mark.parametrize("field", DECIDES)
def test_what_decides_bytes_is_in_the_namespace(field: str) -> None:
    """One field changed: another namespace, and the difference is named with both values."""
    value, difference = DECIDES[field]
    config = changed(field, value)
    chunk_bytes = dict(zip((g.group_id for g in config.groups), (8192, 4096), strict=True))
    other = namespace(
        EngineConfig(config, ENGINE.extras),
        WEIGHTS,
        dataclasses.replace(FACTS, chunk_bytes=chunk_bytes),
    )
    assert other.id != BASE.id
    assert first_difference(BASE, other) == difference


@pytest.mark.parametrize("field", PLACES)
def test_where_and_how_long_is_not_in_the_namespace(field: str) -> None:
    """Replicas, restarts, other sizes and settings share what is stored."""
    config = changed(field, PLACES[field])
    assert namespace(EngineConfig(config, ENGINE.extras), WEIGHTS, FACTS) == BASE


def test_topology_and_layout_are_whole() -> None:
    """Each size and flag stands by itself, also where another one would betray a change."""
    assert BASE.manifest["topology"] == {
        "tp_size": 2,
        "pp_size": 2,
        "pcp_size": 2,
        "dcp_size": 1,
        "stages": [],
    }
    assert BASE.manifest["layout"] == {
        "kv_cache_layout": "LBHNC",
        "stored": "direct",
    }


def test_every_field_of_the_boundary_is_in_one_of_the_tables() -> None:
    """A field that is added must be placed: does it decide bytes or not?"""
    fields = {
        f"{part}{f.name}"
        for part, kind in (
            ("", OffloadingConfig),
            ("groups.", OffloadingGroupConfig),
            ("model.", OffloadingModelConfig),
            ("cache.", OffloadingCacheConfig),
            ("parallel.", OffloadingParallelConfig),
        )
        for f in dataclasses.fields(kind)
    } - {"groups", "model", "cache", "parallel"}
    assert fields == set(DECIDES) | set(PLACES) | {f"parallel.{name}" for name in TOGETHER}


@pytest.mark.parametrize("sizes", [(4, 1, 2), (4, 2, 1), (1, 4, 2), (2, 1, 4), (1, 1, 8)])
def test_other_parallel_sizes_are_another_namespace(sizes: tuple[int, int, int]) -> None:
    """Direct pages of another topology are never found."""
    tp, pp, pcp = sizes
    parallel = dataclasses.replace(CONFIG.parallel, tp_size=tp, pp_size=pp, pcp_size=pcp)
    config = dataclasses.replace(CONFIG, parallel=parallel)
    assert namespace(EngineConfig(config, ENGINE.extras), WEIGHTS, FACTS) != BASE


def _stages(first: int) -> list[dict[int, tuple[str, ...]]]:
    """Four layers in two stages, the first with so many."""
    names = ("l.0", "l.1", "l.2", "l.3")
    return [{5: (), 3: names[:first]}, {5: ("l.9",), 3: names[first:]}]


def test_which_stage_has_which_layer_decides_where_ranks_bytes_are_apart() -> None:
    """As many bytes of as many layers, in another order; canonical pages are in the model's."""
    even, uneven = (dataclasses.replace(FACTS, stages=_stages(n)) for n in (2, 3))
    one, other = (namespace(ENGINE, WEIGHTS, facts) for facts in (even, uneven))
    assert first_difference(one, other) == "topology.stages[0].3[2]: absent here, 'l.2' there"
    assert one.manifest["topology"]["stages"][1] == {"3": ["l.2", "l.3"], "5": ["l.9"]}
    canonical = [
        namespace(ENGINE, WEIGHTS, dataclasses.replace(facts, stored_layout="canonical"))
        for facts in (even, uneven)
    ]
    assert canonical[0] == canonical[1]


@pytest.mark.parametrize("stored", ["canonical", "replicated"])
def test_bytes_without_topology_are_shared_between_topologies(stored: str) -> None:
    """Stored under one rank, found under two; but never by those who store them otherwise."""

    def of(tp: int, pp: int, stored: str, layers: Any) -> Namespace:
        sizes = {"tp_size": tp, "pp_size": pp, "pcp_size": 1, "world_size": tp * pp}
        config = dataclasses.replace(
            CONFIG, parallel=dataclasses.replace(CONFIG.parallel, rank=tp - 1, **sizes)
        )
        facts = dataclasses.replace(FACTS, stored_layout=stored, layer_names=layers)
        return namespace(EngineConfig(config), WEIGHTS, facts)

    names = {3: ("l.0", "l.1"), 5: ("l.2",)}
    whole = of(1, 1, stored, {})
    assert whole == of(2, 1, stored, {}) == of(4, 2, stored, names)
    assert whole != of(4, 2, stored, names | {5: ("l.3",)})
    difference = first_difference(whole, of(1, 1, "direct", {}))
    assert difference == f"layout.stored: {stored!r} here, 'direct' there"


def test_order_of_groups_does_not_matter() -> None:
    """Groups are known by their ids."""
    config = dataclasses.replace(CONFIG, groups=CONFIG.groups[::-1])
    assert namespace(EngineConfig(config, ENGINE.extras), WEIGHTS, FACTS) == BASE


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"name": "sglang"}, "engine.name: 'vllm' here, 'sglang' there"),
        ({"version": "0.33.0"}, "engine.version: '0.32.0' here, '0.33.0' there"),
        ({"kv_format": 2}, "engine.kv_format: 1 here, 2 there"),
        ({"chunk_bytes": {3: 8192, 5: 8192}}, "groups[1].chunk_bytes: 4096 here, 8192 there"),
        ({"key_hash": KeyHash("xxhash", "x")}, "hash.algorithm: 'sha256' here, 'xxhash' there"),
        ({"model": {"quantization": "fp8"}}, "model.facts.quantization: None here, 'fp8' there"),
        ({"model": {}}, "model.facts.quantization: None here, absent there"),
    ],
)
def test_facts_of_the_engine_decide_too(change: dict[str, Any], difference: str) -> None:
    """Engine, its version and format, sizes of chunks, key hash, model."""
    other = namespace(ENGINE, WEIGHTS, dataclasses.replace(FACTS, **change))
    assert other.id != BASE.id
    assert first_difference(BASE, other) == difference


def test_other_weights_are_another_namespace() -> None:
    """Under the same name and path."""
    other = namespace(ENGINE, Fingerprint("files", "xyz"), FACTS)
    assert first_difference(BASE, other) == "model.weights.value: 'abc' here, 'xyz' there"


def test_fields_of_a_newer_engine_are_in_the_namespace() -> None:
    """We do not know what they mean, so they must be equal."""
    other = namespace(EngineConfig(CONFIG, {"model.max_model_len": 4096}), WEIGHTS, FACTS)
    difference = first_difference(BASE, other)
    assert difference == "extras.model.max_model_len: 8192 here, 4096 there"


def test_texts_of_fields_that_nobody_knows_are_digests() -> None:
    """They may be credentials, and manifests are readable; numbers are shown as they are."""

    def of(token: str) -> Namespace:
        extras = {"new": {"url": [token, 7, True, None, 0.5]}, "cache.name": token}
        return namespace(EngineConfig(CONFIG, extras), WEIGHTS, FACTS)

    one = of("hunter2")
    assert "hunter2" not in one.text
    assert one.manifest["extras"]["new"]["url"][1:] == [7, True, None, 0.5]
    assert one == of("hunter2")
    assert str(first_difference(one, of("hunter3"))).startswith("extras.new.url[0]: 'sha256:")


def test_with_a_model_id_the_name_does_not_count() -> None:
    """The user says which weights are the same, under any path."""
    said = Fingerprint("model_id", "prod-7")
    other = EngineConfig(changed("model.name", "/other/path"), ENGINE.extras)
    assert namespace(ENGINE, said, FACTS) == namespace(other, said, FACTS)
    assert namespace(ENGINE, Fingerprint("model_id", "prod-8"), FACTS) != namespace(
        ENGINE, said, FACTS
    )


def test_notes_are_not_in_the_namespace() -> None:
    """A warning is for people."""
    assert namespace(ENGINE, Fingerprint("files", "abc", "careful"), FACTS) == BASE


def test_the_manifest_survives_its_own_json() -> None:
    """What is stored beside its hash compares equal when it is read again."""
    again = Namespace(json.loads(BASE.text))
    assert again.digest == BASE.digest
    assert first_difference(BASE, again) is None


def test_chunk_bytes_must_be_about_the_configured_groups() -> None:
    """A group without a size, or a size without a group, is a mistake of the adapter."""
    with pytest.raises(ConfigError, match=r"groups \[3\].*\[3, 5\]"):
        namespace(ENGINE, WEIGHTS, dataclasses.replace(FACTS, chunk_bytes={3: 1}))


def test_key_hash_knows_which_seeds_last() -> None:
    """A set seed is digested, never written; a random one is warned about."""
    assert key_hash("sha256", {}) == KeyHash("sha256", "the engine's default")
    assert key_hash(None, {}) == KeyHash(None, "the engine's default")
    seeded = key_hash("xxhash", {"PYTHONHASHSEED": "secret"})
    assert seeded.note is None
    assert "secret" not in seeded.seed
    assert seeded != key_hash("xxhash", {"PYTHONHASHSEED": "other"})
    for algorithm in ("xxhash", "xxhash_cbor"):
        note = key_hash(algorithm, {}).note
        assert note is not None
        assert "PYTHONHASHSEED" in note


def test_extras_whose_bytes_the_facts_tell_stay_out() -> None:
    """What an adapter has settled makes no difference; what it has not still does."""
    facts = dataclasses.replace(FACTS, settled_extras=frozenset({"model.max_model_len"}))
    one, other = (
        namespace(EngineConfig(CONFIG, {"model.max_model_len": n}), WEIGHTS, facts)
        for n in (4096, 8192)
    )
    assert one == other
    unknown = EngineConfig(CONFIG, {"model.max_model_len": 4096, "cache.new": 1})
    assert first_difference(namespace(unknown, WEIGHTS, facts), one) == (
        "extras.cache.new: 1 here, absent there"
    )
