"""What is found again after which change: the claims of docs/how-to/upgrade.md."""

import json
import struct

import pytest
import xxhash
from rig import running
from shapes import SMALL_LLAMA, Group, prompt

from undercroft.cli.main import main
from undercroft.engines.vllm import preview, spec
from undercroft.engines.vllm.facts import model_facts
from undercroft.keys import first_difference

HOST = {"host": "1MiB"}


def disk(path, **more):
    return {**HOST, "tiers": [{"type": "disk", "path": str(path), "capacity": "64MiB", **more}]}


def namespace_of(rig):
    return rig.hierarchy.levels[0].tier.namespace


def found_by(extra, engine_id, **changes):
    """Tokens that an engine, started anew, finds of the one prompt that all of them ask."""
    with running(extra, engine_id=engine_id, **changes) as rig:
        return rig.run(prompt(1, 160)).num_hit_tokens, namespace_of(rig)


LEAVE_IT = {
    "memory": ["--gpu-memory-utilization", "0.5"],
    "seed": ["--seed", "3"],
    "eager": ["--enforce-eager"],
    "batching": ["--max-num-batched-tokens", "2048", "--max-num-seqs", "7"],
    "names": ["--served-model-name", "x", "--port", "9"],
    "longest prompt": ["--max-model-len", "4096"],
    "backend that is chosen anyway": ["--attention-backend", "CPU_ATTN"],
}
CHANGE_IT = {
    "dtype": ["--dtype", "float16"],
    "KV dtype": ["--kv-cache-dtype", "fp8"],
    "quantization": ["--quantization", "fp8"],
    "revision": ["--revision", "abc"],
    "overrides": ["--hf-overrides", '{"sliding_window": 128}'],
    "hashes": ["--prefix-caching-hash-algo", "xxhash"],
    "random weights": ["--load-format", "dummy"],
}


def test_which_options_of_vllm_leave_the_cache_valid(tmp_path):
    """Through vLLM's own parser and configuration: what it then says of the model's bytes."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))

    def facts(words=()):
        return model_facts(preview._config([str(tmp_path), *words]), {})

    plain = facts()
    assert [name for name, words in LEAVE_IT.items() if facts(words) != plain] == []
    assert [name for name, words in CHANGE_IT.items() if facts(words) == plain] == []


@pytest.mark.parametrize("other", ["0.33.0", "0.32.1"])
def test_another_vllm_starts_empty_and_the_old_one_finds_its_own_again(
    tmp_path, monkeypatch, other
):
    """Up and back: the version is the first difference, and costs nothing that was stored."""
    extra = disk(tmp_path)
    monkeypatch.setattr(spec, "vllm_version", "0.32.0")
    _, before = found_by(extra, "one")
    monkeypatch.setattr(spec, "vllm_version", other)
    hits, after = found_by(extra, "two")
    assert hits == 0
    assert found_by(extra, "three")[0] == 160
    assert first_difference(after, before) == f"engine.version: '{other}' here, '0.32.0' there"
    monkeypatch.setattr(spec, "vllm_version", "0.32.0")
    hits, again = found_by(extra, "four")
    assert (hits, again.id) == (160, before.id)


SAME = {
    "host": {"host": "2MiB"},
    "policy": {"policy": "arc"},
    "admission": {"admission": {"type": "frequency", "sights": 1}},
    "deadlines": {"promote_deadline_s": 5, "shutdown_deadline_s": 1},
    "prompts only": {"offload_prompt_only": False},
}


@pytest.mark.parametrize("name", SAME)
def test_settings_that_leave_the_cache_valid(tmp_path, name):
    """How much, how long and by whom chunks are kept does not change what they are."""
    assert found_by(disk(tmp_path), "one")[0] == 0
    assert found_by({**disk(tmp_path), **SAME[name]}, "two")[0] == 160


def test_capacity_threads_and_names_leave_the_cache_valid(tmp_path):
    """The same for what a tier is told."""
    assert found_by(disk(tmp_path), "one")[0] == 0
    more = {"capacity": "32MiB", "num_threads": 2, "name": "nvme", "policy": "arc"}
    assert found_by(disk(tmp_path, **more), "two")[0] == 160


def test_the_directory_may_move(tmp_path):
    """Paths are in no manifest."""
    (tmp_path / "old").mkdir()
    assert found_by(disk(tmp_path / "old"), "one")[0] == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert found_by(disk(tmp_path / "new"), "two")[0] == 160


def test_another_block_size_starts_empty(tmp_path):
    """As `--block-size` makes it: other bytes in a chunk."""
    _, before = found_by(disk(tmp_path), "one")
    hits, after = found_by(disk(tmp_path), "two", groups=(Group(head_size=16),))
    assert hits == 0
    assert before.id != after.id


def test_stock_keys_and_ours_mean_the_same_chunks(tmp_path):
    """A folder that was named in stock's words is found when it is named in ours."""
    stock = {
        "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path), "capacity": "64MiB"}],
    }
    assert found_by(stock, "one")[0] == 0
    assert found_by(disk(tmp_path), "two")[0] == 160


def test_what_stock_stored_is_left_alone(tmp_path, capsys):
    """Its folders lie beside ours: not read, not counted, not removed, by engine or command."""
    theirs = tmp_path / "org-model_0123456789ab" / "00" / "chunk.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"s" * 100_000)
    stock = {"type": "fs", "root_dir": str(tmp_path), "capacity": "64MiB"}
    found_by({"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [stock]}, "one")
    assert main(["du", "--path", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["foreign_bytes"] == 0
    assert main(["gc", "--path", str(tmp_path), "--unused-for", "0s"]) == 0
    assert main(["rm", "--all", "--path", str(tmp_path), "--yes"]) == 0
    assert theirs.read_bytes() == b"s" * 100_000


def test_after_going_back_a_later_format_is_left_until_it_is_removed(tmp_path, capsys, caplog):
    """Not read, named, kept by the engine and `gc`; `rm` takes it, and it starts empty."""
    found_by(disk(tmp_path), "one")
    indexes = list(tmp_path.glob("undercroft-v1/*/seg-*.index"))
    assert indexes
    for index in indexes:
        header = bytearray(index.read_bytes()[:512])
        struct.pack_into("<H", header, 8, 2)
        struct.pack_into("<Q", header, 504, xxhash.xxh3_64_intdigest(bytes(header[:504])))
        with index.open("r+b") as file:
            file.write(header)
    assert found_by(disk(tmp_path), "two")[0] == 0
    assert "is left alone" in caplog.text
    (folder,) = tmp_path.glob("undercroft-v1/*/")
    main(["gc", "--path", str(tmp_path), "--unused-for", "0s"])
    assert all(index.exists() for index in indexes)
    assert main(["rm", folder.name, "--path", str(tmp_path), "--yes"]) == 0
    assert not folder.exists()
    capsys.readouterr()
    assert found_by(disk(tmp_path), "three")[0] == 0
    assert found_by(disk(tmp_path), "four")[0] == 160
