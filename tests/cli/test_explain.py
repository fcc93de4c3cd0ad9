"""Why a prompt was missed: each reason is found, by text and by JSON."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.disk.stores import CAPACITY
from tests.tiers.disk.support import content, disk
from undercroft.cli import explain
from undercroft.clock import SystemClock
from undercroft.engines.vllm.prompt_keys import Prompt, keys_of
from undercroft.identity import weights_fingerprint
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk.history import REASONS, HistoryFile, Incident, key_part

from .rig import environment
from .store_rig import run

Capsys = pytest.CaptureFixture[str]
TOKENS = list(range(100, 300))  # six chunks of 32


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def space(dtype: str = "float32", tokens_per_block: int = 32, name: str = "org/small") -> Namespace:
    return Namespace(
        {
            "format": 1,
            "model": {"name": name, "dtype": dtype},
            "cache": {"tokens_per_hash": tokens_per_block, "blocks_per_chunk": 1},
            "groups": [{"group_id": 0, "tokens_per_block": tokens_per_block}],
            "hash": {"algorithm": "sha256", "seed": "the engine's default"},
        }
    )


def keys(namespace: Namespace, tokens: list[int] = TOKENS) -> list[ChunkKey]:
    return keys_of(Prompt(tokens), namespace.manifest, {})[0]


def store(path: Path, namespace: Namespace, chunks: list[ChunkKey]) -> None:
    tier = disk(path, namespace=namespace, capacity_bytes=CAPACITY)
    for chunk in chunks:
        tier.write_from(chunk, memoryview(content(chunk)))
    tier.close()


def note(path: Path, namespace: Namespace, *told: tuple[str, str, bytes]) -> None:
    file = HistoryFile(
        str(path),
        namespace=namespace,
        levels=["host", "disk"],
        num_bytes=8192,
        capacity_bytes=CAPACITY,
        free_space_floor_bytes=0,
        clock=SystemClock(),
    )
    assert file.open()
    then = int(time.time()) - 60
    file.add([Incident(then, event, why, "disk", key_part(k)) for event, why, k in told])
    file.close()


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(json.dumps(TOKENS))
    return file


def ask(capsys: Capsys, prompt: Path, path: Path, *words: object) -> Any:
    return run(capsys, "explain", "--tokens", prompt, "--path", path, *words)


def fates(document: Any) -> list[str]:
    return [chunk["fate"] for chunk in document["groups"][0]["chunks"]]


def test_all_stored_is_code_0(tmp_path: Path, prompt: Path, capsys: Capsys) -> None:
    """Nothing missed: every chunk is there and good."""
    store(tmp_path, space(), keys(space()))
    ran = ask(capsys, prompt, tmp_path)
    assert ran.code == 0
    assert "chunks 0 to 5 (tokens 0 to 191): stored" in ran.text
    document = ask(capsys, prompt, tmp_path, "--json").document
    assert fates(document) == ["stored"] * 6
    assert document["groups"][0]["prefix_tokens"] == 192


def test_each_loss_is_told_with_its_cause(tmp_path: Path, prompt: Path, capsys: Capsys) -> None:
    """Stored, evicted, refused, corrupt, never seen; and what happened to the level."""
    wanted = keys(space())
    store(tmp_path, space(), wanted[:2])
    note(
        tmp_path,
        space(),
        ("opened", "other", b""),
        ("down", "timeout", b""),
        ("evicted", "capacity", wanted[2]),
        ("declined", "unavailable", wanted[3]),
        ("dropped", "corrupt", wanted[4]),
        ("missed", "deadline", wanted[1]),
        ("reset", "other", b""),
    )
    ran = ask(capsys, prompt, tmp_path)
    assert ran.code == 1
    for words in (
        "evicted at disk 60 s ago: to make room",
        "declined at disk 60 s ago: the level failed",
        "dropped at disk 60 s ago: its checksum",
        "missed at disk 60 s ago: it did not come up in time",
        "no trace: never stored here, or lost more than 60 s ago",
        "the first miss is chunk 2",
        "disk was left alone after failures (timeout)",
        "the cache was reset",
    ):
        assert words.replace("60 s", "") in ran.text.replace("60 s", "").replace("61 s", "")
    document = ask(capsys, prompt, tmp_path, "--json").document
    assert fates(document) == ["stored", "stored", "evicted", "declined", "dropped", "no trace"]
    assert document["groups"][0]["chunks"][2]["lost"]["reason"] == "capacity"


def test_every_reason_that_can_be_noted_has_words() -> None:
    """No answer falls back to the bare code."""
    assert set(REASONS) - {"other"} == set(explain._REASONS)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (space(dtype="float8"), "model.dtype: 'float32' here, 'float8' there"),
        (space(tokens_per_block=64), "cache.tokens_per_hash: 32 here, 64 there"),
        (space(name="org/large"), "model.name: 'org/small' here, 'org/large' there"),
    ],
)
def test_another_namespace_that_has_it_is_named_with_the_field(
    tmp_path: Path, prompt: Path, capsys: Capsys, other: Namespace, field: str
) -> None:
    """Stored under other settings: which field, both values, though keys may differ as well."""
    store(tmp_path, other, keys(other))
    store(tmp_path, space(), keys(space(), [1] * 64))
    ran = ask(capsys, prompt, tmp_path, "--namespace", space().id[:10])
    assert ran.code == 1
    assert field in ran.text
    assert f"namespace {other.id[:12]} has" in ran.text
    (found,) = ask(capsys, prompt, tmp_path, "--namespace", space().id, "--json").document[
        "elsewhere"
    ]
    assert (found["namespace"], found["differs"]) == (other.id, field)
    one = run(
        capsys,
        "explain",
        "--key",
        keys(other)[0].hex(),
        "--namespace",
        space().id,
        "--path",
        tmp_path,
    )
    assert one.code == 1
    assert field in one.text


def test_void_and_damaged_chunks_are_told(tmp_path: Path, prompt: Path, capsys: Capsys) -> None:
    """What a reset made void, and what a bit made bad."""
    wanted = keys(space())
    store(tmp_path, space(), wanted)
    tier = disk(tmp_path, namespace=space(), capacity_bytes=CAPACITY)
    tier.raise_epoch()
    tier.write_from(wanted[0], memoryview(content(wanted[0])))
    tier.close()
    from tests.engines.vllm.lab import damage

    damage.flip_payloads(tmp_path)
    found = fates(ask(capsys, prompt, tmp_path, "--json").document)
    assert found[0] == "damaged"
    assert set(found[1:]) == {"void"}


def test_the_namespace_in_use_is_taken(tmp_path: Path, prompt: Path, capsys: Capsys) -> None:
    """Of several of one model: the one an engine has open, and it is said that there are others."""
    store(tmp_path, space(), keys(space()))
    store(tmp_path, space(dtype="float8"), keys(space())[:1])
    tier = disk(tmp_path, namespace=space(), capacity_bytes=CAPACITY)
    ran = ask(capsys, prompt, tmp_path, "--model", "small")
    assert ran.code == 0
    assert "2 namespaces could be meant; taken is the one in use" in ran.text
    tier.close()
    ran = ask(capsys, prompt, tmp_path, "--model", "huge")
    assert ran.code == 1
    assert "there are: org/small" in ran.text


def test_an_engine_that_runs_and_has_stored_nothing(
    tmp_path: Path, prompt: Path, capsys: Capsys
) -> None:
    """Its key space is there from its start on: never stored, and which field differs elsewhere."""
    store(tmp_path, space(dtype="float8"), keys(space()))
    tier = disk(tmp_path, namespace=space(), capacity_bytes=CAPACITY)
    ran = ask(capsys, prompt, tmp_path)
    assert ran.code == 1
    assert f"namespace {space().id[:12]}, org/small, float32, in use" in ran.text
    assert "chunks 0 to 5 (tokens 0 to 191): no trace: never stored here" in ran.text
    assert "model.dtype: 'float32' here, 'float8' there" in ran.text
    tier.close()


def test_an_engine_that_never_opened_the_store(
    tmp_path: Path, prompt: Path, capsys: Capsys
) -> None:
    """What to do is said, and who has the prompt; a model of another name may be the same one."""
    model = tmp_path / "copy"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    found = weights_fingerprint(str(model))
    there = {**space().manifest, "model": {"name": "org/small", "dtype": "float32"}}
    there["model"]["weights"] = {"kind": found.kind, "value": found.value}
    stored = tmp_path / "kv"
    store(stored, Namespace(there), keys(space()))
    for asked, differs in (
        (str(model), "the model's name at most: org/small has the same weights"),
        ("org/huge", "model.name, model.weights: org/huge here, org/small there"),
    ):
        ran = ask(capsys, prompt, stored, "--model", asked)
        assert ran.code == 1
        assert f"no engine of {asked} has opened this store; there are: org/small" in ran.text
        assert "start it with this path, and ask again" in ran.text
        assert f"has 6 of its 6 chunks of this prompt, and differs in {differs}" in ran.text
        document = ask(capsys, prompt, stored, "--model", asked, "--json").document
        assert document["namespace"] is None
        assert [one["differs"] for one in document["elsewhere"]] == [differs]
        wanted = keys(space())[0].hex()
        one = run(capsys, "explain", "--key", wanted, "--model", asked, "--path", stored)
        assert one.code == 1
        assert f"which differs in {differs}" in one.text


@pytest.mark.parametrize(
    ("text", "words"),
    [("1 2 three", "token ids"), ('{"prompt": 1}', "token ids"), ("[[1]]", "token ids")],
)
def test_bad_tokens_are_code_2(tmp_path: Path, capsys: Capsys, text: str, words: str) -> None:
    """What is no list of token ids is refused; so are text without a model, and half a key."""
    file = tmp_path / "prompt"
    file.write_text(text)
    store(tmp_path, space(), [])
    ran = ask(capsys, file, tmp_path)
    assert ran.code == 2
    assert words in ran.errors
    assert run(capsys, "explain", "--prompt", file, "--path", tmp_path).code == 2
    assert run(capsys, "explain", "--key", "abc", "--path", tmp_path).code == 2


def test_without_vllm_it_says_what_is_missing(
    tmp_path: Path, prompt: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts need vLLM: code 3 and how to get it; keys do not."""
    store(tmp_path, space(), keys(space()))
    monkeypatch.setattr("undercroft.cli.explain.find_spec", lambda _name: None)
    ran = ask(capsys, prompt, tmp_path)
    assert ran.code == 3
    assert "undercroft[vllm]" in ran.errors
    assert run(capsys, "explain", "--key", keys(space())[0].hex(), "--path", tmp_path).code == 0


