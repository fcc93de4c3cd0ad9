"""What `doctor` finds out about a disk tier: its place, its room, and whether it works."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import cast

from undercroft.cli.findings import Finding, error, fine, note, warning
from undercroft.clock import Clock
from undercroft.engines.assemble import held_bytes, make_tier
from undercroft.errors import KvError, TierFull
from undercroft.keys import ChunkKey, Namespace
from undercroft.settings import TierSettings, format_bytes, with_capacity
from undercroft.tiers.base import SharedMemory
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.root import ROOT_NAME, Root

__all__ = ["Mount", "Speed", "check_disk", "mount_of", "try_out"]

_CHECK = "disk"
_CHUNK_BYTES = 1 << 20
_MAX_CHUNKS = 64
_MIN_CHUNKS = 2
_SLACK_BYTES = 4 << 20
_NUM_THREADS = 4
_START_S = 10.0
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_SHARED_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "glusterfs", "fuse.glusterfs", "beegfs", "9p"}
)


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Args:
        point: Where.
        kind: Such as `ext4`.
        source: Such as `/dev/nvme0n1p1`.
    """

    point: Path
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Speed:
    """How a trial went.

    Args:
        num_bytes: Written, and read back equal.
        write_bytes_per_s: With the tier's threads, made durable at the end.
        read_bytes_per_s: Verified; from the page cache unless `is_direct`.
        is_direct: Whether the file system takes direct reads and writes.
        num_threads: Of the tier.
        is_moved_elsewhere: Whether these were of a process of the tier's own, as they would be for
            an engine.
        moved_by: What became of such a process, in words; empty if none was asked for.
    """

    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    is_direct: bool
    num_threads: int
    is_moved_elsewhere: bool
    moved_by: str


