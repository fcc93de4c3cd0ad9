"""First token of a prefix on disk, up to 4 times host memory, while another request decodes.

    python bench/first_token.py [--model tiny|demo|FOLDER] [--pairs 13] [--threads 1] [--json FILE]

Real vLLM on the CPU, three engines alive at once, asked in turn in every repetition, the order
rotating, so that whatever else the machine does falls on all of them alike:

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
takes 15 to 24 ns a byte of KV, `demo` 56 to 59: `tiny` is the harder case, and the default. (By
arithmetic an accelerator that does 400 TFLOP/s takes 0.3 ns for a model of 8 B parameters with
128 KiB a token. None is served yet, and nothing here says how it would come out.)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery, Output, prompt  # noqa: E402
from tests.engines.vllm.lab.models import model_path  # noqa: E402

from demo import model as demo_model  # noqa: E402

CHUNK_TOKENS = 32
DECODER = prompt(20, seed=7)  # shorter than a chunk: it stores nothing
ARMS = ("plain", "empty", "ours")


class Case:
    """Three engines, and the prompts of one ratio of prefix to host memory."""

    def __init__(
        self, nursery: Nursery, model: str, folder: Path, host_chunks: int, longest: float
    ) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.chunk_bytes = CHUNK_TOKENS * layers * 2 * heads * head_size * 4
        self.host_chunks = host_chunks
        self._num_unseen = 0
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
            "lookups": output.lookups,
            "steps_to_first": output.steps_to_first,
            "reused_chunks": output.external_tokens // CHUNK_TOKENS,
            "loaded_chunks": after["blocks_loaded"] - before["blocks_loaded"],
            "read_chunks": read_bytes / self.chunk_bytes,
            "written_chunks": (after["written_bytes"] - before["written_bytes"]) / self.chunk_bytes,
            "token": output.tokens[0],
        }

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def measure(case: Case, times_host: float, pairs: int, say: Any) -> list[dict[str, Any]]:
    """Repetitions of all arms in turn, after one that does not count."""
    num_chunks = int(times_host * case.host_chunks)
    # Two prefixes, asked alternately: whatever one left in host memory the other's restore evicts.
    texts = [prompt(num_chunks * CHUNK_TOKENS + 7, seed=int(100 * times_host) + i) for i in (0, 1)]
    for text in texts:
        case.seed(text)
    found = []
    for repetition in range(pairs + 1):
        text = texts[repetition % 2]
        first = repetition % len(ARMS)
        order = ARMS[first:] + ARMS[:first]
        results = {}
        for arm in order:
            results[arm] = case.ask(arm, text)
            case.engines[arm].settle()
        say(
            f"    {times_host}: "
            + ", ".join(f"{a} {r['first_token_s']:.3f}" for a, r in results.items())
        )
        if repetition:
            found.append(results)
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """At least 95 % of the time the true median lies in here, whatever the distribution."""
    ordered, n = sorted(values), len(values)
    rank = 0
    while 2 * sum(math.comb(n, i) for i in range(rank + 1)) / 2**n <= 0.05:
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], ordered[n - 1 - rank]


def summary(times_host: float, found: list[dict[str, Any]]) -> dict[str, Any]:
    def median(arm: str, what: str) -> float:
        return float(statistics.median(r[arm][what] for r in found))

    ratios = {
        f"ours/{base}": [r["ours"]["first_token_s"] / r[base]["first_token_s"] for r in found]
        for base in ("plain", "empty")
    }
    return {
        "times_host": times_host,
        "first_token_s": {arm: median(arm, "first_token_s") for arm in ARMS},
        "steps_to_first": {arm: median(arm, "steps_to_first") for arm in ARMS},
        "answered_s": median("ours", "answered_s"),
        "loaded_s": median("ours", "loaded_s"),
        "ratio": {name: [statistics.median(r), *interval(r)] for name, r in ratios.items()},
        "reused_chunks": median("ours", "reused_chunks"),
        "read_per_loaded": statistics.median(
            r["ours"]["read_chunks"] / max(1, r["ours"]["loaded_chunks"]) for r in found
        ),
        "same_token": sum(r["ours"]["token"] == r["plain"]["token"] for r in found),
    }


def find_model(name: str, say: Any) -> tuple[str, int]:
    """Its folder, and a host memory, in chunks, at which a repetition takes seconds."""
    if name == "tiny":
        return str(model_path("llama")), 64
    if name == "demo":
        folder = demo_model.get(ROOT / ".cache" / "demo", say, random_only=True).path
        return str(folder), 8
    return name, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=13)
    parser.add_argument("--times", type=float, nargs="*", default=[1.0, 1.5, 2.5, 4.0])
    parser.add_argument("--host-chunks", type=int, help="host memory, in chunks")
    parser.add_argument("--threads", type=int, default=1, help="of the engine's compute")
    parser.add_argument("--model", default="tiny", help="tiny, demo, or a model's folder")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where the disk is")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say = print if given.verbose else lambda _: None
    model, host_chunks = find_model(given.model, say)
    host_chunks = given.host_chunks or host_chunks
    results = []
    with tempfile.TemporaryDirectory(dir=given.path, prefix="uc-bench-") as name:
        folder = Path(name)
        with Nursery(folder, OMP_NUM_THREADS=str(given.threads)) as nursery:
            case = Case(nursery, model, folder, host_chunks, max(given.times))
            print(
                f"host memory: {host_chunks} chunks of {case.chunk_bytes >> 10} KiB, "
                f"{CHUNK_TOKENS} tokens each; {given.pairs} repetitions"
            )
            for times_host in given.times:
                found = measure(case, times_host, given.pairs, say)
                results.append(summary(times_host, found) | {"repetitions": found})
                show(results[-1])
            case.close()
    if given.json:
        host = {"machine": platform.machine(), "kernel": platform.release(), "cpus": os.cpu_count()}
        document = {"host": host, "threads": given.threads, "results": results}
        given.json.write_text(json.dumps(document, indent=1))


def show(result: dict[str, Any]) -> None:
    times = result["first_token_s"]
    ratios = "  ".join(
        f"{name} {r[0]:.2f} [{r[1]:.2f}, {r[2]:.2f}]" for name, r in result["ratio"].items()
    )
    steps = ", ".join(f"{arm} {n:.0f}" for arm, n in result["steps_to_first"].items())
    print(
        f"{result['times_host']:>4}x  first token, s: "
        + "  ".join(f"{arm} {s:.3f}" for arm, s in times.items())
        + f"\n       {ratios}"
        f"\n       steps to it: {steps}"
        f"\n       reused {result['reused_chunks']:.0f} chunks, "
        f"read {result['read_per_loaded']:.2f} times what was loaded; "
        f"lookups answered after {result['answered_s']:.3f} s, "
        f"loaded after {result['loaded_s']:.3f} s; same token {result['same_token']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
