"""What recording a trace costs the scheduler: the same requests, recorded and not.

A request is what the manager is asked for one: it comes, its chunks are looked up, half of them are
stored, steps end, it ends. `cpu` is the processor time of the scheduler's thread; `wall` is its
wall time, in which is what the recorder's thread keeps it from, by the interpreter's lock and
otherwise, with requests that come as fast as they can. vLLM's own scheduler, which takes some
milliseconds for a request, is not in either: of a scheduler's whole time recording is less than of
this. `handed over` is all that the scheduler's thread does for it.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cases.scheduler import Ours, keys_from
from harness import AGAIN, Goal, Options, Row, Side

SIZES = (16, 128, 1024)
"""Chunks of a request, of 16 tokens each."""
CHUNKS_A_ROUND = 60_000
STEPS_A_REQUEST = 20
HANDED_OVER = 200
PACE_S = 0.002
"""Between two requests, as the model computes: the recorder's thread works then, too."""


class Served:
    """A manager that serves requests of `num_chunks` chunks, recorded into `folder` or not."""

    def __init__(self, folder: Path | None, num_chunks: int) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        from undercroft.clock import SystemClock
        from undercroft.engines.recording import recorder_for
        from undercroft.engines.vllm.recording import KINDS, Recording
        from undercroft.settings import load

        self.ours = Ours(16_384, "lru")
        self.num_chunks = num_chunks
        self.step_of = lambda name: ScheduleEndContext([name], [])
        self.recorder: Any = None
        self.cpu_s = self.wall_s = self.handed_s = 0.0
        manager = self.ours.manager
        if folder is not None:
            self.recorder = recorder_for(
                load({"host": "1GiB", "record": str(folder)}),
                [16],
                [bytes(4)],
                clock=SystemClock(),
                results=manager.hierarchy.counters.recorded_requests,
                kinds=KINDS,
            )
            self.recorder.start()
            manager.recording = Recording(self.recorder)

    def serve(self, name: str, keys: list[bytes]) -> None:
        ours, half = self.ours, len(keys) // 2
        request, step = ours.new(name, keys), self.step_of(name)
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        ours.begin(request)
        ours.lookup(keys[:half], request)
        ours.manager.on_schedule_end(step)
        accepted = ours.prepare_store(keys[half:], request)
        ours.complete_store(set(accepted), request)
        for _ in range(STEPS_A_REQUEST):
            ours.end_step()
            ours.stats()
        ours.finish(request)
        self.cpu_s += time.thread_time() - cpu_s
        self.wall_s += time.perf_counter() - wall_s

    def hand_over(self, requests: list[Any]) -> float:
        """Processor seconds of what is done for the recorder alone."""
        recording = self.ours.manager.recording
        begun = time.thread_time()
        for request in requests:
            recording.came(request)
            recording.began([request.req_id])
            recording.ended(request.req_id)
        return time.thread_time() - begun

    def close(self) -> float:
        """Processor seconds of the recorder's thread, nearly all of them."""
        if self.recorder is None:
            return 0.0
        clock = time.pthread_getcpuclockid(self.recorder._thread.ident)
        while self.recorder._waiting:
            time.sleep(0.01)
        seconds = time.clock_gettime(clock)
        self.recorder.close(time.monotonic() + 60)
        return seconds


def measure(num_chunks: int, folder: Path | None, num_requests: int) -> dict[str, float]:
    """Seconds a request."""
    served = Served(folder, num_chunks)
    shared, own = keys_from(0, num_chunks // 2), num_chunks - num_chunks // 2
    gc.collect()
    for number in range(num_requests):
        keys = shared + keys_from((number + 1) << 20, own)
        served.serve(f"request-{number}", keys)
        time.sleep(PACE_S)
    handed_s = 0.0
    if folder is not None:
        keys = shared + keys_from(0, own)
        more = [served.ours.new(f"more-{number}", keys) for number in range(HANDED_OVER)]
        handed_s = served.hand_over(more)
        num_requests += HANDED_OVER
    thread_s = served.close()
    counted = served.ours.manager.hierarchy.counters.recorded_requests
    if folder is not None and counted["written"] != num_requests:
        raise SystemExit(f"{num_requests} requests were served, of which {dict(counted)}")
    num_served = num_requests - (HANDED_OVER if folder is not None else 0)
    return {
        "cpu": served.cpu_s / num_served,
        "wall": served.wall_s / num_served,
        "handed": handed_s / HANDED_OVER,
        "thread": thread_s / num_requests,
    }


class Record:
    """The case."""

    name = "record"
    about = "a request's calls on the scheduler's thread, recorded and not"
    rounds = 9

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        rows = []
        for size in SIZES:
            what = f"a request of {size} chunks"
            for cost, label in (("cpu", "processor time"), ("wall", "wall time")):
                rows.append(
                    Row(
                        f"{what}, {label}",
                        ("recorded", f"{size} {cost}"),
                        ("not", f"{size} {cost}"),
                        unit="us",
                        scale=1e6,
                        goals=[Goal(least=0.99)],
                    )
                )
            rows += [
                Row(
                    f"{what}, {label}",
                    ("recorded", f"{size} {cost}"),
                    unit="us",
                    scale=1e6,
                    best=True,
                    goals=goals,
                )
                for cost, label, goals in (
                    ("handed", "handed over", [Goal(most=5.0)]),
                    ("thread", "the recorder's thread", []),
                )
            ]
        return rows

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        share = 20 if options.quick else 1

        def run(folder: Path | None) -> dict[str, float]:
            costs: dict[str, float] = {}
            for size in SIZES:
                num_requests = min(500, CHUNKS_A_ROUND // size) // share
                found = measure(size, folder, num_requests)
                costs |= {f"{size} {name}": seconds for name, seconds in found.items()}
            if folder is not None:
                shutil.rmtree(folder)
            return costs

        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as name:
            folder = Path(name) / "traces"
            yield {
                "recorded": partial(run, folder),
                "not": partial(run, None),
                "recorded" + AGAIN: partial(run, folder),
            }
