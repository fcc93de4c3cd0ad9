"""A whole store on tmpfs with one damaged file in it: opened, read, written to, checked."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.tiers.disk.support import NAMESPACE, disk, get, key, put, right
from undercroft.clock import SystemClock
from undercroft.errors import ConfigError, KvError
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fate import Fates
from undercroft.tiers.disk.fsck import Fsck
from undercroft.tiers.disk.history import HistoryFile, Incident, key_part

from .patches import (
    patched,
    pieces,
    sealed_epoch,
    sealed_history,
    sealed_index,
    sealed_slab,
)

_NUMBERS = range(6)
_CAPACITY = 1 << 18
_KINDS = (".index", ".slab", "epoch", "manifest.json", "history")
_SEALS = (sealed_index, sealed_slab, sealed_epoch, bytes, sealed_history)


def _history(path: Path) -> HistoryFile:
    return HistoryFile(
        str(path),
        namespace=NAMESPACE,
        levels=["host", "disk"],
        num_bytes=8192,
        capacity_bytes=_CAPACITY,
        free_space_floor_bytes=0,
        clock=SystemClock(),
    )


@cache
def image() -> dict[str, bytes]:
    """The files of a store that the code has just written, by path below the root."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="undercroft-fuzz-") as path:
        _fill(Path(path))
        root = Path(path) / "undercroft-v1"
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def _fill(path: Path) -> None:
    tier = disk(path, capacity_bytes=_CAPACITY)
    try:
        for number in _NUMBERS:
            put(tier, number)
        tier.delete(key(0))
        history = _history(path)
        assert history.open()
        history.add([Incident(7, "evicted", "capacity", "disk", key_part(key(0)))])
        history.close()
    finally:
        tier.close()


def file_of(kind: int) -> str:
    suffix = _KINDS[kind]
    return next(name for name in image() if suffix in name.rpartition("/")[2])


def corpus() -> list[bytes]:
    """For each kind of file: patches that change nothing, with and without new checksums."""
    return [
        bytes([kind, flags]) + piece
        for kind in range(len(_KINDS))
        for flags in (0, 1)
        for piece in pieces(image()[file_of(kind)])[:8]
    ]


def damaged(data: bytes) -> tuple[str, bytes]:
    """Which file, and what is in it: byte 0 says which, byte 1 how."""
    kind, flags = data[0] % len(_KINDS), data[1]
    name, content = file_of(kind), data[2:]
    content = content if flags & 2 else patched(image()[name], content)
    return name, _SEALS[kind](content) if flags & 1 else content


def run(data: bytes) -> None:
    """Whatever one file holds, the tier opens, serves right bytes or none, and takes new ones."""
    if len(data) < 2:
        return
    name, content = damaged(data)
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="undercroft-fuzz-"))
    try:
        for each, whole in image().items():
            place = path / "undercroft-v1" / each
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            place.write_bytes(content if each == name else whole)
        _look(path)
        _serve(path)
        _look(path)
    finally:
        shutil.rmtree(path)


def _serve(path: Path) -> None:
    try:
        tier = disk(path, capacity_bytes=_CAPACITY)
    except ConfigError as exc:
        raise AssertionError("a damaged file keeps an engine from starting") from exc
    follower = disk(path, capacity_bytes=_CAPACITY)
    history = _history(path)
    try:
        for number in _NUMBERS:
            for one in (tier, follower):
                with contextlib.suppress(KvError):
                    right(one, number)
        with contextlib.suppress(KvError):
            put(tier, 99)
            assert get(tier, 99) is not None, "just written, yet not there"
            follower.refresh()
            right(follower, 99)
        used = sum(size for _, size in tier.evictable())
        assert used <= _CAPACITY, "more is accounted for than there is room"
        with contextlib.suppress(KvError):
            tier.raise_epoch()
            assert get(tier, 99) is None, "served after a reset"
        with contextlib.suppress(KvError, OSError):
            if history.open():
                history.add([Incident(8, "reset", "other", "disk")])
    finally:
        history.close()
        follower.close()
        tier.close()
    total = sum(p.lstat().st_blocks * 512 for p in path.rglob("*"))
    assert total <= _CAPACITY + 65536, f"the store has grown to {total} bytes"


def _look(path: Path) -> None:
    """What `ls`, `verify` and `explain` do."""
    catalog = Catalog(str(path), SystemClock())
    store = catalog.look()
    Fsck(catalog, num_threads=1).check(store)
    fates = Fates(catalog, store)
    for namespace in store.namespaces:
        repr((namespace.model_name, namespace.dtype))
        for number in (0, 1):
            fates.of(namespace, key(number))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
