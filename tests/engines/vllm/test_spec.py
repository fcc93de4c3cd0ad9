"""The spec: stock's settings as they stand, every field of the configuration, what is refused."""

import ast
import contextlib
import copy
import importlib
import logging
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.v1.kv_offload.tiering.spec as stock_tiering
from rig import Rig, running
from shapes import ONE_GROUP, OURS, Group, engine_config, kv_cache_config, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from undercroft.config import from_engine
from undercroft.engines.vllm import UndercroftSpec, hosts
from undercroft.engines.vllm.rank_layout import rank_layout
from undercroft.errors import ConfigError, KvError, LayoutMismatch
from undercroft.settings import limits

CHUNK = 8192  # of a Group(): two layers, one block of 4 KiB in each
HOST = {"host": "1MiB"}


def disk(path, capacity="64MiB", **more):
    return {"tiers": [{"type": "disk", "path": str(path), "capacity": capacity, **more}]}


def config_of(extra, groups=ONE_GROUP, **changes):
    """What vLLM makes of it for the spec."""
    return build_offloading_config(
        engine_config({**OURS, **extra}, **changes), kv_cache_config(groups, 64)
    )


def namespace_of(rig):
    return rig.hierarchy.levels[0].tier.namespace


# --- a drop-in for stock ----------------------------------------------------------------------


def documented_examples():
    """The configurations in the docstring of stock's tiering spec, as written there."""
    for text in re.findall(r"^\{.*?^\}", stock_tiering.__doc__, re.MULTILINE | re.DOTALL):
        yield ast.literal_eval(re.sub(r"#.*", "", text))


def test_the_first_documented_example_runs_unchanged():
    """Only the class is named otherwise (and the 10 GB are fewer here)."""
    example = next(documented_examples())
    assert {"cpu_bytes_to_use", "block_size", "eviction_policy"} < set(example)
    with running({**example, "cpu_bytes_to_use": 4 << 20}) as rig:
        rig.run(prompt(1, 160))
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        assert rig.hierarchy.levels == ()


