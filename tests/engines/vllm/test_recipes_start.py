"""Recipes, continued: starting with other settings, weights and layouts, and after a kill."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from managers import ONE_PAGE, ours
from replicas import Layers, Replica, Sizes
from rig import running
from shapes import Group, engine_config, kv_cache_config, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from undercroft.engines.vllm import UndercroftSpec, spec
from undercroft.errors import ConfigError
from undercroft.hierarchy.rendezvous import region_path

SHARED = Path("/dev/shm")

# --- identity ---------------------------------------------------------------------------------


def _stock_folder(path, **changes):
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": []}
    config = build_offloading_config(engine_config(extra, **changes), kv_cache_config(ONE_PAGE, 64))
    mapper = FileMapper.from_offloading_spec(
        root_dir=str(path),
        offloading_spec=TieringOffloadingSpec(config),
        blocks_per_file=1,
        parallel_agnostic=True,
    )
    return os.path.dirname(mapper.get_config_file_path())  # noqa: PTH120 - theirs is a string


def _our_folder(path, **changes):
    with ours(path, 16, **changes) as m:
        return m.hierarchy.levels[0].tier.namespace.id


def test_b04_another_kv_layout_is_another_folder(tmp_path):
    """Stock shares one folder between two memory orders of the same pages."""
    layouts = ({"cache_config__kv_cache_layout": name} for name in ("LBHNC", "LBNHC"))
    assert len({_stock_folder(tmp_path, **layout) for layout in layouts}) == 1
    assert len({_our_folder(tmp_path, layout=name) for name in ("LBHNC", "LBNHC")}) == 2


def test_b05_other_weights_behind_one_path_are_another_folder(tmp_path):
    """A model replaced in place; and put back, it is found again."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["A"], "rope_theta": 10000.0}')
    ids, stocks = [], []
    header = b'{"w":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}'
    for byte in (1, 2, 1):
        weights = len(header).to_bytes(8, "little") + header + bytes([byte]) * 4096
        (model / "model.safetensors").write_bytes(weights)
        changes = {"model_config__model": str(model)}
        stocks.append(_stock_folder(tmp_path, **changes))
        ids.append(_our_folder(tmp_path, **changes))
    assert len(set(stocks)) == 1
    assert ids[0] == ids[2] != ids[1]
    (model / "config.json").write_text('{"architectures": ["A"], "rope_theta": 20000.0}')
    assert _our_folder(tmp_path, model_config__model=str(model)) not in ids


def test_b06_another_tensor_parallel_size_reads_only_bytes_that_are_the_same(tmp_path):
    """Stock shares the folder, though its files differ; here both store the unsharded pages."""
    two = {"parallel_config__tensor_parallel_size": 2, "parallel_config__world_size": 2}
    heads = {"model_config__get_total_num_kv_heads": lambda: 2}
    assert _stock_folder(tmp_path) == _stock_folder(tmp_path, **two, **heads)
    chunks, namespaces = [], set()
    for tp in (1, 2):
        with Replica((Layers(3, 2, 8),), Sizes(tp=tp), bpc=2) as replica:
            replica.fill(1)
            replica.store(0, [3, 5], 0, [1])
            chunks.append(replica.chunk(0, 1).tobytes())
            namespaces.add(replica.namespace.id)
    assert len(namespaces) == len(set(chunks)) == 1


# --- settings ---------------------------------------------------------------------------------

