"""First token of a prefix on disk, up to 4 times host memory, while another request decodes.

Real vLLM on the CPU, three engines alive at once, asked in turn in every round:

    plain      no connector, own cache emptied: recompute
    empty      our connector, a prompt that nobody has seen: recompute, and storing it
    ours       our connector, host memory full of something else, the whole prefix on disk

Only host memory's worth of a prefix can be reused, and it is the cheapest part: what a token costs
grows with what lies before it. So at 4 times host memory less than a quarter of the prefill can be
saved. That has to pay for the reads and for some steps of the other request, because a scheduler
asks, loads, and starts between two steps only.

Whether it does is a matter of compute time per byte of KV. Two models, both in float32: `tiny`, the
tests' own, 4 KiB a token, computes almost nothing but attention; `demo` has the shape of
SmolLM2-135M, 45 KiB a token, with random weights, which cost the same time. On two cores `tiny`
takes 15 to 24 ns a byte of KV, `demo` 56 to 59: `tiny` is the harder case. (By
arithmetic an accelerator that does 400 TFLOP/s takes 0.3 ns for a model of 8 B parameters with
128 KiB a token. Nothing here says how it would come out on one.)
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import AGAIN, Goal, Options, Row, Side

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery, Output, prompt  # noqa: E402
from tests.engines.vllm.lab.models import model_path  # noqa: E402

from demo import model as demo_model  # noqa: E402

CHUNK_TOKENS = 32
DECODER = prompt(20, seed=7)  # shorter than a chunk: it stores nothing
ARMS = ("plain", "empty", "ours")
TIMES_HOST = (1.0, 1.5, 2.5, 4.0)
CONTROL = 1.5
HOST_CHUNKS = {"tiny": 64, "demo": 8}
"""At which a round takes seconds."""


class Engines:
    """One for each side, and the prompts of each ratio of prefix to host memory."""

    def __init__(
        self, nursery: Nursery, model: str, folder: Path, host_chunks: int, longest: float
    ) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.chunk_bytes = CHUNK_TOKENS * layers * 2 * heads * head_size * 4
        self.host_chunks = host_chunks
        self._num_unseen = 0
        self._num_asked: dict[str, int] = {}
        self._texts: dict[float, list[list[int]]] = {}
        self._tokens: dict[tuple[float, int], int] = {}
        capacity = int(self.chunk_bytes * host_chunks * longest * 6 + (64 << 20))
        tokens = int(host_chunks * longest) * CHUNK_TOKENS + 256
        # A size of slots does not divide memory: half a chunk more, so that all fit.
        host = self.chunk_bytes * host_chunks + self.chunk_bytes // 2
        self.engines: dict[str, Engine] = {}
        for arm in ARMS:
            offload = None
            if arm != "plain":
                disk = {"type": "disk", "path": str(folder / arm), "capacity": capacity}
                offload = {**OFFLOADER, "host": host, "tiers": [disk]}
            self.engines[arm] = nursery.engine(
                model,
                offload,
                dtype="float32",
                max_model_len=min(tokens, config["max_position_embeddings"]),
                max_num_batched_tokens=2048,
                num_gpu_blocks_override=tokens // CHUNK_TOKENS + 64,
            )

    def seed(self, text: list[int]) -> None:
        """Bring all of a prompt to disk, over host memory that is smaller: part by part."""
        engine = self.engines["ours"]
        part = self.host_chunks * CHUNK_TOKENS
        for end in range(part, len(text) + part, part):
            # The engine's own cache keeps what came before, so each round stores what is new.
            engine.generate([text[:end]], max_tokens=1)
            engine.settle()
        engine.reset()

    def ask(self, arm: str, text: list[int]) -> dict[str, Any]:
        engine = self.engines[arm]
        if arm == "empty":
            self._num_unseen += 1
            text = prompt(len(text), seed=1000 + self._num_unseen)
        engine.reset()
        before = engine.counts()
        asked, decoded = [DECODER, text], [400, 2]
        outputs = engine.generate(
            asked, max_tokens=decoded, after_tokens={1: (0, 4)}, until=1, timeout_s=180
        )
        after = engine.counts()
        return self._result(outputs[1], before, after)

    def _result(
        self, output: Output, before: dict[str, int], after: dict[str, int]
    ) -> dict[str, Any]:
        read_bytes = after["read_bytes"] - before["read_bytes"]
        return {
            "first_token_s": output.first_token_s,
            "answered_s": output.answered_s,
            "loaded_s": output.loaded_s,
            "steps_to_first": output.steps_to_first,
            "reused_chunks": output.external_tokens // CHUNK_TOKENS,
            "read_per_loaded": read_bytes
            / self.chunk_bytes
            / max(1, after["blocks_loaded"] - before["blocks_loaded"]),
            "token": output.tokens[0],
        }

    def prepare(self, times_host: float) -> None:
        """Bring two prefixes to disk: what one left in host memory the other's restore evicts."""
        num_tokens = int(times_host * self.host_chunks) * CHUNK_TOKENS + 7
        texts = [prompt(num_tokens, seed=int(100 * times_host) + i) for i in (0, 1)]
        self._texts[times_host] = texts
        for text in texts:
            self.seed(text)
        for arm in ARMS:  # first times are slower
            self.ask(arm, texts[0])

    def run(self, side: str, times_host: float) -> dict[str, float]:
        """One measurement."""
        number = self._num_asked[side] = self._num_asked.get(side, -1) + 1
        arm = side.split(maxsplit=1)[0]
        text = (number + (AGAIN in side)) % 2
        told = self.ask(arm, self._texts[times_host][text])
        self.engines[arm].settle()
        if arm != "empty":
            expected = self._tokens.setdefault((times_host, text), told["token"])
            if told["token"] != expected:
                raise SystemExit(f"{side}: the first token is {told['token']}, not {expected}")
        return told


