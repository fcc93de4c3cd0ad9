"""A disk folder damaged between two runs: a miss, a counter, a repair, and never a wrong token."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import Plain, assert_same, offload, one_by_one, total
from tests.engines.vllm.lab import damage
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, Nursery, prompt

PROMPTS = [prompt(650, seed=400), prompt(650, seed=401)]
WHOLE = [len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]


@pytest.fixture(scope="module")
def stored(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with both prompts' chunks, its engine ended."""
    folder: Path = tmp_path_factory.mktemp("stored")
    engine = nursery.engine("llama", offload(folder))
    one_by_one(engine, PROMPTS)
    engine.settle()
    engine.close()
    assert len(damage.records(folder)) == sum(WHOLE) // BLOCK_TOKENS
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("harm", damage.LOSES_CHUNKS, ids=lambda harm: harm.__name__)
def test_damage_is_a_miss_and_is_repaired(
    nursery: Nursery,
    plain: Plain,
    stored: Path,
    tmp_path: Path,
    harm: Callable[[Path], None],
) -> None:
    """After any damage: output equal; what was lost is stored again; then everything hits."""
    folder = tmp_path / "kv"
    shutil.copytree(stored, folder)
    harm(folder)
    expected = plain.answers(PROMPTS)

    engine = nursery.engine("llama", offload(folder))
    assert_same(one_by_one(engine, PROMPTS), expected)
    engine.settle()
    engine.reset()
    assert_same(one_by_one(engine, PROMPTS), expected)
    engine.settle()
    engine.close()

    repaired = nursery.engine("llama", offload(folder))
    outputs = one_by_one(repaired, PROMPTS)
    assert_same(outputs, expected)
    assert [output.external_tokens for output in outputs] == WHOLE
    repaired.close()


@pytest.mark.parametrize(
    "harm",
    [damage.flip_payloads, damage.swap_payloads, damage.zero_payloads],
    ids=lambda harm: harm.__name__,
)
def test_damage_is_counted(
    nursery: Nursery, plain: Plain, stored: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Chunks whose bytes are wrong are dropped and counted as corrupt."""
    folder = tmp_path / "kv"
    shutil.copytree(stored, folder)
    harm(folder)
    engine = nursery.engine("llama", offload(folder))
    assert_same(one_by_one(engine, PROMPTS), plain.answers(PROMPTS))
    engine.settle()
    assert total(engine.metrics(), "drop", "corrupt") > 0
    engine.close()


def test_grown_files_lose_nothing(
    nursery: Nursery, plain: Plain, stored: Path, tmp_path: Path
) -> None:
    """Garbage behind the end of the files is not looked at, or costs chunks: never an output."""
    folder = tmp_path / "kv"
    shutil.copytree(stored, folder)
    damage.grow_files(folder)
    engine = nursery.engine("llama", offload(folder))
    assert_same(one_by_one(engine, PROMPTS), plain.answers(PROMPTS))
    engine.settle()
    engine.reset()
    assert_same(one_by_one(engine, PROMPTS), plain.answers(PROMPTS))
    engine.close()
