"""A real Prometheus server on the loopback interface, scraping what a test tells it to."""

import http.client
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from tests.engines.vllm.lab.engine import EngineFailed
from tests.engines.vllm.lab.ports import free_port

START_S = 60.0


def prometheus_path() -> str | None:
    """The program: an installed one, or the one that `scripts/prometheus.sh` unpacked."""
    unpacked = Path(sys.prefix) / "prometheus" / "usr" / "bin" / "prometheus"
    return shutil.which("prometheus") or (str(unpacked) if unpacked.exists() else None)


class Prometheus:
    """Scrapes the `/metrics` of a local port every 2 s; ready when made."""

    def __init__(self, program: str, folder: Path, target_port: int) -> None:
        self.port = free_port()
        job = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        every = {"scrape_interval": "2s", "scrape_timeout": "2s"}
        config = folder / "prometheus.yml"
        config.write_text(json.dumps({"global": every, "scrape_configs": [job]}))  # JSON is YAML
        self.log = folder / "prometheus.log"
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailed(f"no Prometheus\n{self.log.read_text(errors='replace')[-4000:]}")
            try:
                if self._get("/-/ready")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an instant query gives; what cannot be parsed raises."""
        return self._data("/api/v1/query", query=expression)["result"]  # type: ignore[no-any-return]

    def await_value(self, expression: str, value: float, timeout_s: float = 120.0) -> None:
        """Wait until a scrape has brought the one series of `expression` to `value`."""
        deadline = time.monotonic() + timeout_s
        while [float(each["value"][1]) for each in self.query(expression)] != [value]:
            if time.monotonic() > deadline:
                raise EngineFailed(f"{expression} is not {value} but {self.query(expression)}")
            time.sleep(0.2)

    def label_values(self, selector: str, label: str) -> list[str]:
        """What Grafana's `label_values(selector, label)` asks for."""
        path = f"/api/v1/label/{label}/values"
        return self._data(path, **{"match[]": selector})  # type: ignore[no-any-return]

    def _data(self, path: str, **arguments: str) -> Any:
        status, body = self._get(f"{path}?{urlencode(arguments)}")
        answer = json.loads(body)
        if status != http.client.OK or answer["status"] != "success":
            raise EngineFailed(f"{arguments}: {answer.get('error', status)}")
        return answer["data"]

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
