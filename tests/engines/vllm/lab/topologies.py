"""An engine of several ranks in processes of their own, driven from outside by one JSON line.

`python -m tests.engines.vllm.lab.topologies WORK`: WORK is JSON with `engine` (arguments of
`vllm.LLM`), `prompts`, and `phases`. Prints one JSON line of results, by phase: `fresh` (as asked
first), `loaded` (the engine's own cache dropped before), `zeroed` (as loaded, and every page that a
load brought is cleared).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.engine import ROOT, engine_arguments, environment

PHASES = ("fresh", "loaded", "zeroed")


def zero_loads(_worker: Any) -> None:
    """In a rank: from now on every load leaves zeros."""
    import numpy as np

    from undercroft.engines.vllm.worker import CpuWorker

    def zeroing(self: Any, _copy: Any, parts: Any) -> Any:
        engine = np.frombuffer(self._engine.buffer, np.uint8)
        for group, places in parts:
            for pages in self._pages(group, places):
                for start in pages.engine.ravel().tolist():
                    engine[start : start + pages.page_bytes] = 0
                yield int(pages.engine.size) * pages.page_bytes

    CpuWorker._load_with = zeroing  # type: ignore[method-assign]


def _reset(llm: Any) -> None:
    ends = time.monotonic() + 60
    while not llm.reset_prefix_cache():
        assert time.monotonic() < ends, "blocks are still held"
        time.sleep(0.05)


def _ask(llm: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for prompt in prompts:
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        steps = zip(tokens, output.outputs[0].logprobs, strict=True)
        logprobs = [step[token].logprob for token, step in steps]
        found.append(
            {"tokens": tokens, "logprobs": logprobs, "cached_tokens": output.num_cached_tokens}
        )
    return found


def main() -> None:
    work = json.loads(sys.argv[1])
    from vllm import LLM

    llm = LLM(**work["engine"])
    results = {}
    for phase in work["phases"]:
        if phase != "fresh":
            _ask(llm, [[1, 2, 3]])  # stores of the last step are submitted in the next one
            time.sleep(1.0)
            _reset(llm)
        if phase == "zeroed":
            llm.collective_rpc(zero_loads)
        results[phase] = _ask(llm, work["prompts"])
    _ask(llm, [[1, 2, 3]])
    time.sleep(1.0)
    llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(f"\nRESULTS {json.dumps(results)}\n")
    sys.stdout.flush()


def run(
    model: str, offload: Any, prompts: list[list[int]], phases: Any, folder: Path, **engine: Any
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Run one engine to its end.

    Returns:
        The results by phase, and everything that it logged.
    """
    arguments = engine_arguments(model, offload, **engine)
    work = {"engine": arguments, "prompts": prompts, "phases": list(phases)}
    world = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    env = environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_CPU_OMP_THREADS_BIND="|".join(str(rank % 2) for rank in range(world)),
        VLLM_USE_AOT_COMPILE="0",
    )
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.lab.topologies", json.dumps(work)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    for left in set(Path("/dev/shm").glob("vllm_dist_*")) - before:
        if left.stat().st_uid == os.geteuid():
            left.unlink(missing_ok=True)
    log = done.stdout + done.stderr
    (folder / "log.txt").write_text(log)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"no results; the end of the log:\n{log[-8000:]}"
    return json.loads(lines[-1].removeprefix("RESULTS ")), log


if __name__ == "__main__":
    main()
