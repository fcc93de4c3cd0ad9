"""The process behind `lab.engine`: imports vLLM once, then forks an engine per connection.

`python -m tests.engines.vllm.lab.driver SOCKET` listens on a unix socket. Every connection gets a
forked child with a whole in-process engine of its own, which answers JSON lines until it is
closed or killed: a real process to `kill -9`, without paying for the import each time.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from tests.engines.vllm.lab.probe import Probe, process_io


class Driver:
    """One engine and the commands a test may give it."""

    def __init__(self) -> None:
        self.probe = Probe()
        self.probe.install()
        self.llm: Any = None
        self._num_requests = 0

    def start(self, engine: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        from undercroft.tiers.disk import upkeep

        upkeep._EPOCH_WAIT_S = 10.0  # as in `tests/conftest.py`: a busy machine needs longer
        started = time.perf_counter()
        self.llm = LLM(**engine)
        core = self.llm.llm_engine.engine_core.engine_core
        return {
            "pid": os.getpid(),
            "seconds": time.perf_counter() - started,
            "num_blocks": core.vllm_config.cache_config.num_gpu_blocks,
        }

    def generate(
        self, requests: list[dict[str, Any]], timeout_s: float, until: int | None = None
    ) -> list[dict[str, Any]]:
        """Run requests to their end; `after_tokens: [index, n]` delays one behind another.

        With `until`, what still runs when that one has ended is aborted.
        """
        waiting = dict(enumerate(requests))
        running: dict[str, dict[str, Any]] = {}
        results: list[dict[str, Any]] = [{} for _ in requests]
        deadline = time.perf_counter() + timeout_s
        step = 0
        while waiting or running:
            for index in [i for i, r in waiting.items() if self._may_start(r, results)]:
                self._add(index, waiting.pop(index), running, results, step)
            step += 1
            outputs = self.llm.llm_engine.step()
            for output in outputs:
                self._take(output, running, results, step)
            if not outputs:
                time.sleep(0.001)  # as vLLM's own loop does while a connector works
            if until is not None and "cached_tokens" in results[until]:
                self._abort(running, results)
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(running)} requests unfinished after {step} steps")
        return results

    def _abort(self, running: dict[str, dict[str, Any]], results: list[dict[str, Any]]) -> None:
        self.llm.llm_engine.abort_request(list(running))
        for state in running.values():
            result = results[state["index"]]
            self._describe(result, state)
            result.update(logprobs=[], cached_tokens=0)
            for name in ("first_token_s", "steps_to_first"):
                result.setdefault(name, 0)
        running.clear()

    def _may_start(self, request: dict[str, Any], results: list[dict[str, Any]]) -> bool:
        index, num_tokens = request.get("after_tokens", (None, 0))
        return index is None or len(results[index].get("tokens", ())) >= num_tokens

    def inside(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call `module:name` of `tests.engines.vllm.lab` in this process, with this driver."""
        module, name = function.split(":")
        found = importlib.import_module(f"tests.engines.vllm.lab.{module}")
        return getattr(found, name)(self, **arguments)

    def _add(
        self,
        index: int,
        request: dict[str, Any],
        running: dict[str, dict[str, Any]],
        results: list[dict[str, Any]],
        step: int,
    ) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=1,
        )
        external = f"r{self._num_requests}"
        self._num_requests += 1
        results[index].update(tokens=[], token_s=[])
        running[external] = {"index": index, "step": step, "at": time.perf_counter()}
        running[external]["internal"] = self.llm.llm_engine.add_request(
            external, {"prompt_token_ids": request["prompt"]}, params
        )

    def _take(
        self,
        output: Any,
        running: dict[str, dict[str, Any]],
        results: list[dict[str, Any]],
        step: int,
    ) -> None:
        state = running[output.request_id]
        result = results[state["index"]]
        now = time.perf_counter()
        tokens = list(output.outputs[0].token_ids)
        if tokens and not result["tokens"]:
            result["first_token_s"] = now - state["at"]
            result["steps_to_first"] = step - state["step"]
        result["tokens"] = tokens
        result["token_s"].append(now - state["at"])
        if not output.finished:
            return
        result["logprobs"] = [
            choice[token].logprob
            for choice, token in zip(output.outputs[0].logprobs, tokens, strict=True)
        ]
        result["cached_tokens"] = output.num_cached_tokens or 0
        self._describe(result, state)
        del running[output.request_id]

    def _describe(self, result: dict[str, Any], state: dict[str, Any]) -> None:
        """What the probe knows of a request."""
        internal = state["internal"]
        result["external_tokens"] = self.probe.external_tokens.get(internal, 0)
        result["lookups"] = self.probe.lookups.get(internal, 0)
        for name, moments in (
            ("answered_s", self.probe.answered_at),
            ("loaded_s", self.probe.loaded_at),
        ):
            at = moments.get(internal)
            result[name] = at - state["at"] if at is not None else 0.0

    def settle(self, timeout_s: float) -> dict[str, Any]:
        """Step until the engine has nothing to do and the process has stopped writing."""
        core = self.llm.llm_engine.engine_core.engine_core
        deadline = time.perf_counter() + timeout_s
        quiet_since, written = time.perf_counter(), process_io()["written_bytes"]
        steps = 0
        while time.perf_counter() < deadline:
            if core.scheduler.has_requests():
                self.llm.llm_engine.step()
                steps += 1
                quiet_since = time.perf_counter()
            now_written = process_io()["written_bytes"]
            if now_written != written:
                quiet_since, written = time.perf_counter(), now_written
            if time.perf_counter() - quiet_since > 0.15:
                return {"steps": steps}
            time.sleep(0.002)
        raise TimeoutError(f"the engine is still busy after {steps} steps")

    def reset(self, *, connector: bool) -> bool:
        """Drop the engine's own prefix cache, and the connector's too if told so."""
        for _ in range(200):
            if self.llm.reset_prefix_cache(reset_connector=connector):
                return True
            self.llm.llm_engine.step()
            time.sleep(0.005)
        return False

    def zero_loads(self, *, on: bool) -> None:
        self.probe.zero_loads = on

    def counts(self) -> dict[str, int]:
        return {**self.probe.counts, **process_io()}

    def metrics(self) -> dict[str, float]:
        """Every sample on the Prometheus registry, as `/metrics` would show it."""
        from prometheus_client import REGISTRY

        return {
            sample.name
            + "".join(
                f"|{k}={v}" for k, v in sorted(sample.labels.items()) if k not in _DULL
            ): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if not sample.name.endswith(("_created", "_bucket"))
        }

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()


_DULL = ("engine", "model_name")


def _serve(connection: socket.socket) -> None:
    driver = Driver()
    with connection, connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            command = json.loads(line)
            name = command.pop("do")
            try:
                answer = {"ok": getattr(driver, name)(**command)}
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            if name == "close":
                return


def _child(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 1
    try:
        _serve(connection)
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Import what an engine needs, then fork one per connection until the parent goes."""
    import vllm
    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        listener.settimeout(1.0)
        parent = os.getppid()
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            if os.fork() == 0:
                listener.close()
                _child(connection)
            connection.close()


if __name__ == "__main__":
    main()
