"""A user of stock vLLM changes the class name and nothing else."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import ConfigError
from undercroft.settings import load
from undercroft.settings.schema import ENGINE_KEYS, KEYS
from undercroft.settings.stock import STOCK_KEYS, STOCK_TIER_KEYS

GIB = 1024**3
OURS = {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}


def test_documented_single_tier_example() -> None:
    """vLLM's guide, host memory only: the size is the total of all ranks, in both."""
    settings = load({"block_size": 64, "cpu_bytes_to_use": 1000000000} | OURS)
    assert settings.host_bytes == 1_000_000_000
    assert settings.engine["block_size"] == 64
    assert settings.tiers == ()
    assert settings.notes == ("cpu_bytes_to_use became host = 953.67 MiB",)


def test_documented_multi_tier_example() -> None:
    """vLLM's guide, host memory and a folder: one line for each key that changed its name."""
    written = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10737418240,
        "block_size": 16,
        "eviction_policy": "lru",
        "secondary_tiers": [
            {
                "type": "fs",
                "root_dir": "/mnt/kv_cache",
                "n_read_threads": 32,
                "n_write_threads": 16,
            }
        ],
    }
    settings = load(written | OURS)
    assert settings.host_bytes == 10 * GIB
    assert settings.policy == "lru"
    (tier,) = settings.tiers
    assert (tier.type, tier.capacity_bytes, tier.events) == ("disk", None, False)
    assert tier.options == {"path": "/mnt/kv_cache", "num_threads": 48}
    where = "secondary_tiers[0] in kv_connector_extra_config"
    assert settings.notes == (
        "cpu_bytes_to_use became host = 10 GiB",
        "eviction_policy became policy = lru",
        "secondary_tiers became tiers (1 given)",
        f"{where}: type fs became disk",
        f"{where}: root_dir became path = /mnt/kv_cache",
        f"{where}: n_read_threads and n_write_threads became num_threads = 48",
    )
    assert all("\n" not in note for note in settings.notes)


def test_documented_example_of_the_tiering_class() -> None:
    """The class's own docstring: its example tier keeps nothing there either, and is left out."""
    settings = load(
        {
            "cpu_bytes_to_use": 10737418240,
            "block_size": 16,
            "eviction_policy": "lru",
            "secondary_tiers": [{"type": "example", "custom_param": 67}],
        }
    )
    assert settings.tiers == ()
    assert any("keeps no bytes" in note for note in settings.notes)


def test_offloading_size_flag() -> None:
    """`--kv-offloading-size 4` writes a float; stock cuts it to a whole number."""
    assert load({"cpu_bytes_to_use": 4 * float(1 << 30)}).host_bytes == 4 * GIB


def test_vllm_reads_our_shape_as_no_chunking_option() -> None:
    """The engine reads only keys of its own; ours must not be among them by accident."""
    assert not set(KEYS) & (set(ENGINE_KEYS) | set(STOCK_KEYS))


@pytest.mark.parametrize(("threshold", "rule"), [(0, "always"), (1, "always"), (2, "frequency")])
def test_store_threshold_keeps_its_meaning(threshold: int, rule: str) -> None:
    """From 2 it filters, and says so; below, it says that it does nothing."""
    settings = load({"cpu_bytes_to_use": GIB, "store_threshold": threshold})
    assert settings.admission == rule
    if rule == "frequency":
        assert settings.admission_options == {"sights": 2, "max_tracked": 64_000}
    assert any(note.startswith("store_threshold") for note in settings.notes)


def test_store_threshold_takes_its_tracker_along() -> None:
    """The tracker's size arrives with the rule."""
    settings = load({"host": GIB, "store_threshold": 3, "max_tracker_size": 100})
    assert settings.admission_options == {"sights": 3, "max_tracked": 100}


def test_the_old_name_of_fs_is_deprecated() -> None:
    """`fs_python` works, with a line that says what to write."""
    settings = load({"host": GIB, "secondary_tiers": [{"type": "fs_python", "root_dir": "/x"}]})
    assert settings.tiers[0].type == "disk"
    assert any("fs_python is deprecated, write fs or disk" in note for note in settings.notes)


@pytest.mark.parametrize(
    "key", ["backpressure", "cache_policy_module_path", "max_load_tokens", "max_offload_tokens"]
)
def test_keys_without_a_counterpart_say_so(key: str) -> None:
    """Accepted, with the reason why nothing follows."""
    settings = load({"host": GIB, key: "x"})
    (note,) = settings.notes
    assert note.startswith(f"{key} in kv_connector_extra_config has no effect: ")


def test_every_key_of_stocks_fs_tier() -> None:
    """All that its constructor takes, and ours beside it."""
    (tier,) = load(
        {
            "host": GIB,
            "tiers": [
                {
                    "type": "fs",
                    "root_dir": "/x",
                    "n_read_threads": 4,
                    "n_write_threads": 100,
                    "enable_kv_events": True,
                    "locality": "REMOTE",
                    "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
                    "module_path": "ignored.by.stock",
                    "capacity": "1GiB",
                    "free_space_floor": 0,
                }
            ],
        }
    ).tiers
    assert (tier.capacity_bytes, tier.events, tier.locality) == (GIB, True, "REMOTE")
    assert tier.options == {"path": "/x", "num_threads": 64, "free_space_floor": 0}


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"type": "fs"}, "lacks root_dir"),
        ({"type": "fs", "root_dir": "/x", "num_threads": 3}, "unknown key 'num_threads'"),
        ({"type": "fs", "root_dir": "/x", "n_read_threads": 0}, "n_read_threads of .* is 0"),
        ({"type": "obj", "store_config": {}}, "'obj': object stores are not served yet"),
        ({"type": "p2p"}, "'p2p': it moves chunks"),
        ({"type": "kvcr"}, "'kvcr': it needs"),
        ({"type": "mori", "dram_capacity_bytes": 1}, "'mori': it needs"),
        ({"type": "MyTier", "module_path": "my.module"}, "'MyTier' by module_path.*plug-in"),
    ],
)
def test_what_cannot_keep_its_meaning_is_refused(tier: dict[str, Any], words: str) -> None:
    """Never a tier less than was asked for, without a word."""
    with pytest.raises(ConfigError, match=words):
        load({"host": GIB, "secondary_tiers": [tier]})


def test_names_are_vllms_own() -> None:
    """Each key the installed vLLM reads is known to us, at the top and in an fs tier."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    package = Path(found.submodule_search_locations[0])
    files = (
        "distributed/kv_transfer/kv_connector/v1/offloading/config.py",
        "v1/kv_offload/base.py",
        "v1/kv_offload/factory.py",
        "v1/kv_offload/cpu/spec.py",
        "v1/kv_offload/tiering/spec.py",
    )
    source = "".join((package / name).read_text(encoding="utf-8") for name in files)
    read = set(re.findall(r"extra_config\.get\(\s*\"(\w+)\"", source))
    assert len(read) >= 10
    assert read <= set(KEYS) | set(STOCK_KEYS) | set(ENGINE_KEYS)

    text = (package / "v1/kv_offload/tiering/fs/manager.py").read_text(encoding="utf-8")
    tier = next(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name == "FileSystemTierManager"
    )
    init = next(node for node in tier.body if getattr(node, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    taken = {arg.arg for arg in init.args.args}
    given = {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
    assert "root_dir" in taken
    assert taken - given <= set(STOCK_TIER_KEYS)
