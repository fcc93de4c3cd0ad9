"""What users write, from four places, becomes one frozen object or one clear line."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from undercroft.errors import ConfigError
from undercroft.settings import Settings, load
from undercroft.settings.schema import ENGINE_KEYS, KEYS, TIER_KEYS, TIER_OPTIONS
from undercroft.settings.sources import merge

GIB = 1024**3
DISK = {"type": "disk", "path": "/nvme/kv", "capacity": "1TiB"}
SHAPE = {"host": "32GiB", "policy": "lru", "tiers": [DISK]}


def test_the_documented_shape() -> None:
    """The shape of the design: bytes are counted, defaults are filled in."""
    settings = load(SHAPE)
    assert settings.host_bytes == 32 * GIB
    assert settings.max_queued_write_bytes == 8 * GIB
    (tier,) = settings.tiers
    assert (tier.name, tier.type, tier.capacity_bytes) == ("disk", "disk", 1024**4)
    assert tier.options == {"path": "/nvme/kv"}
    assert settings.notes == ()


def test_defaults_are_the_designs() -> None:
    """Deadlines and shares of the design, when nothing is written."""
    settings = load({"host": 4096})
    assert dataclasses.replace(settings, max_queued_write_bytes=1) == Settings(
        host_bytes=4096, max_queued_write_bytes=1
    )
    assert settings.lookup_deadline_s == 0.020
    assert settings.promote_deadline_s == 2
    assert settings.drain_deadline_s == 1
    assert settings.shutdown_deadline_s == 3
    assert settings.open_deadline_s == 60
    assert settings.join_deadline_s == 60
    assert settings.restore_share_ratio == 1
    assert (settings.record, settings.record_max_bytes) == (None, 64 * 1024**2)
    assert settings.record_block_tokens == 128
    assert settings.offload_prompt_only
    assert (settings.policy, settings.admission, settings.tiers) == ("lru", "always", ())


VALUES: dict[str, tuple[Any, str, Any]] = {
    "host": ("2GiB", "host_bytes", 2 * GIB),
    "policy": ("arc", "policy", "arc"),
    "admission": ("frequency", "admission", "frequency"),
    "tiers": (json.dumps([DISK]), "tiers", load(SHAPE).tiers),
    "model_id": ("7", "model_id", "7"),
    "offload_prompt_only": ("false", "offload_prompt_only", False),
    "keep_across_sleep": ("true", "keep_across_sleep", True),
    "self_describing_kv_events": ("true", "self_describing_kv_events", True),
    "lookup_deadline_s": ("0.5", "lookup_deadline_s", 0.5),
    "promote_deadline_s": ("4", "promote_deadline_s", 4.0),
    "load_only_if_faster": ("false", "load_only_if_faster", False),
    "load_margin": ("2.5", "load_margin", 2.5),
    "drain_deadline_s": ("4", "drain_deadline_s", 4.0),
    "shutdown_deadline_s": ("4", "shutdown_deadline_s", 4.0),
    "open_deadline_s": ("4", "open_deadline_s", 4.0),
    "join_deadline_s": ("4", "join_deadline_s", 4.0),
    "restore_share_ratio": ("0.5", "restore_share_ratio", 0.5),
    "max_queued_write_bytes": ("1MiB", "max_queued_write_bytes", 1024**2),
    "record": ("/var/tmp/traces", "record", "/var/tmp/traces"),
    "record_max_bytes": ("1MiB", "record_max_bytes", 1024**2),
    "record_block_tokens": ("512", "record_block_tokens", 512),
}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_works_in_every_place(key: str, tmp_path: Path) -> None:
    """Each key of the table, from the file, environment, extra config and command line."""
    written, field, expected = VALUES[key]
    base = {} if key == "host" else {"host": "1GiB"}
    file = tmp_path / "undercroft.toml"
    file.write_text(f"{key} = {json.dumps(written)}\n", encoding="utf-8")
    for settings in (
        load({**base, key: written}),
        load(base, environ={f"UNDERCROFT_{key.upper()}": written}),
        load(base, cli=[f"{key}={written}"]),
        load(base, file=file),
        load(base, environ={"UNDERCROFT_CONFIG": str(file)}),
    ):
        assert getattr(settings, field) == expected


def test_toml_has_the_same_shape(tmp_path: Path) -> None:
    """A TOML file with a tiers table says the same as the JSON."""
    file = tmp_path / "undercroft.toml"
    file.write_text(
        'host = "32GiB"\npolicy = "lru"\n[[tiers]]\ntype = "disk"\npath = "/nvme/kv"\n'
        'capacity = "1TiB"\n',
        encoding="utf-8",
    )
    assert load(file=file) == load(SHAPE)


def test_precedence(tmp_path: Path) -> None:
    """Command line, then extra config, then environment, then file; stock's names rank alike."""
    file = tmp_path / "undercroft.toml"
    file.write_text('host = 1000\npolicy = "file"\nadmission = "file"\nmodel_id = "file"\n')
    environ = {
        "UNDERCROFT_HOST": "2000",
        "UNDERCROFT_POLICY": "environment",
        "UNDERCROFT_ADMISSION": "environment",
        "HOME": "/",
    }
    settings = load(
        {"cpu_bytes_to_use": 3000, "eviction_policy": "extra"},
        environ=environ,
        file=file,
        cli=["host=4000", "host=5000"],
    )
    assert settings.host_bytes == 5000
    assert settings.policy == "extra"
    assert settings.admission == "environment"
    assert settings.model_id == "file"