def test_the_answer_is_one_json_value_though_vllm_talks(tmp_path: Path, prompt: Path) -> None:
    """In a process of its own vLLM is imported by the command; what it logs goes elsewhere."""
    store(tmp_path, space(), keys(space()))
    words = ["explain", "--tokens", str(prompt), "--path", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "undercroft", *words],
        env=environment(VLLM_LOGGING_LEVEL="DEBUG"),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert fates(json.loads(done.stdout)) == ["stored"] * 6


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("groups", 0, "group_id"), -1),
        (("groups", 0, "group_id"), 1 << 40),
        (("groups", 0, "tokens_per_block"), 0),
        (("groups", 0, "tokens_per_block"), 48),
        (("cache", "tokens_per_hash"), 0),
        (("cache", "blocks_per_chunk"), -1),
    ],
)
def test_a_manifest_that_no_engine_wrote_is_code_2(
    tmp_path: Path, prompt: Path, capsys: Capsys, path: tuple[Any, ...], value: int
) -> None:
    """Its numbers are judged before anything is computed with them."""
    manifest: Any = json.loads(space().text)
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    store(tmp_path, Namespace(manifest), [ChunkKey(bytes(36))])
    ran = ask(capsys, prompt, tmp_path)
    assert ran.code == 2
    assert "not one of a vLLM engine" in ran.errors