STOCK = {
    "host memory only": {"cpu_bytes_to_use": 4 << 20},
    "as a flag writes it": {"cpu_bytes_to_use": float(4 << 20)},
    "as text": {"cpu_bytes_to_use": str(4 << 20)},
    "chunks of 64 tokens": {"cpu_bytes_to_use": 4 << 20, "block_size": 64},
    "chunks of 3 blocks": {"cpu_bytes_to_use": 4 << 20, "blocks_per_chunk": 3},
    "arc": {"cpu_bytes_to_use": 4 << 20, "eviction_policy": "arc"},
    "generated tokens too": {"cpu_bytes_to_use": 4 << 20, "offload_prompt_only": False},
    "a threshold of one": {"cpu_bytes_to_use": 4 << 20, "store_threshold": 1},
    "described events": {"cpu_bytes_to_use": 4 << 20, "self_describing_kv_events": True},
    "backpressure": {"cpu_bytes_to_use": 4 << 20, "backpressure": {"a": 1}},
    "no tier": {"cpu_bytes_to_use": 4 << 20, "secondary_tiers": []},
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("stock_class", ["CPUOffloadingSpec", "TieringOffloadingSpec"])
def test_stock_settings_run_unchanged(name, stock_class):
    """What stock takes, we take, with the same meaning: the same chunks, the same hits."""
    extra = {"spec_name": stock_class, **STOCK[name]}
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == stock_class
    with running(extra | OURS) as rig:
        per_chunk = rig.manager.hierarchy and rig.on_scheduler.connector_scheduler.config
        tokens = per_chunk.kv_group_configs[0].tokens_per_chunk
        assert tokens == {"chunks of 64 tokens": 64, "chunks of 3 blocks": 48}.get(name, 16)
        assert per_chunk.offload_prompt_only is (name != "generated tokens too")
        rig.run(prompt(1, 192))
        assert rig.run(prompt(1, 192)).num_hit_tokens == 192
        assert rig.num_loads_checked == 1


def test_stock_folder_tier_runs_unchanged(tmp_path):
    """`fs` with `root_dir` becomes a bounded disk, and a later engine finds what is on it."""
    extra = {
        "cpu_bytes_to_use": 4 << 20,
        "eviction_policy": "lru",
        "secondary_tiers": [
            {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 2, "n_write_threads": 1}
        ],
    }
    bounds = []
    for engine_id, hits in (("one", 0), ("two", 160)):
        with running(extra, engine_id=engine_id) as rig:
            assert rig.run(prompt(1, 160)).num_hit_tokens == hits
            (level,) = rig.hierarchy.levels
            bounds.append(level.tier.capacity_bytes)
    assert 0 < bounds[0] <= 100 << 30


def test_the_bound_of_a_folder_tier_stays_the_same_from_start_to_start(tmp_path, monkeypatch):
    """What earlier runs hold counts as free, or the bound would shrink at each start."""
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {"cpu_bytes_to_use": 4 << 20, "secondary_tiers": [tier]}
    used = lambda: sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())  # noqa: E731
    size = 8 << 30
    monkeypatch.setattr(limits, "_file_system", lambda _path: (size, size - used()))
    bounds = []
    for engine_id in ("one", "two", "three"):
        with running(extra, engine_id=engine_id) as rig:
            for label in range(8):
                rig.run([*prompt(label, 300), hash(engine_id)])
            bounds.append(rig.hierarchy.levels[0].tier.capacity_bytes)
        assert used() > 1 << 20
    assert bounds == [size // 2] * 3


def test_stock_threshold_runs_unchanged():
    """`store_threshold` filters host memory, as in stock's CPU spec."""
    extra = {"cpu_bytes_to_use": 4 << 20, "store_threshold": 2, "max_tracker_size": 64_000}
    with running(extra) as rig:
        assert [rig.run(prompt(1, 160)).num_hit_tokens for _ in range(3)] == [0, 0, 160]


def test_settings_from_elsewhere_reach_the_engine(monkeypatch):
    """What the base class reads from `extra_config` only is taken from all places."""
    monkeypatch.setenv("UNDERCROFT_SELF_DESCRIBING_KV_EVENTS", "true")
    monkeypatch.setenv("UNDERCROFT_OFFLOAD_PROMPT_ONLY", "false")
    spec = UndercroftSpec(config_of(HOST))
    assert spec.kv_events_config.self_describing_kv_events is True
    assert spec.offload_prompt_only is False
    monkeypatch.undo()
    spec = UndercroftSpec(config_of({**HOST, "self_describing_kv_events": "false"}))
    assert spec.kv_events_config.self_describing_kv_events is False


# --- fields -----------------------------------------------------------------------------------


def test_the_users_dictionary_is_never_changed(tmp_path):
    """It is shared with the engine and with other connectors."""
    extra = {**HOST, **disk(tmp_path), "admission": {"type": "frequency", "sights": 1}}
    with running(extra) as rig:
        given = rig.config.kv_transfer_config.kv_connector_extra_config
        before = copy.deepcopy(given)
        rig.run(prompt(1, 160))
        rig.on_scheduler.reset_cache()
        rig.settle()
        type(rig.on_scheduler).build_prom_metrics  # noqa: B018 - read by the API process
        UndercroftSpec.build_metric_definitions(given)
        assert given == before


@pytest.mark.parametrize(("host", "num_slots"), [("64KiB", 8), ("68KiB", 8), ("1MiB", 128)])
def test_the_size_of_a_chunk_and_how_many_fit(host, num_slots):
    """A slot is a chunk's bytes on all ranks, rounded up to 4 KiB; `host` is the total."""
    with running({"host": host}) as rig:
        slots = rig.hierarchy.pool.slots
        assert (slots.slot_bytes, slots.capacity(0)) == ((CHUNK,), num_slots)
    with running({"host": host, "blocks_per_chunk": 2}) as rig:
        slots = rig.hierarchy.pool.slots
        assert (slots.slot_bytes, slots.capacity(0)) == ((2 * CHUNK,), num_slots // 2)
    with running({"host": host}, groups=(Group(num_layers=1, head_size=8),)) as rig:
        assert rig.hierarchy.pool.slots.slot_bytes == (4096,), "padded"


def test_tokens_that_fit_are_said_at_the_start(caplog):
    """One line a start: how many tokens host memory holds, all groups counted."""
    with caplog.at_level(logging.INFO), running({"host": "1MiB"}):
        assert "host 1 MiB, about 2048 tokens of this model, lru" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO), running({"host": "1MiB"}, groups=(Group(), Group())):
        assert "about 1024 tokens" in caplog.text


def test_one_line_at_the_start_says_what_was_decided(caplog, tmp_path):
    """Levels, sizes, what fits, policy, threads, how the disk is reached, and the key space."""
    tier = {"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "name": "nvme"}
    tier |= {"num_threads": 3, "policy": "arc"}
    with caplog.at_level(logging.INFO), running({"host": "1MiB", "tiers": [tier]}):
        ours = [r for r in caplog.records if r.name.startswith("undercroft") and r.levelno == 20]
    (line,) = [record.getMessage() for record in ours]
    for part in (
        "ready: key space ",
        "host 1 MiB, about 2048 tokens of this model, lru; ",
        f"nvme (disk at {tmp_path}) 64 MiB, about 131072 tokens of this model, arc, 3 threads, ",
    ):
        assert part in line
    assert line.endswith(("O_DIRECT", "through the page cache"))


def test_the_line_at_the_start_says_who_moves_the_bytes(caplog, tmp_path):
    """A process, and the threads that ask it, or do it themselves until there is one."""
    (tier,) = disk(tmp_path, mover_process=True, num_threads=6)["tiers"]
    with caplog.at_level(logging.INFO), running({"host": "1MiB", "tiers": [tier]}) as rig:
        assert ", 3 threads, a mover process of 6 threads that is starting, " in caplog.text
        assert rig.hierarchy.levels[0].tier.await_mover(60)
        assert rig.hierarchy.levels[0].tier.describe().startswith("a mover process of 6 threads, ")


NAMESPACE = {
    "model name": {"model_config__model": "another"},
    "KV dtype": {"cache_config__cache_dtype": "fp8_e4m3"},
    "KV layout": {"layout": "LBNHC"},
    "bytes of a block": {"groups": (Group(num_layers=4, head_size=16),)},
    "layers": {"groups": (Group(num_layers=2), Group(num_layers=2))},
    "group ids": {"groups": (Group(kept=False), Group())},
    "agnostic": {"model_config__get_total_num_kv_heads": lambda: 7},
}


@pytest.mark.parametrize("name", NAMESPACE)
def test_what_makes_chunks_different_keeps_them_apart(name, tmp_path):
    """Two configurations on one directory, same tokens: neither finds what is the other's."""
    extra = {**HOST, **disk(tmp_path)}
    with running(extra, engine_id="one") as rig:
        rig.run(prompt(1, 160))
        first = namespace_of(rig)
    with running(extra, engine_id="two", **NAMESPACE[name]) as rig:
        assert rig.run([*prompt(1, 160), 1]).num_hit_tokens == 0
        second = namespace_of(rig)
    assert first.id != second.id
    with running(extra, engine_id="three") as rig:
        assert namespace_of(rig).id == first.id
        assert rig.run([*prompt(1, 160), 2]).num_hit_tokens == 160


@pytest.mark.parametrize("key", ["blocks_per_chunk", "canonical_layout", "model_id"])
def test_settings_that_make_chunks_different_keep_them_apart(key, tmp_path):
    """As above, by what the user writes."""
    value = {"blocks_per_chunk": 2, "canonical_layout": True, "model_id": "mine"}[key]
    groups = (Group(window=160),)  # canonical pages only if asked for
    extra = {**HOST, **disk(tmp_path)}
    with running(extra, engine_id="one", groups=groups) as rig:
        rig.run(prompt(1, 160))
    with running({**extra, key: value}, engine_id="two", groups=groups) as rig:
        assert rig.run([*prompt(1, 160), 1]).num_hit_tokens == 0
    with running(extra, engine_id="three", groups=groups) as rig:
        assert rig.run([*prompt(1, 160), 2]).num_hit_tokens == 160


def test_canonical_and_replicated_layouts_are_served_with_one_rank():
    """With one rank a canonical page is the page: bytes come back right."""
    with running({**HOST, "canonical_layout": True, "blocks_per_chunk": 2}) as rig:
        assert rig.on_worker.connector_worker.spec.config.canonical_layout
        rig.run(prompt(1, 160))
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        assert rig.num_loads_checked == 1


def test_tokens_per_hash_finer_than_a_block():
    """Several hashes a block: keys are those at the ends of chunks."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    groups = (Group(), Group())
    extra = {**HOST, "blocks_per_chunk": 2}
    with running(extra, groups=groups, cache_config__prefix_match_unit=8) as rig:
        rig.hasher = get_request_block_hasher(8, sha256)
        assert rig.on_scheduler.connector_scheduler.config.tokens_per_hash == 8
        rig.run(prompt(1, 160))
        assert len(rig.host_keys()) == 2 * 5
        assert rig.run([*prompt(1, 152), 3]).num_hit_tokens == 128
        assert rig.num_loads_checked == 1


def test_a_group_that_hashes_do_not_divide_is_refused_in_one_line():
    """The message names the group, the two numbers, and something that helps."""
    config = config_of(HOST)
    group = SimpleNamespace(group_id=5, tokens_per_block=4, layer_names=("indexer.0",))
    fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
    wrong = SimpleNamespace(**{**fields, "groups": (group,)})
    with pytest.raises(ConfigError) as caught:
        UndercroftSpec(wrong)
    text = str(caught.value)
    assert "\n" not in text
    for word in ("group 5", "indexer.0", "tokens_per_block 4", "tokens_per_hash 16", "--prefix"):
        assert word in text


def test_a_replica_over_several_hosts_is_refused(monkeypatch):
    """At a worker's start, before any memory is taken, with the sizes and a way out."""
    sizes = {"parallel_config__tensor_parallel_size": 2, "parallel_config__world_size": 2}
    engine = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=2))
    monkeypatch.setattr(hosts, "get_current_vllm_config_or_none", lambda: engine)
    spec = UndercroftSpec(config_of(HOST, **sizes))
    with pytest.raises(ConfigError, match=r"2 ranks .*tp 2.* on 2 hosts.*one host") as caught:
        spec.get_worker(CanonicalKVCaches([], [[]]))
    assert "\n" not in str(caught.value)
    hosts.check_one_host(from_engine(config_of(HOST)).config)  # one rank is on one host


