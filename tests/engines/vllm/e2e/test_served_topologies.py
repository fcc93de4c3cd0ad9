"""`undercroft serve` with several ranks or replicas: what one stored, the other loads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import total
from tests.engines.vllm.lab import zeroing
from tests.engines.vllm.lab.engine import BLOCK_TOKENS, prompt
from tests.engines.vllm.lab.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [prompt(650, seed=31), prompt(650, seed=32, shared=320), prompt(330, seed=33)]
WHOLE_BLOCKS = [len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS]
TP_2 = ["--tensor-parallel-size", "2"]
SHARED = Path("/dev/shm")
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@contextmanager
def server(folder: Path, kv: Path, *words: str, **env: str) -> Iterator[Server]:
    """A server whose loads can be zeroed, above the disk folder `kv`."""
    folder.mkdir()
    kv.mkdir(exist_ok=True)
    ours = ["--host", "32MiB", "--disk", f"{kv}:64MiB", "--set", "promote_deadline_s=30"]
    control = ["--worker-extension-cls", f"{zeroing.__name__}.Zeroing"]
    env[zeroing.VARIABLE] = str(folder / "zero")
    before = set(SHARED.glob("vllm_dist_*"))
    try:
        with Server(folder, [*ours, *control, *words], **env) as running:
            yield running
            assert "Traceback" not in running.log_text()
    finally:
        for left in set(SHARED.glob("vllm_dist_*")) - before:  # vLLM's own, by its tensor ranks
            left.unlink(missing_ok=True)


def ask(running: Server, prompts: list[list[int]] = PROMPTS) -> tuple[list[str], list[int]]:
    """What is answered to each, and how many tokens of each were not computed."""
    answers = [running.complete(tokens) for tokens in prompts]
    return [each["text"] for each in answers], [each["cached_tokens"] for each in answers]


def loads_right(running: Server, expected: list[str]) -> None:
    """All prompts are loaded and answered as expected, and not so if the loads are zeroed."""
    running.reset()
    assert ask(running) == (expected, WHOLE_BLOCKS)
    running.reset()
    zero = running.folder / "zero"
    zero.touch()
    texts, _ = ask(running)
    zero.unlink()
    assert all(text != right for text, right in zip(texts, expected, strict=True))


def stored(running: Server) -> None:
    """Wait until what was asked is on disk: no more has come to it for a while."""
    known, since = -1.0, time.monotonic()
    give_up_at = since + 60
    while time.monotonic() < min(since + 1.5, give_up_at) or known <= 0:
        now = total(running.metrics(), "cascaded_chunks", "disk")
        if now != known:
            known, since = now, time.monotonic()
        time.sleep(0.1)
        assert time.monotonic() < give_up_at, "nothing came to the disk, or it never ends"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one rank, which computes everything."""
    folder = tmp_path_factory.mktemp("one-rank")
    with server(folder / "server", folder / "kv") as running:
        texts, cached = ask(running)
        assert cached[0] == cached[2] == 0
        loads_right(running, texts)
    return texts


def test_tensor_parallel(expected: list[str], tmp_path: Path) -> None:
    """Two ranks store and load; one rank then loads the same files, and stores what two load."""
    kv = tmp_path / "kv"
    canonical = ["--set", "canonical_layout=true"]
    with server(tmp_path / "two", kv, *TP_2, *canonical, **TWO_CORES) as two:
        assert ask(two)[0] == expected
        loads_right(two, expected)
    more = [prompt(500, seed=34)]
    with server(tmp_path / "one", kv, *canonical) as one:
        assert ask(one) == (expected, WHOLE_BLOCKS)
        loads_right(one, expected)
        there, _ = ask(one, more)
    with server(tmp_path / "again", kv, *TP_2, *canonical, **TWO_CORES) as again:
        assert ask(again, more) == (there, [len(more[0]) // BLOCK_TOKENS * BLOCK_TOKENS])
        loads_right(again, expected)


def test_data_parallel(expected: list[str], tmp_path: Path) -> None:
    """What one replica stored the other loads from the disk they share, and needs."""
    words = ["--data-parallel-size", "2"]
    with server(tmp_path / "two", tmp_path / "kv", *words, **TWO_CORES) as two:
        first = [two.complete(tokens, replica=0) for tokens in PROMPTS]
        assert [each["text"] for each in first] == expected
        stored(two)
        second = [two.complete(tokens, replica=1) for tokens in PROMPTS]
        assert [each["text"] for each in second] == expected
        assert [each["cached_tokens"] for each in second] == WHOLE_BLOCKS
        two.reset()
        (two.folder / "zero").touch()
        zeroed = [two.complete(tokens, replica=1) for tokens in PROMPTS]
        assert [each["cached_tokens"] for each in zeroed] == WHOLE_BLOCKS
        assert all(each["text"] != right for each, right in zip(zeroed, expected, strict=True))