def test_the_callers_objects_are_never_changed() -> None:
    """Neither the extra config nor what is nested in it."""
    extra = {
        "cpu_bytes_to_use": 10 * GIB,
        "backpressure": {},
        "secondary_tiers": [{"type": "fs", "root_dir": "/x", "backpressure": {"alpha": 1}}],
    }
    before = copy.deepcopy(extra)
    settings = load(extra)
    assert extra == before
    with pytest.raises(TypeError):
        settings.tiers[0].options["path"] = "/y"  # type: ignore[index]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "host is missing.*32GiB.*cpu_bytes_to_use"),
        ({"host": "ten"}, "host in kv_connector_extra_config is 'ten'.*10GB"),
        ({"host": "1GiB", "secondary_tier": []}, "unknown key 'secondary_tier'.*'secondary_tiers'"),
        ({"host": "1GiB", "evictionpolicy": "lru"}, "'evictionpolicy'.*'eviction_policy'"),
        ({"host": "1GiB", "hots": 1}, "unknown key 'hots'.*'host', a number of bytes, or a size"),
        ({"host": "1GiB", "zzz": 1}, "unknown key 'zzz'; valid are admission, "),
        ({"host": "1GiB", "host_bytes": 1}, "unknown key 'host_bytes'; did you mean 'host'"),
        (
            {"host": "1GiB", "tiers": [{**DISK, "rootdir": "/x"}]},
            r"tiers\[0\].*disk.*'rootdir'; did you mean 'path'",
        ),
        (
            {"host": "1GiB", "tiers": [{**DISK, "max_bytes": 1}]},
            "'max_bytes'; did you mean 'capacity', a number of bytes, or a size",
        ),
        (
            {"host": "1GiB", "secondary_tiers": [{"type": "fs", "rootdir": "/x"}]},
            "'rootdir'; did you mean 'root_dir'",
        ),
        (
            {"host": "1GiB", "secondary_tiers": [{"type": "fs", "root_dir": "/", "max_bytes": 1}]},
            "'max_bytes'; did you mean 'capacity', a number of bytes, or a size",
        ),
        ({"host": "1GiB", "tiers": {}}, "tiers in .* must be a list of objects"),
        ({"host": "1GiB", "tiers": ["disk"]}, r"tiers in .*\[0\] is 'disk'.*an object"),
        ({"host": "1GiB", "tiers": "["}, "tiers in .* is text but not JSON"),
        ({"host": "1GiB", "tiers": [{"path": "/x"}]}, r"tiers\[0\] in .* lacks type.*disk"),
        ({"host": "1GiB", "tiers": [{"type": "disk", "path": "/x"}]}, "lacks capacity.*1TiB"),
        ({"host": "1GiB", "tiers": [{"type": "disk", "capacity": 9}]}, "lacks path"),
        ({"host": "1GiB", "tiers": [{**DISK, "capacity": None}]}, "capacity of .* is None"),
        ({"host": "1GiB", "tiers": [DISK, DISK]}, "two tiers .* have the path /nvme/kv"),
        ({"host": "1GiB", "tiers": [DISK, {**DISK, "path": "/nvme/../nvme/kv/"}]}, "two tiers"),
        (
            {"host": "1GiB", "tiers": [DISK, {**DISK, "name": "disk", "path": "/b"}]},
            "the name 'disk', which another tier has",
        ),
        ({"host": "1GiB", "tiers": [{**DISK, "num_threads": 0}]}, "num_threads of .* is 0"),
        ({"host": "1GiB", "tiers": [{**DISK, "direct": "perhaps"}]}, "direct of .* true or false"),
        ({"host": "1GiB", "tiers": [{**DISK, "locality": "NEAR"}]}, "locality .*LOCAL or REMOTE"),
        ({"host": "1GiB", "restore_share_ratio": 1.5}, "restore_share_ratio .* is 1.5.*ratio"),
        ({"host": "1GiB", "restore_share_ratio": 0}, "restore_share_ratio .* is 0.*ratio"),
        ({"host": "1GiB", "lookup_deadline_s": 0}, "lookup_deadline_s .* is 0.*seconds > 0"),
        ({"host": "1GiB", "lookup_deadline_s": "20ms"}, "'20ms'.*seconds"),
        ({"host": "1GiB", "offload_prompt_only": "maybe"}, "offload_prompt_only .*true or false"),
        ({"host": "1GiB", "policy": 3}, "policy in .* is 3"),
        ({"host": "1GiB", "admission": {"sights": 2}}, "admission in .* lacks type"),
        ({"host": "1GiB", "admission": {"type": 3}}, "type of admission in .* is 3"),
        ({"host": "1GiB", "admission": "{"}, "admission in .* not JSON"),
        ({"host": "1GiB", "cpu_bytes_to_use": 1}, "both cpu_bytes_to_use and host"),
        ({"host": "1GiB", "policy": "lru", "eviction_policy": "lru"}, "both eviction_policy and"),
        ({"host": "1GiB", "tiers": [], "secondary_tiers": []}, "both secondary_tiers and tiers"),
        ({"host": "1GiB", "block_size": 0}, "block_size in .* is 0"),
    ],
)
def test_mistakes_get_one_line(extra: dict[str, Any], words: str) -> None:
    """The key, where it is, and what to write instead, in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        load(extra)
    assert "\n" not in str(caught.value)


def test_mistakes_elsewhere_name_the_place(tmp_path: Path) -> None:
    """The file, the environment and the command line are named."""
    file = tmp_path / "undercroft.toml"
    file.write_text("hots = 1\n")
    with pytest.raises(ConfigError, match=r"the file .*undercroft.toml has an unknown key 'hots'"):
        load(file=file)
    file.write_text("hots = \n")
    with pytest.raises(ConfigError, match=r"undercroft.toml is not TOML"):
        load(file=file)
    with pytest.raises(ConfigError, match=r"missing.toml cannot be read"):
        load(file=tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"the environment.* unknown key 'hots'"):
        load({"host": 1}, environ={"UNDERCROFT_HOTS": "1"})
    with pytest.raises(ConfigError, match=r"the command line has an unknown key 'hots'"):
        load({"host": 1}, cli=["hots=1"])
    with pytest.raises(ConfigError, match=r"'host' on the command line is not key=value"):
        load(cli=["host"])
    with pytest.raises(ConfigError, match=r"host in the command line is 'x'"):
        load(cli=["host=x"])


@pytest.mark.parametrize("service", ["UNDERCROFT", "UNDERCROFT_VLLM_CHAT"])
def test_service_links_are_not_settings(service: str) -> None:
    """Kubernetes names a service in every container's environment, `undercroft-vllm-chat` too."""
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "80",
        f"{service}_SERVICE_PORT_HTTP": "80",
        f"{service}_PORT": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load({"host": 1}, environ=environ).host_bytes == 1