def test_pages_that_the_engine_has_no_room_for_are_refused():
    """`worker_kv_bytes_per_block` bounds what the pages of a block can take."""
    config = from_engine(config_of(HOST)).config
    tensor = CanonicalKVCacheTensor(torch.zeros((4, 8192), dtype=torch.int8), 8192)
    refs = [[CanonicalKVCacheRef(0, 8192), CanonicalKVCacheRef(0, 1)]]
    with pytest.raises(LayoutMismatch, match=r"8193 bytes.*8192 bytes \(worker_kv_bytes"):
        rank_layout(CanonicalKVCaches([tensor], refs), config)


def test_a_rank_outside_of_the_world_is_refused():
    """The worker's rank is its seat in the region."""
    with pytest.raises((ConfigError, KvError), match="rank"):
        Rig(HOST, parallel_config__rank=1)


def test_replicas_share_the_disk_and_not_the_slots(tmp_path):
    """Data parallel: what one stored, the other finds on disk, in its own memory."""
    extra = {**HOST, **disk(tmp_path)}

    def replica(index):
        return running(
            extra,
            engine_id=f"engine_dp{index}",
            parallel_config__data_parallel_size=2,
            parallel_config__data_parallel_index=index,
        )

    with replica(0) as one, replica(1) as two:
        assert namespace_of(one).id == namespace_of(two).id
        one.run(prompt(1, 160))
        assert not two.host_keys()
        for extra_token in range(100):
            job = two.run([*prompt(1, 160), extra_token])
            if job.num_hit_tokens:
                break
        assert job.num_hit_tokens == 160
        assert two.num_loads_checked == 1
        # Both write at once: neither overwrites what is the other's.
        jobs = [(rig, rig.submit(prompt(label, 160))) for label in (2, 3) for rig in (one, two)]
        for _ in range(20_000):
            one.step()
            two.step()
            if all(job.request.is_finished() for _, job in jobs):
                break
        assert all(job.request.is_finished() for _, job in jobs)
        total = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())
        assert total <= 64 << 20


