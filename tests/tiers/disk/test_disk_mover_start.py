"""Where a mover process starts, is found and ends: odd programs, directories, limits and forks."""

import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .support import disk
from .test_disk_mover import (
    Level0,
    is_alive,
    level_0,
    moved,
    read,
    wait_for_process,
    wait_until_gone,
    write,
)

__all__ = ["level_0"]

_ROOT = str(Path(__file__).parents[3])


@pytest.mark.parametrize("name", ["executable", "frozen"])
def test_a_program_without_an_interpreter_moves_by_threads(
    tmp_path: Path,
    level_0: Level0,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """Embedded or frozen: what it would start is not Python, but perhaps itself again."""
    monkeypatch.setattr(sys, name, None if name == "executable" else True, raising=False)
    tier = disk(tmp_path, mover_process=True, memory=level_0.memory)
    assert write(tier, level_0, range(4)) == read(tier, level_0, range(4)) == [True] * 4
    assert tier._mover is not None
    assert tier._mover.pid is None
    assert len([r for r in caplog.records if "no mover process" in r.message]) == 1
    tier.close()


def test_nothing_of_the_current_directory_is_imported(
    tmp_path: Path, level_0: Level0, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's `queue.py` there is not ours; `vllm serve` does not see it either."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "queue.py").write_text(f"open({str(here / 'ran')!r}, 'w')\nraise SystemExit(7)\n")
    absolute = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
    monkeypatch.setenv("PYTHONPATH", ":".join(absolute))
    monkeypatch.chdir(here)
    with moved(tmp_path / "tier", level_0) as tier:
        assert write(tier, level_0, range(4)) == [True] * 4
    assert not (here / "ran").exists()


def test_without_a_descriptor_for_another_lane_threads_do_it(
    tmp_path: Path, level_0: Level0
) -> None:
    """No chunk fails for it, and the process is kept."""
    with moved(tmp_path, level_0) as tier:
        pid = wait_for_process(tier)
        assert write(tier, level_0, range(4)) == [True] * 4
        assert tier._mover is not None
        assert tier._mover._child is not None
        lanes = tier._mover._child.idle
        taken, lanes[:] = list(lanes), []
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            ends = read(tier, level_0, range(4))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            lanes.extend(taken)
        assert ends == [True] * 4
        assert wait_for_process(tier) == pid


_FORKING_ENGINE = """
import os, sys, time
from tests.tiers.disk.test_disk_mover import Level0, wait_for_process
from tests.tiers.disk.support import disk
level_0 = Level0()
tier = disk(sys.argv[1], mover_process=True, memory=level_0.memory)
pid = wait_for_process(tier)
worker = os.fork()
if not worker:
    time.sleep(600)
print(pid, worker, flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_killed_engine_whose_forked_worker_lives_on(tmp_path: Path) -> None:
    """The worker has inherited the engine's end of the control socket: it never closes."""
    with subprocess.Popen(
        [sys.executable, "-c", _FORKING_ENGINE, str(tmp_path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        pid, worker = map(int, engine.stdout.readline().split())
        try:
            engine.kill()
            engine.wait()
            wait_until_gone(pid)
            assert is_alive(worker)
        finally:
            os.kill(worker, signal.SIGKILL)


_PINNED_ENGINE = """
import os, sys, threading
mine, all_of_us = {int(n) for n in sys.argv[2].split()}, {int(n) for n in sys.argv[3].split()}
os.sched_setaffinity(0, all_of_us)  # as `taskset` does, before anything else
from tests.tiers.disk.test_disk_mover import Level0, wait_for_process
from tests.tiers.disk.support import disk
hold = threading.Event()
threading.Thread(target=hold.wait).start()  # may run wherever the engine may
os.sched_setaffinity(0, mine)  # as a thread that computes on a CPU
level_0 = Level0()
tier = disk(sys.argv[1], mover_process=True, memory=level_0.memory)
pid = wait_for_process(tier)
print(*sorted(os.sched_getaffinity(pid)), flush=True)
hold.set()
tier.close()
"""


@pytest.mark.parametrize("num_processors", [1, 2])
def test_it_runs_where_the_engine_may(tmp_path: Path, num_processors: int) -> None:
    """What an operator bound the engine to holds for it, too; what one thread is bound to, not."""
    here = sorted(os.sched_getaffinity(0))
    whole = here[-num_processors:]
    words = [" ".join(map(str, cpus)) for cpus in (whole[:1], whole)]
    done = subprocess.run(
        [sys.executable, "-c", _PINNED_ENGINE, str(tmp_path), *words],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(cpu) for cpu in whole]


_SPEAKING_ENGINE = """
import sys
from tests.tiers.disk.test_disk_mover import Level0, wait_for_process
from tests.tiers.disk.support import disk
level_0 = Level0()
tier = disk(sys.argv[1], mover_process=True, memory=level_0.memory)
wait_for_process(tier)
print("the engine's own", flush=True)
tier.close()
"""


def test_it_has_nothing_to_say_on_the_engines_standard_output(tmp_path: Path) -> None:
    """Which may be a protocol: not even what Python's own start prints there."""
    spoiler = tmp_path / "site"
    spoiler.mkdir()
    said = "import sys\nprint('from ' + sys.orig_argv[-1])\n"
    (spoiler / "sitecustomize.py").write_text(said)
    path = os.pathsep.join([str(spoiler), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _SPEAKING_ENGINE, str(tmp_path / "tier")],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [f"from {tmp_path / 'tier'}", "the engine's own"]


def test_what_moves_the_bytes_is_said_as_it_is(tmp_path: Path, level_0: Level0) -> None:
    """While it starts, while it is there, and after it ended."""
    tier = disk(tmp_path, mover_process=True, memory=level_0.memory, num_threads=3)
    assert tier.describe().startswith("a mover process of 3 threads that is starting, ")
    assert not tier.is_moved_elsewhere()
    assert tier.await_mover(60)
    assert tier.describe().startswith("a mover process of 3 threads, ")
    assert tier.is_moved_elsewhere()
    pid = wait_for_process(tier)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    write(tier, level_0, range(4))
    assert tier.describe().startswith("no mover process (it ended; another one is started), ")
    assert not tier.is_moved_elsewhere()
    assert tier.mover_deaths() == 1
    tier.close()
    by_threads = disk(tmp_path)
    assert by_threads.describe() in {"O_DIRECT", "through the page cache"}
    assert not by_threads.await_mover(60)
    by_threads.close()


_SANDBOXED_ENGINE = """
import ctypes, logging, struct, sys
from tests.tiers.disk.test_disk_mover import Level0, read, write
from tests.tiers.disk.support import disk
logging.basicConfig(format="%(message)s", stream=sys.stdout)
# A filter of system calls, as a container's: these are refused, all others allowed.
refused = [int(n) for n in sys.argv[2].split()]
program = [(0x20, 0, 0, 0)]  # load the call's number
program += [(0x15, len(refused) - at, 0, number) for at, number in enumerate(refused)]
program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]  # allow; EPERM
packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
told = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(packed)))
assert libc.prctl(22, 2, told, 0, 0) == 0, ctypes.get_errno()
level_0 = Level0()
tier = disk(sys.argv[1], mover_process=True, memory=level_0.memory)
for _ in range(5):
    assert write(tier, level_0, range(4)) == [True] * 4
    assert read(tier, level_0, range(4)) == [True] * 4
assert tier._mover.pid is None
print(tier.describe())
tier.close()
"""
_CALLS = {
    "x86_64": {"no fork": "56 57 58", "no exec": "59 322"},
    "aarch64": {"no exec": "221 281"},
}
"""By their numbers. Threads are made by another one, `clone3`."""


@pytest.mark.parametrize("what", sorted(_CALLS[platform.machine()]))
def test_where_no_program_may_be_started_threads_do_it(tmp_path: Path, what: str) -> None:
    """A container whose filter of system calls refuses it: one line says so, and no chunk fails."""
    done = subprocess.run(
        [sys.executable, "-c", _SANDBOXED_ENGINE, str(tmp_path), _CALLS[platform.machine()][what]],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    line, described = done.stdout.splitlines()
    assert "no mover process ([Errno 1] Operation not permitted" in line
    assert "threads move its chunks" in line
    assert described.startswith("no mover process (it cannot be started: ")
