"""A participant of a region in a process of its own, driven line by line."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from undercroft.clock import SystemClock
from undercroft.hierarchy.region import Region, RegionConfig

MIB = 1 << 20


def config(
    directory: Path,
    engine_id: str = "engine",
    *,
    num_ranks: int = 1,
    total_bytes: int = MIB,
    identity: bytes = b"one",
    version: str = "0.3.0",
) -> RegionConfig:
    return RegionConfig(engine_id, num_ranks, total_bytes, identity, directory, version)


def join(wanted: RegionConfig, role: Any, deadline_s: float = 60.0, *, note: bytes = b"") -> Region:
    sizes = None if role == "scheduler" else (4096 * (role + 1), 512)
    return Region.join(
        wanted, role=role, chunk_bytes=sizes, note=note, deadline_s=deadline_s, clock=SystemClock()
    )


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    """A directory of its own in real shared memory, empty again at the end."""
    directory = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    try:
        yield directory
        left = [path.name for path in directory.iterdir()]
    finally:
        shutil.rmtree(directory)
    assert left == []


class Participant:
    """A child process; every command is answered by its result, or raises its error."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, verb: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise RuntimeError(f"participant ended: {self.process.stderr.read()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{reply['error']}: {reply['message']}")
        return reply["result"]

    def ask(self, verb: str, *args: Any) -> Any:
        self.send(verb, *args)
        return self.answer()

    def join(self, wanted: RegionConfig, role: Any, deadline_s: float = 60.0) -> None:
        self.ask("join", *self.arguments(wanted, role, deadline_s))

    @staticmethod
    def arguments(wanted: RegionConfig, role: Any, deadline_s: float) -> list[Any]:
        return [
            [
                wanted.engine_id,
                wanted.num_ranks,
                wanted.total_bytes,
                wanted.identity.hex(),
                str(wanted.directory),
                wanted.version,
            ],
            role,
            deadline_s,
        ]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def participants(count: int) -> Iterator[list[Participant]]:
    """Several, all killed at the end."""
    started = [Participant() for _ in range(count)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


class _Child:
    """The child's side: one method per verb."""

    def __init__(self) -> None:
        self.region: Region

    def join(self, wanted: list[Any], role: Any, deadline_s: float) -> None:
        engine_id, num_ranks, total_bytes, identity, directory, version = wanted
        self.region = join(
            RegionConfig(
                engine_id,
                num_ranks,
                total_bytes,
                bytes.fromhex(identity),
                Path(directory),
                version,
            ),
            role,
            deadline_s,
        )

    def wait(self, deadline_s: float) -> list[Any]:
        self.region.wait_joined(deadline_s)
        return list(self.region.chunk_bytes())

    def write(self, offset: int, text: str) -> None:
        self.region.buffer[offset : offset + len(text)] = text.encode()

    def read(self, offset: int, length: int) -> str:
        return bytes(self.region.buffer[offset : offset + length]).decode()

    def ready(self) -> int:
        return self.region.ready_bytes()

    def fill(self) -> None:
        """Touch every byte that is ready."""
        ready = self.region.ready_bytes()
        for start in range(0, ready, MIB):
            stop = min(start + MIB, ready)
            self.region.buffer[start:stop] = b"\xa5" * (stop - start)

    def memory(self) -> dict[str, int]:
        """Bytes of RssAnon and RssShmem."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}

    def file_bytes(self) -> int:
        """What the region's file takes of its file system; it has no name any more."""
        import os

        return os.fstat(self.region._lock.fd).st_blocks * 512

    def report(self, store_ids: list[int]) -> None:
        for store_id in store_ids:
            self.region.report_failed_store(store_id)

    def take(self) -> list[int] | None:
        failed = self.region.take_failed_stores()
        return None if failed is None else sorted(failed)

    def fork(self) -> int:
        """Fork a child that sleeps, holding what it inherited; its pid."""
        import os
        import time

        pid = os.fork()
        if pid == 0:
            for fd in (0, 1, 2):
                os.close(fd)
            time.sleep(30)
            os._exit(0)
        return pid

    def close(self) -> None:
        self.region.close()


def _serve() -> None:
    child = _Child()
    for line in sys.stdin:
        verb, *args = json.loads(line)
        try:
            reply = {"result": getattr(child, verb)(*args)}
        except Exception as error:  # noqa: BLE001 - the parent judges it
            reply = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
