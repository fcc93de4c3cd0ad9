"""What every test here runs under: loopback only, nothing left behind, failures replayable.

- Connections that leave the machine fail, in this process (`LeftTheMachine`) and, by environment,
  in the engines that tests start (no telemetry, no model hub).
- SIGINT ends what tests start, also where a shell began this run in the background.
- After the last test, no shared-memory file and no thread of ours is left; what is, is an error.
- A scheduler's question to a disk waits for the thread that reads the epoch for as long as a busy
  machine needs to switch to it (`patient`).
- Loggers are after each test as they were before it: engines that start in this process, and vLLM
  where it is imported whole, set up their own, and later tests would look for log lines in vain.
- Hypothesis prints how to replay a failure, has no deadlines, and is deterministic in CI.
- Tests that want random data take `seed` or `rng`; a failure prints the seed.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest

SEED_VARIABLE = "UNDERCROFT_TEST_SEED"
OUR_PREFIXES = ("undercroft", "vllm_offload")
GRACE_S = float(os.environ.get("UNDERCROFT_TEST_GRACE_S", "15"))
SHARED_MEMORY = Path("/dev/shm")

ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

hypothesis.settings.register_profile(
    "local",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # machines are shared
)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("local"), derandomize=True
)


# --- loopback only ---


class LeftTheMachine(PermissionError):
    """A test tried to connect to somewhere that is not this machine."""


def stays_here(family: int, address: Any) -> bool:
    """Whether connecting to `address` cannot leave this machine."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = str(address[0]).partition("%")[0]
    if host in ("localhost", ""):
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def guard_sockets() -> None:
    """Make connections that would leave the machine raise, for the life of this process."""
    for verb in ("connect", "connect_ex"):
        original = getattr(socket.socket, verb)

        def guarded(
            self: socket.socket, address: Any, original: Any = original, verb: str = verb
        ) -> Any:
            if not stays_here(self.family, address):
                raise LeftTheMachine(f"tests reach loopback only: {verb} to {address!r} refused")
            return original(self, address)

        setattr(socket.socket, verb, guarded)


# --- nothing left behind ---


def shared_files() -> set[str]:
    """Names in /dev/shm that this library, or stock vLLM's offloading, would choose."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(OUR_PREFIXES)}


def used_elsewhere(name: str) -> bool:
    """Whether a process that is neither this one nor its child made, maps or holds the file."""
    owner = re.match(r"undercroft-test-(\d+)-", name)
    if owner and int(owner[1]) != os.getpid() and Path("/proc", owner[1]).exists():
        return True  # a directory of another run's tests
    path = SHARED_MEMORY / name
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"\nPPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                continue
            held = any(fd.readlink() == path for fd in (entry / "fd").iterdir())
            if held or str(path) in (entry / "maps").read_text():
                return True
        except OSError:
            continue
    return False


@cache
def library_folder() -> str:
    """The folder that holds the library's modules, with a separator at its end."""
    found = importlib.util.find_spec("undercroft")
    if found is None or found.origin is None:
        raise RuntimeError("undercroft is not installed here: run the tests with `make test`")
    return str(Path(found.origin).parent) + os.sep


def runs_our_code(frame: FrameType | None) -> bool:
    """Whether any function on this stack is the library's."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(library_folder()):
            return True
        frame = frame.f_back
    return False


def our_threads() -> set[threading.Thread]:
    """Live threads that the library started: by name, or by the code they are in."""
    frames = sys._current_frames()
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    return {
        thread
        for thread in others
        if thread.name.lower().startswith(OUR_PREFIXES) or runs_our_code(frames.get(thread.ident))  # type: ignore[arg-type]
    }


class LeftBehind:
    """Remembers after which test each file and thread of ours was first seen."""

    def __init__(self) -> None:
        self.before_files = shared_files()
        self.before_threads = our_threads()
        self.first_seen: dict[str | threading.Thread, str] = {}

    def present(self) -> set[str | threading.Thread]:
        """What is there now and was not at the start."""
        return (shared_files() - self.before_files) | (our_threads() - self.before_threads)

    def look(self, nodeid: str) -> None:
        """Note what is new since the last look."""
        for thing in self.present():
            self.first_seen.setdefault(thing, nodeid)

    def remaining(self) -> list[str]:
        """What is left now and is nobody else's, for people to read. Slow: walks /proc."""
        lines = [
            f"{SHARED_MEMORY / name}, {self.seen(name)}"
            for name in sorted(shared_files() - self.before_files)
            if not used_elsewhere(name)
        ]
        frames = sys._current_frames()
        for thread in our_threads() - self.before_threads:
            stack = "".join(traceback.format_stack(frames.get(thread.ident or 0)))
            lines.append(f"thread {thread.name!r}, {self.seen(thread)}, now at\n{stack}")
        return lines

    def seen(self, thing: str | threading.Thread) -> str:
        return f"first seen after {self.first_seen.get(thing, 'the last test')}"


left_behind_key = pytest.StashKey[LeftBehind]()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the run if shared memory or threads of ours outlive the last test."""
    yield
    left = request.config.stash[left_behind_key]
    give_up_at = time.monotonic() + GRACE_S
    while left.present() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    if remaining := left.remaining():
        pytest.fail("this test run left behind: " + "\n".join(remaining), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    item.config.stash[left_behind_key].look(item.nodeid)
    return result


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Handlers, level and propagation of the loggers that we and vLLM set up."""
    loggers = [logging.getLogger(name) for name in ("undercroft", "vllm")]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in loggers]
    yield
    for each, handlers, level, propagate in before:
        each.handlers[:] = handlers
        each.setLevel(level)
        each.propagate = propagate


# --- slow machines ---


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """`has` gives up after 50 ms and says no; a machine at work may take longer to switch threads.

    What it does then has tests of its own, in `tests/tiers/disk/test_disk_watch.py`.
    """
    from undercroft.tiers.disk import upkeep

    usual_s, upkeep._EPOCH_WAIT_S = upkeep._EPOCH_WAIT_S, 10.0
    yield
    upkeep._EPOCH_WAIT_S = usual_s


# --- failures that can be replayed ---


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed: from the run's seed and the test's name, so that one test can be rerun."""
    base = request.config.stash[run_seed_key]
    return zlib.crc32(f"{base}:{request.node.name}".encode())


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A random generator seeded with `seed`."""
    return random.Random(seed)


run_seed_key = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    guard_sockets()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    in_ci = bool(os.environ.get("CI"))
    hypothesis.settings.load_profile("ci" if in_ci else "local")
    given = os.environ.get(SEED_VARIABLE)
    default = 0 if in_ci else random.SystemRandom().randrange(1 << 32)
    config.stash[run_seed_key] = int(given) if given else default
    config.stash[left_behind_key] = LeftBehind()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {SEED_VARIABLE}={config.stash[run_seed_key]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        again = f"{SEED_VARIABLE}={item.config.stash[run_seed_key]}"
        report.sections.append(("seed", f"replay with {again} and {item.nodeid}"))
    return report