def mount_of(place: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The file system that an existing place is on; None if the system does not say."""
    whole = place.resolve()
    found: Mount | None = None
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or len(after) < 2:  # noqa: PLR2004 - as in proc(5)
            continue
        point = Path(fields[4].replace("\\040", " "))
        if whole.is_relative_to(point) and (
            found is None or len(point.parts) >= len(found.point.parts)
        ):
            found = Mount(point, after[0], after[1])
    return found


def check_disk(tier: TierSettings, clock: Clock) -> Iterator[Finding]:
    """Look at a disk tier's folder, then write chunks there and read them back.

    Nothing stays behind. Chunks that are there already are neither read nor counted against: the
    trial has a folder of its own, because a new key space in the shared folder would take its share
    of it from those that live there.

    Args:
        tier: Its type is `disk`.
        clock: Time.
    """
    path = Path(str(tier.options["path"])).expanduser()
    place = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not place.is_dir():
        yield error(_CHECK, f"{path} is not a folder, or lies below a file ({place}); correct path")
        return
    mount = mount_of(place)
    yield from _check_place(path, place, mount)
    held = held_bytes(tier)
    try:
        Root(Files(), str(path), Namespace({}), clock).check_owner()
        resolved, said = with_capacity(tier, own_bytes=held)
    except (KvError, OSError) as exc:
        yield error(_CHECK, exc, path=str(path))
        return
    if said:
        yield note(_CHECK, said)
    yield from _check_room(resolved, place, held)
    yield from _check_by_trial(resolved, path, place, clock)


def _check_place(path: Path, place: Path, mount: Mount | None) -> Iterator[Finding]:
    kind = mount.kind if mount else "unknown"
    where = f"{kind} file system mounted at {mount.point}" if mount else "file system"
    facts = {
        "path": str(path),
        "file_system": kind,
        "mount_point": str(mount.point if mount else ""),
    }
    on_root = mount is not None and mount.point == Path("/")
    if place != path:
        if place != path.parent:
            hint = f"neither it nor {path.parent} exists, so it may be mistyped"
        else:
            hint = "it would be made at start"
        if on_root:
            yield warning(
                _CHECK,
                f"{path} does not exist, and would lie on the root {where}: {hint}; is the disk "
                f"mounted?",
                **facts,
            )
        elif place != path.parent:
            yield warning(_CHECK, f"{path} does not exist: {hint} (on the {where})", **facts)
        else:
            yield note(_CHECK, f"{path} does not exist: {hint}, on the {where}", **facts)
    else:
        yield fine(_CHECK, f"{path} is on the {where}", **facts)
    if kind in _MEMORY_KINDS:
        yield warning(
            _CHECK, f"{path} is in memory ({kind}): it keeps nothing over a reboot", **facts
        )
    if kind in _SHARED_KINDS:
        yield warning(
            _CHECK,
            f"{path} is on a shared file system ({kind}): the disk tier is for disks of one "
            f"machine, and its locks may not hold there",
            **facts,
        )


def _check_room(tier: TierSettings, place: Path, held: int) -> Iterator[Finding]:
    capacity = tier.capacity_bytes or 0
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    floor = int(tier.options.get("free_space_floor", 1 << 30))
    facts = {
        "capacity_bytes": capacity,
        "held_bytes": held,
        "free_bytes": free,
        "free_space_floor_bytes": floor,
    }
    missing = capacity - held - max(0, free - floor)
    words = (
        f"capacity {format_bytes(capacity)}, {format_bytes(held)} held from earlier, "
        f"{format_bytes(free)} free on its file system, of which {format_bytes(floor)} stay so"
    )
    if missing > 0:
        reach = max(0, capacity - missing)
        yield warning(_CHECK, f"{words}: it will not get beyond {format_bytes(reach)}", **facts)
    else:
        yield fine(_CHECK, words, **facts)


def _check_by_trial(tier: TierSettings, path: Path, place: Path, clock: Clock) -> Iterator[Finding]:
    try:
        speed = try_out(tier, place, clock)
    except TierFull as exc:
        yield warning(_CHECK, f"{path} has no room for a trial now: {exc}")
        return
    except (KvError, OSError) as exc:
        if (path / ROOT_NAME).is_dir():
            yield warning(
                _CHECK, f"nothing new can be stored in {path}, what is there may be read: {exc}"
            )
        else:
            yield error(_CHECK, f"{path} cannot be used: {exc}", path=str(path))
        return
    way = "direct" if speed.is_direct else "through the page cache"
    by = speed.moved_by if speed.is_moved_elsewhere else f"{speed.num_threads} threads"
    yield fine(
        _CHECK,
        f"wrote and read back {format_bytes(speed.num_bytes)} by {by}, {way}: "
        f"{speed.write_bytes_per_s / 1e9:.2f} GB/s written, "
        f"{speed.read_bytes_per_s / 1e9:.2f} GB/s read and verified",
        tested_bytes=speed.num_bytes,
        write_bytes_per_s=int(speed.write_bytes_per_s),
        read_bytes_per_s=int(speed.read_bytes_per_s),
        direct=speed.is_direct,
        moved_elsewhere=speed.is_moved_elsewhere,
    )
    if speed.moved_by and not speed.is_moved_elsewhere:
        yield warning(
            _CHECK,
            f"threads of the engine's would move the bytes of {tier.name}, which slows steps: "
            f"{speed.moved_by}; let programs be started where the engine runs, or set "
            f"mover_process to false",
        )


def try_out(tier: TierSettings, place: Path, clock: Clock) -> Speed:
    """Write chunks through the tier's own code into a folder that is removed again.

    Args:
        tier: With a capacity, which is not exceeded.
        place: An existing folder, on the file system in question.
        clock: Time.

    Raises:
        KvError: A chunk could not be written, or was not read back as it was written.
        OSError: The folder could not be made.
    """
    room = max(tier.capacity_bytes or 0, _CHUNK_BYTES) // 2 // _CHUNK_BYTES
    keys = [ChunkKey(n.to_bytes(8, "big")) for n in range(max(_MIN_CHUNKS, min(_MAX_CHUNKS, room)))]
    num_bytes = len(keys) * _CHUNK_BYTES
    num_threads = int(tier.options.get("num_threads", _NUM_THREADS))
    with (
        _folder(place) as folder,
        ThreadPoolExecutor(num_threads) as threads,
        _level_0((1 + num_threads) * _CHUNK_BYTES) as memory,
    ):
        payload, *buffers = _cut(memory.buffer)
        payload[:] = secrets.token_bytes(_CHUNK_BYTES)
        idle: SimpleQueue[memoryview] = SimpleQueue()
        for buffer in buffers:
            idle.put(buffer)
        options = {**tier.options, "path": str(folder)}
        settings = replace(
            tier, capacity_bytes=2 * num_bytes + _SLACK_BYTES, options=options, faults=None
        )
        opened = cast(
            DiskTier,
            make_tier(
                settings,
                namespace=_trial_namespace(),
                clock=clock,
                num_replicas=1,
                memory=memory,
            ),
        )
        try:
            is_moved_elsewhere = opened.await_mover(_START_S)
            opened.write_from(keys[0], payload)  # the segment is made now, not while it is timed
            started_s = clock.now_s()
            list(threads.map(lambda key: opened.write_from(key, payload), keys[1:]))
            opened.flush()
            written_s = clock.now_s()
            list(threads.map(lambda key: _read_back(opened, key, payload, idle), keys))
            read_s = clock.now_s()
            is_direct = bool(opened.stats()["direct"])
            moved_by = opened.moved_by()
        finally:
            opened.close()
    return Speed(
        num_bytes=num_bytes,
        write_bytes_per_s=(num_bytes - _CHUNK_BYTES) / max(written_s - started_s, 1e-9),
        read_bytes_per_s=num_bytes / max(read_s - written_s, 1e-9),
        is_direct=is_direct,
        num_threads=num_threads,
        is_moved_elsewhere=is_moved_elsewhere and opened.mover_deaths() == 0,
        moved_by=moved_by,
    )


def _trial_namespace() -> Namespace:
    return Namespace({"trial": secrets.token_hex(16)})


def _read_back(
    tier: DiskTier, key: ChunkKey, expected: memoryview, idle: SimpleQueue[memoryview]
) -> None:
    buffer = idle.get()
    try:
        buffer[:] = bytes(len(buffer))
        if not tier.read_into(key, buffer):
            raise TierFull(f"a chunk that was just written to {tier.name} is gone", tier=tier.name)
        if buffer != expected:
            raise KvError(f"{tier.name} gave back other bytes than were written", tier=tier.name)
    finally:
        idle.put(buffer)


@contextmanager
def _level_0(num_bytes: int) -> Iterator[SharedMemory]:
    """Host memory as an engine has it: in a file, so that a mover process can map it."""
    fd = os.memfd_create("undercroft-trial")
    try:
        os.ftruncate(fd, num_bytes)
        yield SharedMemory(fd, 0, memoryview(mmap.mmap(fd, num_bytes)))
    finally:
        os.close(fd)


def _cut(buffer: memoryview) -> list[memoryview]:
    return [buffer[at : at + _CHUNK_BYTES] for at in range(0, len(buffer), _CHUNK_BYTES)]


@contextmanager
def _folder(place: Path) -> Iterator[Path]:
    """A folder for a trial in `place`, removed with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=".undercroft-trial-", dir=place))
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
