"""The guards in conftest.py do fire."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

LEAKY = """
import threading
from pathlib import Path
from undercroft.clock import SystemClock

def test_leaves_a_file():
    Path("/dev/shm/undercroft-{token}").write_bytes(b"x")

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="undercroft-leak", daemon=True).start()

def test_leaves_the_library_running():
    threading.Thread(target=SystemClock().sleep, args=(60,), name="nameless", daemon=True).start()

def test_leaves_a_thread_of_its_own():
    threading.Thread(target=threading.Event().wait, name="not-ours", daemon=True).start()

def test_fails(rng):
    assert rng.random() > 1
"""


def test_connecting_elsewhere_is_refused() -> None:
    """No test reaches another machine, whichever way it asks."""
    for verb in ("connect", "connect_ex"):
        for address in (("192.0.2.1", 80), ("an-index.example", 443)):
            with socket.socket() as sock, pytest.raises(PermissionError, match="loopback only"):
                getattr(sock, verb)(address)
    with (
        socket.socket(socket.AF_INET6) as sock,
        pytest.raises(PermissionError, match="loopback only"),
    ):
        sock.connect(("2001:db8::1", 80))


def test_loopback_and_unix_sockets_work(tmp_path: Path) -> None:
    """What stays on this machine is let through."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5).close()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))


def test_leftovers_fail_the_run(tmp_path: Path) -> None:
    """A file in /dev/shm or a thread that outlives the tests is an error naming it and the test."""
    token = f"guard-{os.getpid()}-{threading.get_native_id()}"
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaky.py").write_text(LEAKY.replace("{token}", token))
    leaked = Path(f"/dev/shm/undercroft-{token}")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."],
            cwd=tmp_path,
            env={**os.environ, "UNDERCROFT_TEST_SEED": "7", "UNDERCROFT_TEST_GRACE_S": "0.1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        leaked.unlink(missing_ok=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 4 passed, 1 error" in done.stdout
    assert f"{leaked}, first seen after test_leaky.py::test_leaves_a_file" in done.stdout
    assert (
        "thread 'undercroft-leak', first seen after test_leaky.py::test_leaves_a_th" in done.stdout
    )
    assert "thread 'nameless', first seen after test_leaky.py::test_leaves_the_l" in done.stdout
    assert "not-ours" not in done.stdout
    assert "UNDERCROFT_TEST_SEED=7 and test_leaky.py::test_fails" in done.stdout


def test_seeds_are_stable(seed: int, rng: random.Random) -> None:
    """`rng` is seeded with `seed` and nothing else, so that a printed seed replays a failure."""
    assert rng.random() == random.Random(seed).random()
