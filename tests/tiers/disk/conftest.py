"""Fixtures of the disk tier's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory on tmpfs, where a thousand runs take seconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="undercroft-test-") as path:
        yield Path(path)