def test_two_engines_never_meet():
    """Other ids: other regions. One id while both start: the second is refused, and told why."""
    with running(HOST, engine_id="one") as rig:
        rig.run(prompt(1, 160))
        with running(HOST, engine_id="other") as other:
            assert other.run(prompt(1, 160)).num_hit_tokens == 0
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
    taken = {**HOST, "join_deadline_s": 0.2}
    cache = kv_cache_config((Group(),), 64)
    config = engine_config({**OURS, **taken}, engine_id="same")
    tensors = {f"g0.layer{i}": torch.zeros((64, 1, 16, 64)) for i in range(2)}
    first, second = (OffloadingConnector(config, KVConnectorRole.WORKER, cache) for _ in range(2))
    first.register_kv_caches(tensors)
    try:
        with pytest.raises(ConfigError, match="another engine with the same engine_id") as caught:
            second.register_kv_caches(tensors)
        assert "\n" not in str(caught.value)
    finally:
        first.shutdown()


def test_an_engine_of_the_same_id_that_starts_later_gets_its_own_region():
    """A joined region has no name any more, so a restart under a fixed id never finds it."""
    with running(HOST, engine_id="fixed") as rig:
        rig.run(prompt(1, 160))
        with running(HOST, engine_id="fixed") as later:
            assert later.run(prompt(1, 160)).num_hit_tokens == 0
            assert later.run(prompt(1, 160)).num_hit_tokens == 160
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        assert rig.num_loads_checked == 1


