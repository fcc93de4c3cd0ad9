"""A real engine that is aborted, preempted, reset, put to sleep and given new weights at will."""

from __future__ import annotations

import http.client
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, one_by_one
from tests.engines.vllm.e2e.test_storm import varied_prompts
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Engine, Nursery, prompt
from tests.engines.vllm.lab.server import Server
from tests.engines.vllm.lab.storm import UNDER_WAY

ONE, OTHER = prompt(650, seed=700), prompt(650, seed=701)
WHOLE = 650 // BLOCK_TOKENS * BLOCK_TOKENS
SMALL = {"max_model_len": 1024, "max_num_batched_tokens": 1024}


def ours(disk: Path, **more: Any) -> dict[str, Any]:
    """vLLM's transfer configuration; a busy machine must not make reads late."""
    tier = {"type": "disk", "path": str(disk), "capacity": "64MiB", "free_space_floor": "0"}
    patience = {"promote_deadline_s": 30, "drain_deadline_s": 20}
    return {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "32MiB", "tiers": [tier], **patience, **more},
    }


def started(nursery: Nursery, disk: Path, model: str = "llama", **more: Any) -> Engine:
    sizes = {"num_gpu_blocks_override": 160, **SMALL, **more.pop("sizes", {})}
    return nursery.engine(model, None, kv_transfer_config=ours(disk, **more), **sizes)


def assert_calm(engine: Engine) -> dict[str, Any]:
    """Nothing is pinned, filling or under way, and nothing of ours broke."""
    engine.settle()
    left: dict[str, Any] = engine.inside("storm:census")
    assert not {name: left[name] for name in UNDER_WAY if left[name]}
    assert (left["is_off"], left["broken_invariants"]) == (False, 0)
    return left


def external(engine: Engine, prompts: list[list[int]], expected: Any, **more: int) -> list[int]:
    """Tokens of each prompt that came from us, the engine's own cache being empty; right ones."""
    engine.settle()
    engine.reset()
    outputs = one_by_one(engine, prompts, **more)
    assert_same(outputs, expected)
    return [output.external_tokens for output in outputs]


# --- sleep ------------------------------------------------------------------------------------


