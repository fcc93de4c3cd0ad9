"""A disk that is slower than computing is left alone, and one that is quicker is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, total
from tests.engines.vllm.e2e.test_faults import faulty
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Engine, Nursery, Output, prompt
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import Fault

NUM_TOKENS = 2000
WHOLE_BLOCKS = NUM_TOKENS // BLOCK_TOKENS
PROMPTS = [prompt(NUM_TOKENS, seed=700 + n) for n in range(8)]
TIMES_SLOWER = 10
NUM_MOVERS = 4


class Slowed:
    """An engine with the settings' defaults above a disk that can be made slow."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.control = FaultControl(folder / "faults.json")
        tier = faulty(folder / "kv", self.control.path, capacity="128MiB")
        transfer = {
            "kv_connector": "UndercroftConnector",
            "kv_connector_module_path": "undercroft.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host": "6MiB", "tiers": [tier]},
        }
        self.engine: Engine = nursery.engine("llama", None, kv_transfer_config=transfer)

    def slow_down(self, read_s: float) -> None:
        self.control.apply(Fault("slow", calls=("read_into",), seconds=read_s))

    def ask(self, tokens: list[int]) -> Output:
        """Nothing of it is in the engine's own cache."""
        self.engine.reset()
        (output,) = self.engine.generate([tokens])
        self.engine.settle()
        return output

    def loaded_chunks(self) -> float:
        metrics = self.engine.metrics()
        in_all, of_host = (total(metrics, "hit_chunks_total", at) for at in ("", "level=host"))
        return in_all - of_host

    def skipped(self) -> float:
        return total(self.engine.metrics(), "skipped_restores_total")


@pytest.fixture
def slowed(nursery: Nursery, tmp_path: Path) -> Iterator[Slowed]:
    slowed = Slowed(nursery, tmp_path)
    yield slowed
    slowed.control.clear()
    slowed.engine.close()


def alone(plain: Plain, tokens: list[int]) -> Output:
    """What the engine without offloading does with it now."""
    engine = plain.engine("llama")
    engine.reset()
    (output,) = engine.generate([tokens])
    return output


def test_a_slow_disk_costs_no_time_and_a_quick_one_is_read(plain: Plain, slowed: Slowed) -> None:
    """Ten times slower than computing: no later first token, right answers, and it is counted.

    The same prompts are loaded before, and again once the disk is quick again.
    """
    expected = [alone(plain, tokens) for tokens in PROMPTS]
    computed_s = median(output.first_token_s for output in expected)
    assert_same([slowed.ask(tokens) for tokens in PROMPTS], expected)

    quick = [slowed.ask(tokens) for tokens in PROMPTS[:2]]
    assert_same(quick, expected[:2])
    assert min(output.external_tokens for output in quick) == WHOLE_BLOCKS * BLOCK_TOKENS
    assert slowed.loaded_chunks() == 2 * WHOLE_BLOCKS
    assert slowed.skipped() == 0

    slowed.slow_down(TIMES_SLOWER * computed_s * NUM_MOVERS / WHOLE_BLOCKS)
    first = slowed.ask(PROMPTS[2])  # nobody knows yet; it waits for its deadline at most
    assert_same([first], expected[2:3])
    ratios, skipped = [], slowed.skipped()
    for number in range(3, len(PROMPTS)):
        with_disk, without = slowed.ask(PROMPTS[number]), alone(plain, PROMPTS[number])
        assert_same([with_disk], [without])
        ratios.append(with_disk.first_token_s / without.first_token_s)
    print(
        f"computed in {computed_s:.3f} s; read in {quick[1].first_token_s:.3f} s; "
        f"first slow {first.first_token_s:.3f} s; ratios {sorted(ratios)}"
    )
    assert slowed.skipped() - skipped == len(ratios)
    assert median(ratios) < 1.3

    slowed.control.clear()
    ends = time.monotonic() + 60
    number = 0
    while slowed.ask(PROMPTS[number % 5]).external_tokens < WHOLE_BLOCKS * BLOCK_TOKENS:
        number += 1
        assert time.monotonic() < ends, "it stays with what it once saw"
        time.sleep(0.2)
