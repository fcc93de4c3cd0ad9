"""A tier on a directory of its own, content that follows from the key, and `du`."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from undercroft.clock import SystemClock
from undercroft.keys import ChunkKey, Namespace
from undercroft.tiers.disk import DiskTier

NAMESPACE = Namespace({"model": "m", "layers": [1, 2], "cache": {"dtype": "bf16"}})


class ManualClock:
    def __init__(self) -> None:
        self.t = 100.0

    def now_s(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds


def disk(path: Path | str, **settings: Any) -> DiskTier:
    given = {
        "name": "disk",
        "namespace": NAMESPACE,
        "capacity_bytes": 1 << 20,
        "clock": SystemClock(),
        "free_space_floor_bytes": 0,
        **settings,
    }
    return DiskTier(str(path), **given)


@lru_cache(1024)
def key(number: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\0")


@lru_cache(1024)
def content(of: bytes, num_bytes: int = 4096) -> bytes:
    return hashlib.shake_128(of).digest(num_bytes)


def put(tier: DiskTier, number: int, num_bytes: int = 4096) -> None:
    tier.write_from(key(number), memoryview(content(key(number), num_bytes)))


def get(tier: DiskTier, number: int, num_bytes: int = 4096) -> bytes | None:
    out = bytearray(num_bytes)
    if not tier.read_into(key(number), memoryview(out)):
        assert out == bytes(num_bytes), "absent, yet the buffer was touched"
        return None
    return bytes(out)


def right(tier: DiskTier, number: int, num_bytes: int = 4096) -> bool:
    found = get(tier, number, num_bytes)
    assert found is None or found == content(key(number), num_bytes), "wrong bytes served"
    return found is not None


def du(path: Path | str) -> int:
    """What `du` says of the root: blocks of every file and directory under it."""
    total = 0
    root = f"{path}/undercroft-v1"
    for directory, _, names in os.walk(root):
        total += os.lstat(directory).st_blocks * 512
        for name in names:
            try:
                total += os.lstat(f"{directory}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def files(path: Path | str, suffix: str) -> list[Path]:
    return sorted(Path(path).glob(f"undercroft-v1/*/*{suffix}"))


def open_files() -> int:
    """How many there are. What an earlier test left may be collected at any time: fewer is fine."""
    return len(list(Path("/proc/self/fd").iterdir()))