def test_no_setting_is_taken_for_a_service_link() -> None:
    """Every key of ours is still read from the environment."""
    environ = {f"UNDERCROFT_{name.upper()}": "[]" for name in KEYS}
    assert set(merge(environ=environ).values) == set(KEYS)


def test_engine_keys_are_accepted_where_the_engine_reads_them(tmp_path: Path) -> None:
    """In the extra config and on our command line; in a file they would have no effect."""
    engine = {
        "block_size": 64,
        "spec_name": "UndercroftSpec",
        "spec_module_path": "undercroft.engines.vllm",
        "canonical_layout": True,
    }
    assert load({"host": 1, **engine}).engine == engine
    assert load({"host": 1}, cli=["blocks_per_chunk=4"]).engine == {"blocks_per_chunk": 4}
    for key in ENGINE_KEYS:
        value = {"block_size": "16", "blocks_per_chunk": "2"}.get(key, "true")
        with pytest.raises(ConfigError, match=rf"{key} .*only from kv_connector_extra_config"):
            load({"host": 1}, environ={f"UNDERCROFT_{key.upper()}": value})
    file = tmp_path / "undercroft.toml"
    file.write_text("blocks_per_chunk = 4\n")
    with pytest.raises(ConfigError, match=r"blocks_per_chunk"):
        load({"host": 1}, file=file)


