"""What the disk's traffic does to a real engine's steps: the same decoding, disk busy and idle.

Stock vLLM on the CPU, one thread of compute, four requests decoding; the engine core's steps are
timed inside its process. In a process like that, as with one accelerator, the scheduler, the worker
that launches the model's kernels, and our movers share one interpreter.

`busy`: requests that only our hierarchy knows of come for chunks that are on disk, and others are
stored, so that 32 MiB of reads and of writes are under way or waiting at every step. `idle`: nobody
asks. `threads`: as `busy`, but moved by threads of this process rather than by the tier's own
process. `asleep`: the planning of `busy` over a disk that takes as long and moves nothing: the
scheduler's own work. `elsewhere`: `idle`, while *another process* moves as many bytes a second:
what the machine, its processors and its memory, does to a step whoever moves them. What `busy`
costs beyond `asleep` and `elsewhere` is the interpreter's lock.

What is compared is a step's wall time, whole, at its median and its 99th percentile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cases.engine import ROOT, _smollm2
from cases.step import step_rows, traffic
from harness import AGAIN, Options, Row, Side

sys.path[:0] = [str(ROOT)]

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, Nursery  # noqa: E402
from tests.engines.vllm.lab.models import model_path  # noqa: E402

NUM_REQUESTS = 4


class Measured:
    """One engine, and how fast its disk was when it was busy."""

    def __init__(self, engine: Engine, folder: Path, num_steps: int, chunk_bytes: int) -> None:
        self._engine = engine
        self._num_steps = num_steps
        self._chunk_bytes = chunk_bytes
        self._rate = 0.0
        self._file = folder / "traffic"
        with self._file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 64 << 20)

    def steps(
        self, *, saturated: bool, asleep: bool = False, threads: bool = False
    ) -> dict[str, float]:
        told: dict[str, float] = self._engine.inside(
            "saturate:steps",
            num_steps=self._num_steps,
            num_requests=NUM_REQUESTS,
            saturated=saturated,
            asleep=asleep,
            threads=threads,
        )
        if saturated and not (asleep or threads):
            self._rate = told["moved_bytes"] / told["seconds"]
            if not told["moved_bytes"]:
                raise SystemExit("the disk was to be busy, and moved nothing")
        gigabytes = max(told["moved_bytes"], 1) / 1e9
        return {
            "p50": told["p50"],
            "p99": told["p99"],
            "seconds a GB": told["seconds"] / gigabytes,
            "mover seconds a GB": told["mover_seconds"] / gigabytes,
        }

    def elsewhere(self) -> dict[str, float]:
        if not self._rate:
            self.steps(saturated=True)
        with traffic(self._file, self._rate, self._chunk_bytes) as moved:
            costs = self.steps(saturated=False)
        return costs | moved


class EngineStep:
    """The case, for one model and one size of chunks.

    Args:
        name: Of the case.
        model: `tiny`, whose steps take a few ms, or `smollm2`.
        blocks_per_chunk: Of 32 tokens.
        chunk_bytes: What that makes.
        num_steps: Timed in a measurement.
    """

    rounds = 9

    def __init__(
        self, name: str, model: str, blocks_per_chunk: int, chunk_bytes: int, num_steps: int
    ) -> None:
        self.name = name
        self.about = f"a step of a real engine while the disk is busy; {model}"
        self._model = model
        self._blocks_per_chunk = blocks_per_chunk
        self._chunk_bytes = chunk_bytes
        self._num_steps = num_steps

    def rows(self, options: Options) -> Sequence[Row]:
        """The bound of ours: a 99th percentile of at most 1.10 times an idle disk's."""
        del options
        bases = {
            "idle": "nothing to do",
            "elsewhere": "the same traffic of another process",
            "asleep": "the same work, nothing moved",
            "threads": "threads of this process instead of another",
        }
        moving = ("busy", "threads", "elsewhere")
        return [
            *step_rows("engine step", bases, bound="idle", moving=moving),
            Row(
                "processor time of the engine's mover threads, a GB",
                ("busy", "mover seconds a GB"),
                ("threads", "mover seconds a GB"),
                unit="s",
            ),
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        model = model_path("llama") if self._model == "tiny" else _smollm2()
        num_steps = 60 if options.quick else self._num_steps
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as name:
            folder = Path(name)
            with Nursery(folder) as nursery:
                engine = _engine(nursery, model, self._blocks_per_chunk, folder)
                it = Measured(engine, folder, num_steps, self._chunk_bytes)
                it.steps(saturated=True)  # first steps are slower, of any engine
                yield {
                    "busy": partial(it.steps, saturated=True),
                    "idle": partial(it.steps, saturated=False),
                    "asleep": partial(it.steps, saturated=True, asleep=True),
                    "threads": partial(it.steps, saturated=True, threads=True),
                    "elsewhere": it.elsewhere,
                    "busy" + AGAIN: partial(it.steps, saturated=True),
                }


def _engine(nursery: Nursery, model: Path, blocks_per_chunk: int, folder: Path) -> Engine:
    disk: dict[str, Any] = {"type": "disk", "path": str(folder / "kv"), "capacity": "2GiB"}
    return nursery.engine(
        str(model),
        {
            **OFFLOADER,
            "host": "384MiB",
            "blocks_per_chunk": blocks_per_chunk,
            "tiers": [disk | {"free_space_floor": 0, "mover_process": True}],
        },
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=NUM_REQUESTS,
        num_gpu_blocks_override=320,
    )
