"""Storms: many requests at once, aborted and reset at random, while the disk comes to harm."""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import SIZES, Plain
from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery, prompt
from tests.engines.vllm.lab.storm import UNDER_WAY
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.files import Files

BLOCK = 32
SMALL = {"max_model_len": 1024, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 1024}
ROOM = {"gemma3": {"num_gpu_blocks_override": 120}}  # three groups share them


def varied_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share beginnings and end just before, at and after the edge of a chunk."""
    rng = random.Random(seed)
    bases = [prompt(600, seed=9000 + n) for n in range(4)]
    prompts = []
    for _ in range(count):
        kept = rng.randrange(0, 600 // BLOCK) * BLOCK
        tail = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, rng.randrange(1, 150)])
        made = rng.choice(bases)[:kept] + [rng.randrange(256) for _ in range(tail)]
        prompts.append(made[:600])
    return prompts


class Weather:
    """An engine with little memory and a small disk, and what is right to answer."""

    def __init__(
        self, nursery: Nursery, plain: Plain, disk: Path, model: str = "llama", **offload: Any
    ) -> None:
        self.disk = disk
        tier = {"type": "disk", "path": str(disk), "capacity": "16MiB", "free_space_floor": "0"}
        self.prompts = varied_prompts(30, 3)
        self.expected = plain.answers(self.prompts, max_tokens=4, model=model)
        self.engine: Engine = nursery.engine(
            model,
            {**OFFLOADER, "host": "2MiB", "tiers": [tier], **offload},
            **{**SIZES.get(model, {}), **SMALL, **ROOM.get(model, {})},
        )

    def storm(self, count: int, seed: int, **odds: float) -> int:
        """Run `count` requests; every answer must be right. Returns the tokens reused."""
        rng = random.Random(seed)
        order = [rng.randrange(len(self.prompts)) for _ in range(count)]
        answers: list[dict[str, Any]] = self.engine.inside(
            "storm:storm", prompts=self.prompts, order=order, seed=seed, **odds
        )
        for answer in answers:
            assert tuple(answer["tokens"]) == self.expected[answer["prompt"]].tokens
        assert odds or len(answers) == count
        return sum(answer["external_tokens"] for answer in answers)

    def assert_calm(self) -> None:
        """Nothing is pinned, filling or under way, and nothing of ours broke."""
        self.engine.settle()
        left = self.engine.inside("storm:census")
        assert not {name: left[name] for name in UNDER_WAY if left[name]}
        assert not left["is_off"]
        assert left["broken_invariants"] == 0


@pytest.fixture
def weather(nursery: Nursery, plain: Plain, tmp_path: Path) -> Weather:
    return Weather(nursery, plain, tmp_path / "kv")


def test_aborts_and_resets_at_random(weather: Weather) -> None:
    """Everything evicts all the time, clients leave, caches are reset: answers stay right."""
    for seed in range(2):
        weather.storm(60, seed, aborts=0.03, resets=0.05, wipes=0.02)
    weather.assert_calm()


def test_resets_while_windows_slide(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """After a reset vLLM offers blocks that a window gave up and others own: never stored."""
    weather = Weather(nursery, plain, tmp_path / "kv", "gemma3", blocks_per_chunk=3)
    weather.engine.inside("storm:watch_stores")
    for seed in range(3):
        weather.storm(60, seed, aborts=0.05, resets=0.1, wipes=0.1)
    weather.assert_calm()
    counts = weather.engine.counts()
    assert counts["stored_blocks_seen"] > 0
    assert counts.get("stray_blocks_stored", 0) == 0


SHAKY = [("llama", 1, 0.5), ("gemma3", 3, 0.3)]


@pytest.mark.parametrize(("model", "blocks_per_chunk", "odds"), SHAKY)
def test_loads_fail_while_all_is_reset_and_preempted(
    nursery: Nursery, plain: Plain, tmp_path: Path, model: str, blocks_per_chunk: int, odds: float
) -> None:
    """Loads fail in any group while clients leave and vLLM's cache is reset under running requests.

    Stock's connector ends the engine when a reset preempts a request that hits at once.
    """
    prompts = varied_prompts(24, 3)
    expected = plain.answers(prompts, max_tokens=12, model=model)
    questions = [
        {"prompt": tokens, "max_tokens": 12, "salt": "AB"[number % 2] if number % 3 else None}
        for number, tokens in enumerate(prompts)
    ]
    tier = {"type": "disk", "path": str(tmp_path), "capacity": "16MiB", "free_space_floor": "0"}
    transfer = {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host": "2MiB",
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": False,
            "tiers": [tier],
        },
    }
    room = {**SIZES.get(model, {}), **SMALL, "num_gpu_blocks_override": 70, **ROOM.get(model, {})}
    engine = nursery.engine(model, None, kv_transfer_config=transfer, **room)
    assert engine.inside("gale:shake", fast=odds, plain=odds, delay_s=0.01) == 0
    for seed in range(3):
        order = random.Random(seed).choices(range(len(questions)), k=50)
        answers = engine.inside(
            "gale:gale", questions=questions, order=order, seed=seed,
            aborts=0.05, resets=0.08, forced=0.5, wipes=0.03,
        )  # fmt: skip
        assert len(answers) > 20
        for answer in answers:
            assert tuple(answer["tokens"]) == expected[answer["question"]].tokens
    assert engine.inside("gale:shake", fast=0, plain=0) > 5
    engine.settle()
    left = engine.inside("storm:census")
    assert not {name: left[name] for name in (*UNDER_WAY, "is_off") if left[name]}
    assert left["loaded"] > 20
    engine.close()


def test_the_disk_is_deleted_while_serving(weather: Weather, tmp_path: Path) -> None:
    """Requests go on, and once things are calm the disk is used again."""
    weather.storm(30, 0)
    shutil.rmtree(tmp_path / "kv")
    weather.storm(40, 1)
    weather.assert_calm()
    weather.storm(40, 2)
    assert weather.storm(40, 3) > 0
    weather.assert_calm()


@pytest.mark.parametrize("epoch", [False, True])
def test_the_disk_hangs_for_good(weather: Weather, epoch: bool) -> None:
    """No request waits for it, and none fails; even if the cached epoch cannot be read."""
    weather.storm(30, 0)
    weather.engine.inside("storm:hang_disk", on=True, epoch=epoch)
    weather.storm(40, 1)
    weather.storm(20, 2)
    weather.engine.inside("storm:hang_disk", on=False)
    weather.assert_calm()


@pytest.mark.parametrize("reset", [False, True])
def test_an_idle_engine_rests_while_the_disk_hangs(weather: Weather, reset: bool) -> None:
    """It neither steps nor computes, though writes are under way; later everything is booked."""
    weather.storm(20, 0)
    weather.engine.inside("storm:hang_disk", on=True)
    weather.storm(20, 1)
    if reset:
        weather.engine.reset(connector=True)
    for seed in (2, 3):
        weather.engine.inside("storm:idle", seconds=2.5)
        assert weather.engine.inside("storm:census")["cascade"] > 0, "nothing hangs"
        rest = weather.engine.inside("storm:idle", seconds=1.0)
        assert rest["steps"] <= 5  # it was 450 a second and a third of a core
        assert rest["cpu_s"] < 0.15 * 1.0
        weather.storm(10, seed)
    weather.engine.inside("storm:hang_disk", on=False)
    weather.storm(20, 4)
    weather.assert_calm()
    assert weather.storm(20, 5) > 0
    weather.assert_calm()


ROOM_CALLS = ["allocate", "pwrite", "pwritev", "make_directories"]


@pytest.mark.parametrize("calls", [["allocate"], ROOM_CALLS], ids=["no growth", "no writes"])
def test_the_disk_is_full(weather: Weather, calls: list[str]) -> None:
    """Others have filled it: nothing new fits, or not even what has its room already. What is
    there goes on being read, and once there is room again, it is used."""
    weather.storm(20, 0)
    weather.engine.inside("storm:fail_disk", error=errno.ENOSPC, calls=calls)
    weather.storm(40, 1, resets=0.05)
    weather.assert_calm()
    weather.storm(30, 2, aborts=0.03, resets=0.05, wipes=0.02)
    weather.assert_calm()
    assert weather.engine.inside("storm:fail_disk", error=0, calls=[]) > 0
    time.sleep(1.1)  # the breaker's first pause
    weather.storm(40, 3)
    weather.assert_calm()
    assert weather.storm(40, 4) > 0


def test_the_directory_is_replaced_by_a_file(weather: Weather) -> None:
    """Requests go on without it; when somebody clears the way, it is made anew and used."""
    weather.storm(30, 0)
    weather.disk.rename(weather.disk.with_name("elsewhere"))
    weather.disk.write_text("in the way")
    weather.storm(40, 1, resets=0.05)
    weather.storm(30, 2, aborts=0.03, resets=0.05, wipes=0.02)
    weather.assert_calm()
    assert weather.disk.read_text() == "in the way"
    weather.disk.unlink()
    time.sleep(1.1)
    weather.storm(40, 3)
    weather.assert_calm()
    assert written(weather.disk) > 0, "the disk is not used again"
    assert weather.storm(40, 4) > 0
    weather.assert_calm()


def written(folder: Path) -> int:
    """Bytes of all chunks that lie under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*.slab"))


