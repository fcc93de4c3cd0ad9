"""Where a mover process starts, is found and ends: odd programs, directories, limits and forks."""

import os
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