def test_a_sleep_drops_everything_unless_told_otherwise(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    """Levels 1 and 2 reach us as a reset, at rest and with requests under way; level 0 does not."""
    expected = plain.answers([ONE, OTHER])
    engine = started(nursery, tmp_path)
    assert external(engine, [ONE, OTHER], expected) == [0, 0]
    assert external(engine, [ONE, OTHER], expected) == [WHOLE, WHOLE]
    assert engine.inside("lives:sleep", level=0), "not asleep"
    assert engine.inside("lives:wake_up")
    assert external(engine, [ONE, OTHER], expected) == [WHOLE, WHOLE], "level 0 has to keep it"
    for level in (1, 2):
        resets = engine.inside("storm:census")["resets"]
        assert engine.inside("storm:begin", prompts=[ONE, OTHER], max_tokens=40, steps=4 * level)
        assert engine.inside("lives:sleep", level=level), "not asleep"
        assert engine.inside("lives:wake_up")
        assert engine.inside("storm:census")["resets"] == resets + 1
        assert_calm(engine)
        assert external(engine, [ONE, OTHER], expected) == [0, 0]
        assert external(engine, [ONE, OTHER], expected) == [WHOLE, WHOLE]
    engine.close()


def test_keep_across_sleep(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """With that setting a sleep drops nothing, from no level; a reset by hand still drops all,
    also between sleep and waking up, which is what new weights need."""
    expected = plain.answers([ONE, OTHER])
    engine = started(nursery, tmp_path, keep_across_sleep=True)
    assert external(engine, [ONE, OTHER], expected) == [0, 0]
    for level in (1, 2):
        assert engine.inside("storm:begin", prompts=[ONE, OTHER], max_tokens=40, steps=3 * level)
        assert engine.inside("lives:sleep", level=level), "not asleep"
        assert engine.inside("lives:wake_up")
        assert_calm(engine)
        assert external(engine, [ONE, OTHER], expected) == [WHOLE, WHOLE]
    engine.kill()
    engine = started(nursery, tmp_path, keep_across_sleep=True)
    assert external(engine, [ONE], expected[:1]) == [WHOLE], "the disk has to keep it, too"
    assert engine.inside("lives:sleep", level=1)
    engine.reset(connector=True)
    assert engine.inside("lives:wake_up")
    assert external(engine, [ONE, OTHER], expected) == [0, 0]
    assert external(engine, [ONE, OTHER], expected) == [WHOLE, WHOLE]
    assert_calm(engine)
    engine.close()


# --- new weights ------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_weights_while_asleep(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Two engines on one folder sleep, get new weights, and wake up: 0 old hits on either, from
    host memory or disk, and both go on with what the new weights compute."""
    old = plain.answers([ONE, OTHER])
    pair = [started(nursery, tmp_path) for _ in range(2)]
    for engine in pair:
        external(engine, [ONE, OTHER], old)
        assert external(engine, [ONE, OTHER], old) == [WHOLE, WHOLE]
    fresh = nursery.engine("llama", None)
    assert fresh.inside("storm:change_weights") > 0
    new = [fresh.generate([tokens])[0] for tokens in (ONE, OTHER)]
    fresh.close()
    assert [output.tokens for output in new] != [output.tokens for output in old]
    for engine in pair:
        assert engine.inside("lives:sleep", level=1)
    for engine in pair:
        assert engine.inside("storm:change_weights") > 0
    for engine in pair:
        assert engine.inside("lives:wake_up")
    assert external(pair[0], [ONE], new[:1]) == [0]
    assert external(pair[1], [OTHER], new[1:]) == [0]
    for engine in pair:
        assert external(engine, [ONE, OTHER], new)[0] in {0, WHOLE}
        assert external(engine, [ONE, OTHER], new) == [WHOLE, WHOLE]
        assert_calm(engine)
        engine.close()


def test_killed_while_a_reset_hangs(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """The disk hangs, the engine is reset and killed: the next one serves nothing of before."""
    expected = plain.answers([ONE])
    engine = started(nursery, tmp_path, drain_deadline_s=0.3)
    external(engine, [ONE], expected)
    assert external(engine, [ONE], expected) == [WHOLE]
    engine.inside("storm:hang_disk", on=True, epoch=True)
    began = time.monotonic()
    engine.reset(connector=True)
    assert time.monotonic() - began < 10, "the scheduler's thread waits for the disk"
    assert engine.inside("storm:census")["table"] == 0
    engine.kill()
    again = started(nursery, tmp_path)
    assert external(again, [ONE], expected) == [0], "the reset died with the engine"
    assert external(again, [ONE], expected) == [WHOLE]
    again.close()


# --- load -------------------------------------------------------------------------------------


def test_resets_many_times_a_second_under_load(
    nursery: Nursery, plain: Plain, tmp_path: Path
) -> None:
    """Ten and more a second, several between two steps: right answers, and a calm end."""
    prompts = varied_prompts(20, 5)
    expected = plain.answers(prompts, max_tokens=4)
    engine = started(nursery, tmp_path)
    order = random.Random(1).choices(range(len(prompts)), k=60)
    found = engine.inside("lives:flood", prompts=prompts, order=order, seed=1, resets_a_step=1.3)
    assert len(found["answers"]) == len(order)
    for answer in found["answers"]:
        assert tuple(answer["tokens"]) == expected[answer["prompt"]].tokens
    assert found["resets"] > 30
    assert found["resets"] / found["seconds"] > 3, "many times a second"
    assert_calm(engine)
    everything = list(range(len(prompts)))
    engine.inside("lives:flood", prompts=prompts, order=everything, seed=2, resets_a_step=0)
    reused = external(engine, prompts, expected, max_tokens=4)
    # Of the others the engine's own cache has the beginnings by then.
    assert reused[0] > len(prompts[0]) - 2 * BLOCK_TOKENS, "after all the resets nothing is kept"
    assert_calm(engine)
    engine.close()


def test_preempted_by_a_small_cache(nursery: Nursery, plain: Plain, tmp_path: Path) -> None:
    """Requests push each other out of the engine's own cache while they store and load; aborts and
    resets come on top."""
    prompts = varied_prompts(16, 6)
    expected = plain.answers(prompts, max_tokens=24)
    engine = started(
        nursery, tmp_path, offload_prompt_only=False, sizes={"num_gpu_blocks_override": 42}
    )
    for seed, odds in enumerate(({}, {"aborts": 0.02, "resets": 0.03, "wipes": 0.02})):
        order = random.Random(seed).choices(range(len(prompts)), k=40)
        answers = engine.inside(
            "storm:storm", prompts=prompts, order=order, seed=seed, max_tokens=24, **odds
        )
        assert len(answers) >= (20 if odds else 40)
        for answer in answers:
            assert tuple(answer["tokens"]) == expected[answer["prompt"]].tokens
    preempted = sum(v for k, v in engine.metrics().items() if "num_preemptions" in k)
    assert preempted > 3, "nobody was preempted"
    assert assert_calm(engine)["loaded"] > 0
    engine.close()


# --- clients ----------------------------------------------------------------------------------


def leave(server: Server, tokens: list[int], after_s: float) -> int:
    """Ask for a long answer, and hang up after a while; bytes that had come by then."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 200, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    num_bytes, until = 0, time.monotonic() + after_s
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        if connection.sock is not None:
            connection.sock.settimeout(after_s)
        while time.monotonic() < until:
            answer = connection.getresponse()
            for line in answer:
                num_bytes += len(line)
                if time.monotonic() > until:
                    break
            break
    except OSError:
        pass
    finally:
        connection.close()
    return num_bytes


@pytest.mark.timeout(400)
def test_clients_that_leave(served: Server) -> None:
    """Sixty clients hang up while they queue, load, compute and stream; others are answered right,
    and afterwards nothing is pinned and the same prompts are found."""
    prompts = [prompt(600, seed=710 + n) for n in range(4)]
    served.reset(connector=True)
    expected = [served.complete(tokens, max_tokens=8)["text"] for tokens in prompts]
    served.reset()
    dice = random.Random(4)
    with ThreadPoolExecutor(12) as pool:
        leaving = [
            pool.submit(leave, served, dice.choice(prompts), dice.uniform(0.005, 0.6))
            for _ in range(60)
        ]
        staying = [pool.submit(served.complete, prompts[n % 4], 8) for n in range(12)]
        assert [each.result()["text"] for each in staying] == [expected[n % 4] for n in range(12)]
        came = [each.result() for each in leaving]
    assert 0 in came, "nobody left before the first token"
    assert any(came), "nobody left later"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        metrics = served.metrics()
        busy = sum(v for k, v in metrics.items() if k.startswith("vllm:num_requests_"))
        pinned = sum(v for k, v in metrics.items() if "undercroft_pinned_chunks" in k)
        if not (busy or pinned):
            break
        served.complete(prompts[0][:40], max_tokens=1)  # an idle engine reports nothing
        time.sleep(0.2)
    assert (busy, pinned) == (0, 0)
    served.reset()
    again = [served.complete(tokens, max_tokens=8) for tokens in prompts]
    assert [answer["text"] for answer in again] == expected
    assert [answer["cached_tokens"] for answer in again] == [600 // BLOCK_TOKENS * BLOCK_TOKENS] * 4