def test_two_engines_share_a_directory_and_reset_it(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    """Each finds its chunks void at any time by the other's resets: answers stay right."""
    pair = [Weather(nursery, plain, tmp_path / "kv") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for seed in range(2):
            odds = {"aborts": 0.02, "resets": 0.05, "wipes": 0.03}
            storms = [
                pool.submit(weather.storm, 40, 10 * seed + number, **odds)
                for number, weather in enumerate(pair)
            ]
            assert [storm.result() for storm in storms]
        for weather in pair:
            weather.assert_calm()
        assert sum(pool.map(lambda w: w.storm(30, 30), pair)) > 0
    for weather in pair:
        weather.assert_calm()


@contextmanager
def epochs_raised(disk: Path, pause_s: float) -> Iterator[list[int]]:
    """Another process resets the cache again and again; how often is in the list."""
    (path,) = disk.rglob("epoch")
    file, done, count = EpochFile(Files(), str(path)), threading.Event(), [0]
    file.open(read_only=False)

    def run() -> None:
        while not done.wait(pause_s):
            file.write((file.read() or 0) + 1)
            count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        done.set()
        thread.join()
        file.close()


def test_another_process_resets_all_the_time(weather: Weather) -> None:
    """Nothing stored survives for long and much is refused; no request notices."""
    weather.storm(20, 0)
    with epochs_raised(weather.disk, pause_s=0.03) as count:
        weather.storm(40, 1)
        weather.storm(30, 2, aborts=0.03, resets=0.05)
        weather.assert_calm()
    assert count[0] > 10
    declined = weather.engine.inside("storm:census")["declined"]
    assert sum(n for reason, n in declined.items() if "before_reset" in reason) > 0
    weather.storm(40, 3)
    weather.assert_calm()
    assert weather.storm(40, 4) > 0
    weather.assert_calm()


def test_new_weights_and_the_reset_of_another_engine(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    """Two engines get new weights, one of them resets the shared cache, and the other has writes
    from before under way: nobody ever loads what these leave behind."""
    one, two = pair = [Weather(nursery, plain, tmp_path / "kv") for _ in range(2)]
    for weather in pair:
        weather.storm(20, 0)
    one.engine.inside("storm:hang_disk", on=True)
    assert one.engine.inside("storm:begin", prompts=one.prompts[:16], max_tokens=40, steps=30)
    assert one.engine.inside("storm:census")["cascade"] > 0

    fresh = nursery.engine("llama", None)
    for engine in (one.engine, two.engine, fresh):
        assert engine.inside("storm:change_weights") > 0
    one.engine.inside("storm:reset_running")
    two.engine.reset(connector=True)
    expected = []
    for tokens in one.prompts:
        fresh.reset()
        expected += fresh.generate([tokens], max_tokens=4)
    fresh.close()
    changed = [a.tokens != b.tokens for a, b in zip(expected, one.expected, strict=True)]
    assert sum(changed) > len(changed) / 2, "the weights do not show"
    one.expected = two.expected = expected

    one.engine.inside("storm:hang_disk", on=False)
    time.sleep(0.5)  # what waited is written now, or refused
    two.storm(30, 1)
    assert one.engine.inside("storm:finish") == 16
    one.engine.settle()
    for seed in (2, 3):
        assert one.storm(30, seed) + two.storm(30, seed) > 0
    for weather in pair:
        weather.assert_calm()
