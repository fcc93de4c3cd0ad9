"""One run of a real vLLM engine for the demo, in a process of its own.

`python -m demo.engine REQUEST.json` starts stock vLLM as its API server does (an engine core in
another process), runs the cases of the request one after another and prints one JSON line for
each; the engine's own log goes to standard error.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESET_PATIENCE_S = 20.0
QUIET_S = 1.0


@contextmanager
def reporting() -> Iterator[Callable[..., None]]:
    """Keep standard output for the report: everything else that prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def report(**fields: Any) -> None:
            out.write(json.dumps(fields) + "\n")
            out.flush()

        yield report


def engine_arguments(request: dict[str, Any]) -> Any:
    """What `vllm serve MODEL --kv-transfer-config ...` would make of its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=8192,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": request["offload"],
        },
    )


async def ask(engine: Any, name: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Stream one greedy answer; the first token's time is taken when it arrives here."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=["\n"])
    started = time.perf_counter()
    ttft_s = None
    last = None
    async for last in engine.generate({"prompt_token_ids": prompt}, params, request_id=name):
        if ttft_s is None and last.outputs[0].token_ids:
            ttft_s = time.perf_counter() - started
    if last is None or ttft_s is None:
        raise RuntimeError(f"the engine gave no token for {name!r}")
    return {
        "ttft_s": ttft_s,
        "total_s": time.perf_counter() - started,
        "tokens": list(last.outputs[0].token_ids),
        "text": last.outputs[0].text,
        "reused_tokens": last.num_cached_tokens or 0,
        "prompt_tokens": len(prompt),
    }


async def forget(engine: Any) -> None:
    """Empty the engine's own prefix cache; what was offloaded stays."""
    deadline = time.perf_counter() + RESET_PATIENCE_S
    while not await engine.reset_prefix_cache():
        if time.perf_counter() > deadline:
            raise RuntimeError("the engine would not reset its prefix cache")
        await asyncio.sleep(0.05)


async def until_quiet(folder: Path) -> int:
    """Wait until nothing in `folder` changes any more; the bytes it takes on the disk."""
    seen: dict[Path, tuple[int, int]] = {}
    quiet_since = time.perf_counter()
    while time.perf_counter() - quiet_since < QUIET_S:
        now = {
            path: (path.stat().st_mtime_ns, path.stat().st_blocks * 512)
            for path in folder.rglob("*")
            if path.is_file()
        }
        if now != seen:
            seen, quiet_since = now, time.perf_counter()
        await asyncio.sleep(0.1)
    return sum(size for _, size in seen.values())


async def run(request: dict[str, Any], report: Callable[..., None]) -> None:
    """Start the engine, warm it up on another text, then run the cases in order."""
    from vllm.v1.engine.async_llm import AsyncLLM

    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(engine_arguments(request))
    try:
        await ask(engine, "warm-up", request["warm_up"], 4)
        report(event="ready", seconds=time.perf_counter() - started)
        for case in request["cases"]:
            if case == "host":
                await forget(engine)
            answer = await ask(engine, case, request["prompt"], request["max_tokens"])
            report(event="answer", case=case, **answer)
            if case == "cold":
                report(event="stored", disk_bytes=await until_quiet(Path(request["disk"])))
    finally:
        engine.shutdown()


def main() -> None:
    """Read the request and run it."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with reporting() as report:
        asyncio.run(run(request, report))


if __name__ == "__main__":
    main()
