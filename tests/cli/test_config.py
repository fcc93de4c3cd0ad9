"""`undercroft config`: every setting, once, with its value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.rig import undercroft, undercroft_json
from undercroft.settings.schema import KEYS, TIER_KEYS, TIER_OPTIONS

TIER = {"type": "disk", "path": "/nvme/kv", "capacity": "1TiB", "num_threads": 8}


def by_key(shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in shown["settings"]}


def test_every_setting_is_listed_once() -> None:
    """All keys, all keys of a tier, all options of its type; defaults say that they are."""
    extra = json.dumps({"host": "32GiB", "tiers": [TIER]})
    shown = undercroft_json("config", "--kv-transfer-config", extra)
    keys = [row["key"] for row in shown["settings"]]
    tier = [f"tiers[0].{name}" for name in [*TIER_KEYS, *TIER_OPTIONS["disk"]]]
    assert keys == [*KEYS, *tier]
    rows = by_key(shown)
    assert rows["policy"] == {
        "key": "policy",
        "value": "lru",
        "default": "lru",
        "source": "default",
    }
    assert rows["host"]["value"] == 32 * 1024**3
    assert rows["tiers[0].capacity"]["value"] == 1024**4
    assert rows["tiers[0].num_threads"]["source"] == "kv_connector_extra_config"
    assert rows["tiers[0].policy"]["source"] == "default"
    assert shown["error"] is None


def test_a_tier_that_goes_wrong_on_purpose_is_listed_as_it_is_inside() -> None:
    """Its control file comes first; what was written inside is not called a default."""
    written = {"type": "faulty", "control": "/tmp/faults.json", "inner": TIER}
    extra = json.dumps({"host": "32GiB", "tiers": [written]})
    rows = by_key(undercroft_json("config", "--kv-transfer-config", extra))
    assert rows["tiers[0].control"]["value"] == "/tmp/faults.json"
    assert rows["tiers[0].type"]["value"] == "disk"
    assert rows["tiers[0].capacity"]["source"] == "kv_connector_extra_config"
    assert rows["tiers[0].policy"]["source"] == "default"


def test_the_strongest_source_is_named(tmp_path: Path) -> None:
    """A file below the environment below vLLM's JSON below --set."""
    file = tmp_path / "kv.toml"
    file.write_text('host = "1GiB"\npolicy = "arc"\ndrain_deadline_s = 5\njoin_deadline_s = 9\n')
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"host": "3GiB", "drain_deadline_s": 7},
    }
    words = ["--file", str(file), "--kv-transfer-config", json.dumps(transfer)]
    env = {"UNDERCROFT_POLICY": "lru", "UNDERCROFT_HOST": "2GiB"}
    rows = by_key(undercroft_json("config", *words, "--set", "host=4GiB", env=env))
    found = {name: (rows[name]["value"], rows[name]["source"]) for name in rows}
    assert found["host"] == (4 * 1024**3, "the command line")
    assert found["drain_deadline_s"] == (7, "kv_connector_extra_config")
    assert found["policy"] == ("lru", "the environment (UNDERCROFT_*)")
    assert found["join_deadline_s"] == (9, f"the file {file}")
    assert found["shutdown_deadline_s"] == (3, "default")
    named = by_key(undercroft_json("config", env={"UNDERCROFT_CONFIG": str(file)}))
    assert named["policy"]["source"] == f"the file {file}"


def test_stock_keys_are_shown_as_what_they_became(tmp_path: Path) -> None:
    """Their notes with them; the JSON may be in a file."""
    file = tmp_path / "vllm.json"
    stock = {
        "cpu_bytes_to_use": 1 << 30,
        "blocks_per_chunk": 2,
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv"}],
    }
    file.write_text(json.dumps(stock))
    shown = undercroft_json("config", "--kv-transfer-config", f"@{file}")
    rows = by_key(shown)
    assert rows["host"]["value"] == 1 << 30
    assert rows["tiers[0].path"]["value"] == "/mnt/kv"
    assert rows["tiers[0].capacity"]["value"] is None
    assert rows["blocks_per_chunk"]["value"] == 2
    assert "cpu_bytes_to_use became host = 1 GiB" in shown["notes"]


def test_what_cannot_work_is_shown_with_its_error() -> None:
    """No host: the table all the same, the line on standard error, exit code 2."""
    done = undercroft("config", "--set", 'tiers=[{"type":"disk"}]')
    assert done.returncode == 2
    assert "not set" in done.stdout
    assert "error: host is missing" in done.stderr
    shown = undercroft_json("config", code=2)
    assert "host is missing" in shown["error"]
    assert by_key(shown)["host"]["value"] is None


def test_people_read_sizes_and_sources() -> None:
    """Aligned, sizes with units."""
    lines = undercroft("config", "--set", "host=32GiB").stdout.splitlines()
    row = next(line.split("  ") for line in lines if line.startswith("host "))
    assert [cell.strip() for cell in row if cell.strip()] == [
        "host",
        "32 GiB",
        "required",
        "the command line",
    ]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--set", "hosst=1GiB"], 2, "did you mean 'host'"),
        (["--file", "/nowhere/kv.toml"], 2, "cannot be read"),
        (["--kv-transfer-config", "{"], 2, "is not JSON"),
        (["--kv-transfer-config", "[1]"], 2, "must be an object"),
        (["--kv-transfer-config", "@/nowhere/vllm.json"], 3, "/nowhere/vllm.json"),
    ],
)
def test_wrong_sources_are_refused(words: list[str], code: int, line: str) -> None:
    """One line each."""
    done = undercroft("config", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert line in done.stderr


def test_a_plug_in_that_is_not_there_is_code_2() -> None:
    """With such a name nothing would start; the nearest one is named."""
    done = undercroft("config", "--set", "host=1GiB", "--set", "policy=lruu")
    assert done.returncode == 2
    assert "did you mean lru" in done.stderr.replace("'", "")
