"""`undercroft explain` beside and after a real engine: its keys, its namespace, what it evicted."""

import json
import time
from pathlib import Path

import pytest

from tests.cli.store_rig import run
from tests.engines.vllm.e2e.conftest import offload, one_by_one
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Nursery, prompt

NUM_PROMPTS, LENGTH = 9, 650
NUM_CHUNKS = LENGTH // BLOCK_TOKENS


def await_history(disk: Path) -> None:
    """Until the engine writes down what becomes of chunks."""
    ends = time.monotonic() + 60
    while not list(disk.glob("undercroft-v1/*/history-*")):
        assert time.monotonic() < ends, "no history"
        time.sleep(0.1)


def test_every_chunk_of_a_prompt_is_accounted_for(
    nursery: Nursery,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More prompts than the disk holds: the last is all stored, the first all evicted, and said so.

    While the engine runs it is known to; and `verify`, `ls`, `du` agree with what it stored.
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    disk = tmp_path / "kv"
    tiers = [{"type": "disk", "path": str(disk), "capacity": "8MiB", "free_space_floor": 0}]
    engine = nursery.engine("llama", {**offload(), "tiers": tiers})
    prompts = [prompt(LENGTH, seed=700 + number) for number in range(NUM_PROMPTS)]
    one_by_one(engine, prompts[:1])
    await_history(disk)  # once the disk is full there is no room for it
    one_by_one(engine, prompts[1:])
    engine.settle()
    for name, tokens in (("first", prompts[0]), ("last", prompts[-1])):
        (tmp_path / name).write_text(json.dumps(tokens))

    def explained(name: str) -> dict[str, object]:
        ran = run(capsys, "explain", "--tokens", tmp_path / name, "--path", disk, "--json")
        document: dict[str, object] = ran.document
        return document

    last = explained("last")
    assert last["in_use"]
    (group,) = last["groups"]  # type: ignore[misc]
    assert [chunk["fate"] for chunk in group["chunks"]] == ["stored"] * NUM_CHUNKS
    assert (
        run(capsys, "verify", "--path", disk, "--capacity", "8MiB", "--json").document["faults"]
        == 0
    )
    engine.close()

    (group,) = explained("first")["groups"]  # type: ignore[misc]
    fates = [chunk["fate"] for chunk in group["chunks"]]
    assert set(fates) <= {"evicted", "no trace"}
    assert fates.count("evicted") == NUM_CHUNKS
    lost = [chunk["lost"] for chunk in group["chunks"]]
    assert {(one["level"], one["reason"]) for one in lost} == {("disk", "capacity")}
    text = run(capsys, "explain", "--tokens", tmp_path / "first", "--path", disk).text
    assert "evicted at disk" in text
    ran = run(capsys, "ls", "--path", disk, "--json")
    (space,) = ran.document["namespaces"]
    assert not space["in_use"]
    assert space["model"].endswith("llama")
    assert ran.document["bytes"] <= 8 << 20