TYPOS = {
    "secondary_tier": ({"host": "1MiB", "secondary_tier": []}, "'secondary_tiers'"),
    "evictionpolicy": ({"host": "1MiB", "evictionpolicy": "arc"}, "'eviction_policy'"),
    "hosst": ({"hosst": "1MiB"}, "'host', .*512MiB"),
    "host_bytes": ({"host_bytes": "1MiB"}, "'host', .*512MiB"),
    "cpu_bytes_to_us": ({"cpu_bytes_to_us": 1}, "'cpu_bytes_to_use', .*512MiB"),
    "rootdir": ({"host": "1MiB", "tiers": [{"type": "fs", "rootdir": "/x"}]}, "'root_dir'"),
    "max_bytes": (
        {"host": "1MiB", "tiers": [{"type": "disk", "path": "/x", "max_bytes": "1GiB"}]},
        "'capacity', .*512MiB",
    ),
    "paht": ({"host": "1MiB", "tiers": [{"type": "disk", "paht": "/x"}]}, "'path'"),
    "10G": ({"host": "10G"}, "host .*[MG]iB"),
    "ten": ({"host": "ten"}, "host .*[MG]iB"),
    "4KiB": ({"host": "4KiB"}, "host is 4096 bytes.*8192"),
    "-1": ({"host": -1}, "host"),
    "LRU2": ({"host": "1MiB", "policy": "lru2"}, "policy of host memory.*'lru'"),
    "memroy": (
        {"host": "1MiB", "tiers": [{"type": "memroy", "capacity": "1GiB"}]},
        "type of tier memroy.*'memory'",
    ),
    "frequncy": ({"host": "1MiB", "admission": "frequncy"}, "'frequency'"),
    "sigts": (
        {"host": "1MiB", "admission": {"type": "frequency", "sigts": 3}},
        "'sigts'; it takes sights, max_tracked",
    ),
    "nothing": ({}, "host is missing.*32GiB"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_b16_a_typo_is_refused_in_one_line(name, tmp_path):
    """The line names what was written, the nearest right word, and the unit where it is a size."""
    extra, words = TYPOS[name]
    with pytest.raises(ConfigError) as caught, running(extra, groups=(Group(),)):
        pass
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(words, text), text


# --- shared memory after SIGKILL ----------------------------------------------------------------

KILLED = """
import sys, time
from undercroft.clock import SystemClock
from undercroft.hierarchy.region import Region, RegionConfig

config = RegionConfig(engine_id=sys.argv[1], num_ranks=1, total_bytes=1 << 20, identity=bytes(32))
rank = Region.join(config, role=0, chunk_bytes=(8192,), deadline_s=60, clock=SystemClock())
if sys.argv[2] == "joined":
    scheduler = Region.join(config, role="scheduler", deadline_s=60, clock=SystemClock())
print("ready", flush=True)
time.sleep(100)
"""


def start_and_kill(engine_id, state):
    """An engine's processes, as one, killed before or after its scheduler had joined."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, engine_id, state], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_b15_nothing_is_left_after_sigkill():
    """Killed three times while serving: no file, though nobody cleaned up."""
    for _ in range(3):
        start_and_kill(f"b15-serving-{os.getpid()}", "joined")
        assert not region_path(SHARED, f"b15-serving-{os.getpid()}").exists()


@pytest.mark.parametrize("is_same", [True, False], ids=["same id", "other id"])
def test_b15_a_region_of_a_dead_start_is_replaced(is_same, caplog, monkeypatch):
    """Killed while starting, then started under the same id, or another one: found and removed.

    Before the memory that is free is counted: or one kill would keep the engine from starting for
    as long as the file lies there.
    """
    name = f"b15-starting-{os.getpid()}"
    stale = region_path(SHARED, name)
    start_and_kill(name, "waiting")
    assert stale.exists(), "the recipe does not bite"
    counted = []
    limits = spec.host_limits
    monkeypatch.setattr(spec, "host_limits", lambda: counted.append(stale.exists()) or limits())
    with running({"host": "1MiB"}, engine_id=name if is_same else "b15-other") as rig:
        assert counted == [False]
        assert "the region of a dead engine" in caplog.text
        assert not stale.exists()
        rig.run(prompt(1, 160))
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160


@pytest.mark.parametrize("name", ["LRU2", "memroy", "frequncy", "sigts"])
def test_b16_a_plug_in_that_is_not_there_is_found_before_the_model_is_loaded(name):
    """The spec is made first; the scheduler's side would be minutes later."""
    config = build_offloading_config(engine_config(TYPOS[name][0]), kv_cache_config((Group(),), 64))
    with pytest.raises(ConfigError, match=TYPOS[name][1]):
        UndercroftSpec(config)
