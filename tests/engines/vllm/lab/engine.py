"""Engines for tests: each a process of its own, driven over a socket, killed when a test says so.

with Nursery(tmp_path) as nursery:
    engine = nursery.engine("llama", host="8MiB", tiers=[...])
    first = engine.generate([prompt(1000, seed=1)])
    engine.settle()
    engine.kill()
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engines.vllm.lab.models import model_path

ROOT = Path(__file__).resolve().parents[4]
BLOCK_TOKENS = 32
LLAMA_CHUNK_BYTES = BLOCK_TOKENS * 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, head size, fp32
OFFLOADER = {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineFailed(AssertionError):
    """The engine process reported an error or went away; its log is in the message."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one request gave."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    external_tokens: int
    lookups: int
    steps_to_first: int
    answered_s: float
    """From its arrival to the end of its lookups; with hits the load comes after that."""
    loaded_s: float
    """From its arrival to the end of its load; 0.0 without a load."""
    first_token_s: float
    token_s: tuple[float, ...] = field(repr=False)


def _output(answer: dict[str, Any]) -> Output:
    return Output(**answer | {k: tuple(answer[k]) for k in ("tokens", "logprobs", "token_s")})


def prompt(num_tokens: int, seed: int, shared: int = 0) -> list[int]:
    """Random byte tokens; the first `shared` are the same for every seed."""
    head = random.Random(0).choices(range(256), k=shared)
    return head + random.Random(seed + 1).choices(range(256), k=num_tokens - shared)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a small, quiet, single-threaded engine that can import this checkout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # What is meant for the tests is no setting of the library, which would refuse it.
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UNDERCROFT_TEST_", "UNDERCROFT_LAB_"))
    }
    return {**given, **_ENVIRONMENT, "PYTHONPATH": path.rstrip(os.pathsep), **extra}


def engine_arguments(
    model: str, offload: dict[str, Any] | None, **overrides: Any
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; `offload` is the connector's extra config."""
    arguments: dict[str, Any] = {
        "model": str(model_path(model)),
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "max_model_len": 12288,
        "max_num_batched_tokens": 12288,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 640,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if offload is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": offload,
        }
    return arguments | overrides


class Engine:
    """One engine process. `close` ends it properly, `kill` does not."""

    def __init__(self, address: str, log: Path) -> None:
        self._log = log
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(280)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self.pid = 0

    def start(self, arguments: dict[str, Any], before: Sequence[str] = ()) -> None:
        for function in before:
            self.inside(function)
        started = self._do("start", engine=arguments)
        self.pid = started["pid"]
        self.num_blocks = started["num_blocks"]
        self.start_s = started["seconds"]

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int | list[int] = 8,
        after_tokens: Mapping[int, tuple[int, int]] | None = None,
        until: int | None = None,
        timeout_s: float = 200.0,
    ) -> list[Output]:
        """Run prompts together; `after_tokens={1: (0, 5)}`: number 1 starts at 0's 5th token.

        With `until=1` the others are aborted when number 1 has ended; they give what they have.
        """
        limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        requests: list[dict[str, Any]] = [
            {"prompt": tokens, "max_tokens": limit}
            for tokens, limit in zip(prompts, limits, strict=True)
        ]
        for index, other in (after_tokens or {}).items():
            requests[index]["after_tokens"] = other
        answers = self._do("generate", requests=requests, until=until, timeout_s=timeout_s)
        return [_output(answer) for answer in answers]

    def begin(self, prompts: list[list[int]]) -> None:
        """Send prompts and do not wait; nothing but `kill` may follow."""
        requests = [{"prompt": tokens, "max_tokens": 8} for tokens in prompts]
        self._lines.write(json.dumps({"do": "generate", "requests": requests, "timeout_s": 200}))
        self._lines.write("\n")
        self._lines.flush()

    def settle(self, timeout_s: float = 120.0) -> None:
        """Let every store and cascade that is under way end."""
        self._do("settle", timeout_s=timeout_s)

    def inside(self, function: str, **arguments: Any) -> Any:
        """Call `module:name` of this folder in the engine's process; see the function."""
        return self._do("inside", function=function, arguments=arguments)

    def reset(self, *, connector: bool = False) -> None:
        """Forget the engine's own prefix cache; with `connector`, everything that was stored."""
        if not self._do("reset", connector=connector):
            raise EngineFailed("reset_prefix_cache kept answering False")

    def zero_loads(self, *, on: bool) -> None:
        """The negative control: while on, each loaded block is zeroed after its load."""
        self._do("zero_loads", on=on)

    def counts(self) -> dict[str, int]:
        """The probe's counts and the process's I/O so far."""
        return {"blocks_loaded": 0, "blocks_stored": 0, "loads": 0, **self._do("counts")}

    def metrics(self) -> dict[str, float]:
        """All Prometheus samples, `name|label=value` to number."""
        answer: dict[str, float] = self._do("metrics")
        return answer

    def close(self) -> None:
        """Shut the engine down as vLLM does, and wait for the process to end."""
        if self.pid and _alive(self.pid):
            self._do("close")
        self._gone()

    def kill(self) -> None:
        """`kill -9`, at once; of one that was killed already, clear up."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._gone()

    def hang_up(self) -> None:
        """Nothing more is said to it, whether it lives or not."""
        with suppress(OSError):  # what was not sent yet to one that is gone
            self._lines.close()
        self._socket.close()

    def _gone(self) -> None:
        self.hang_up()
        deadline = time.monotonic() + 100
        while self.pid and _alive(self.pid):
            if time.monotonic() > deadline:
                raise EngineFailed(f"process {self.pid} is still there after 100 s")
            time.sleep(0.01)

    def _do(self, name: str, **arguments: Any) -> Any:
        try:
            self._lines.write(json.dumps({"do": name, **arguments}) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            raise EngineFailed(f"{name}: {error}\n{self._tail()}") from error
        if not line:
            raise EngineFailed(f"{name}: the engine process ended\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{name}: {answer['error']}\n{self._tail()}")
        return answer["ok"]

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]


class Nursery:
    """A process that has vLLM imported and forks engines, so that each starts in ~2 s."""

    def __init__(self, folder: Path, **extra_environment: str) -> None:
        self.log = folder / "engines.log"
        self._address = str(folder / "nursery")
        self._engines: list[Engine] = []
        self._log_file = self.log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm.lab.driver", self._address],
            cwd=ROOT,
            env=environment(**extra_environment),
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 250
        while not Path(self._address).exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailed(f"no nursery\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.05)

    def engine(
        self,
        model: str = "llama",
        offload: dict[str, Any] | None = None,
        *,
        before: Sequence[str] = (),
        **overrides: Any,
    ) -> Engine:
        """A started engine; `offload` is the connector's extra config, None: no connector.

        `before` names functions, as for `Engine.inside`, to call before it starts.
        """
        engine = Engine(self._address, self.log)
        self._engines.append(engine)
        engine.start(engine_arguments(model, offload, **overrides), before)
        return engine

    def log_text(self) -> str:
        """Everything the engines have printed so far."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Kill what is left: engines first, then the process that forked them."""
        for engine in self._engines:
            if engine.pid and _alive(engine.pid):
                engine.kill()
            engine.hang_up()
        self._process.kill()
        self._process.wait()
        self._log_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