def test_tier_options_are_parsed() -> None:
    """Every option of the disk tier arrives parsed; what is not written is left to the tier."""
    written = {
        **DISK,
        "name": "fast",
        "policy": "arc",
        "admission": {"type": "frequency", "sights": 2},
        "events": False,
        "locality": "LOCAL",
        "free_space_floor": "1GiB",
        "num_threads": "4",
        "direct": "no",
        "write_rate": "200MiB",
        "write_budget": "500GiB",
        "mover_process": "yes",
    }
    assert set(written) == set(TIER_KEYS) | set(TIER_OPTIONS["disk"])
    (tier,) = load({"host": 1, "tiers": [written]}).tiers
    assert (tier.name, tier.policy, tier.events, tier.locality) == ("fast", "arc", False, "LOCAL")
    assert (tier.admission, tier.admission_options) == ("frequency", {"sights": 2})
    assert tier.options == {
        "path": "/nvme/kv",
        "free_space_floor": GIB,
        "num_threads": 4,
        "direct": False,
        "write_budget": 500 * GIB,
        "mover_process": True,
    }
    assert tier.write_rate_bytes == 200 << 20


def test_names_of_equal_types_are_numbered() -> None:
    """Two disks without names are disk and disk-2."""
    tiers = load({"host": 1, "tiers": [DISK, {**DISK, "path": "/b"}, {**DISK, "path": "/c"}]}).tiers
    assert [tier.name for tier in tiers] == ["disk", "disk-2", "disk-3"]


def test_a_strangers_tier_takes_its_own_options() -> None:
    """A type we do not know keeps its options unchecked: its plug-in judges them."""
    written = {"type": "acme", "capacity": "1GiB", "endpoint": "tcp://x", "retries": 3}
    (tier,) = load({"host": 1, "tiers": [written]}).tiers
    assert tier.capacity_bytes == GIB
    assert tier.options == {"endpoint": "tcp://x", "retries": 3}


def test_variables_of_the_test_suite_are_no_settings() -> None:
    """A failed run can be replayed with its seed, engines and all."""
    environ = {"UNDERCROFT_TEST_SEED": "7", "UNDERCROFT_HOST": "1GiB"}
    assert load({}, environ=environ).host_bytes == 1 << 30


INNER = {"type": "disk", "path": "/x", "capacity": "1GiB", "name": "nvme", "policy": "arc"}
FAULTY = {"type": "faulty", "control": "/tmp/faults.json", "inner": INNER}


def test_a_faulty_tier_is_the_tier_inside() -> None:
    """All its settings; only that it goes wrong is added."""
    (plain,) = load({"host": "1GiB", "tiers": [INNER]}, environ={}).tiers
    (attacked,) = load({"host": "1GiB", "tiers": [FAULTY]}, environ={}).tiers
    assert attacked == dataclasses.replace(plain, faults="/tmp/faults.json")
    assert plain.faults is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": "1GiB"}, "has the key 'capacity', which belongs into inner"),
        ({"contrl": 1}, "unknown key 'contrl'; did you mean 'control'"),
        ({"control": None}, "control of .* must be non-empty text"),
        ({"inner": "disk"}, "inner of .* must be an object"),
        ({"inner": FAULTY}, "is of that type, too; keep one of them"),
        ({"inner": {"type": "disk", "path": "/x"}}, "inner of tiers.*lacks capacity"),
    ],
)
def test_wrong_settings_of_a_faulty_tier(change: dict[str, Any], message: str) -> None:
    """Refused in one line."""
    with pytest.raises(ConfigError, match=message):
        load({"host": "1GiB", "tiers": [{**FAULTY, **change}]}, environ={})


def test_a_faulty_tier_needs_both() -> None:
    """Who goes wrong, and who says so."""
    for missing in ("control", "inner"):
        written = {name: value for name, value in FAULTY.items() if name != missing}
        with pytest.raises(ConfigError, match=f"lacks {missing}"):
            load({"host": "1GiB", "tiers": [written]}, environ={})
