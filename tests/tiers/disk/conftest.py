"""Fixtures of the disk tier's tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from undercroft.tiers.disk import upkeep


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory on tmpfs, where a thousand runs take seconds."""
    prefix = f"undercroft-test-{os.getpid()}-"  # so that runs side by side can tell whose it is
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=prefix) as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`has` gives up after 50 ms and says no; a machine at work may take longer to switch threads.

    What it does then has tests of its own, in `test_disk_watch`.
    """
    if not request.node.path.name.startswith("test_disk_watch"):
        monkeypatch.setattr(upkeep, "_EPOCH_WAIT_S", 10.0)