class FirstToken:
    """The case, for one model and number of threads."""

    rounds = 13

    def __init__(self, name: str, model: str, num_threads: int) -> None:
        threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        self.name = name
        self.about = f"first token of a prefix on disk while another decodes: {model}, {threads}"
        self._model = model
        self._num_threads = num_threads

    def rows(self, options: Options) -> Sequence[Row]:
        rows = []
        for times in self._times(options):
            ours = f"ours {times:g}x"
            rows += [
                Row(
                    f"prefix {times:g} times host memory",
                    (ours, "first_token_s"),
                    (f"{base} {times:g}x", "first_token_s"),
                    unit="s",
                    goals=[Goal(1.0)],
                )
                for base in ("plain", "empty")
            ]
            rows += [
                Row(f"  {what}", (ours, cost), unit=unit)
                for what, cost, unit in (
                    ("lookups answered after", "answered_s", "s"),
                    ("loaded after", "loaded_s", "s"),
                    ("steps to it", "steps_to_first", "steps"),
                    ("reused", "reused_chunks", "chunks"),
                    ("read for each that was loaded", "read_per_loaded", "chunks"),
                )
            ]
        return rows

    def _times(self, options: Options) -> Sequence[float]:
        return (CONTROL,) if options.quick else TIMES_HOST

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        host_chunks = HOST_CHUNKS[self._model]
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as name:
            folder = Path(name)
            with Nursery(folder, OMP_NUM_THREADS=str(self._num_threads)) as nursery:
                times = self._times(options)
                model = _find_model(self._model)
                engines = Engines(nursery, model, folder, host_chunks, max(times))
                sides: dict[str, Side] = {}
                for ratio in times:
                    engines.prepare(ratio)
                    for arm in ARMS:
                        side = f"{arm} {ratio:g}x"
                        sides[side] = partial(engines.run, side, ratio)
                control = f"ours {CONTROL:g}x{AGAIN}"
                sides[control] = partial(engines.run, control, CONTROL)
                yield sides


def _find_model(name: str) -> str:
    if name == "tiny":
        return str(model_path("llama"))
    folder = ROOT / ".cache" / "demo"
    return str(demo_model.get(folder, lambda line: print(f"  {line}"), random_only=True).path)
