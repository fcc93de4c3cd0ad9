"""Fixtures of the disk tier's tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory on tmpfs, where a thousand runs take seconds."""
    prefix = f"undercroft-test-{os.getpid()}-"  # so that runs side by side can tell whose it is
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=prefix) as path:
        yield Path(path)