def test_a_scheduler_of_another_configuration_than_its_workers_is_refused():
    """The two sides must agree on everything they were told."""
    extra = {**HOST, "join_deadline_s": 0.2}
    cache = kv_cache_config((Group(),), 64)
    config = engine_config({**OURS, **extra}, engine_id="split")
    worker = OffloadingConnector(config, KVConnectorRole.WORKER, cache)
    worker.register_kv_caches({f"g0.layer{i}": torch.zeros((64, 1, 16, 64)) for i in range(2)})
    other = engine_config({**OURS, **extra, "host": "2MiB"}, engine_id="split")
    try:
        with pytest.raises(KvError) as caught:
            OffloadingConnector(other, KVConnectorRole.SCHEDULER, cache)
        assert "\n" not in str(caught.value)
    finally:
        worker.shutdown()


def test_importing_the_spec_has_no_side_effect(tmp_path, monkeypatch):
    """The API process imports it only for its metrics: no thread, file or device."""

    def state():  # of other tests something may be about to go, so what is new counts
        open_files = set()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                open_files.add(str(fd.readlink()))
        return {*threading.enumerate(), *open_files, *Path.cwd().iterdir()}

    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "undercroft"]:
        monkeypatch.delitem(sys.modules, name)
    before = state()
    again = importlib.import_module("undercroft.engines.vllm").UndercroftSpec
    assert again is not UndercroftSpec
    again.build_metric_definitions({})
    assert state() <= before


def test_a_path_below_the_users_home(tmp_path, monkeypatch):
    """`~` is the home folder, for the bound and for the files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with running({**HOST, **disk("~/kv")}) as rig:
        rig.run(prompt(1, 160))
    assert any((tmp_path / "kv").rglob("seg-*"))
