"""What this machine can give, and whether the settings fit into it.

Reads `/proc`, `/sys/fs/cgroup` and file-system sizes; allocates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from undercroft.errors import ConfigError
from undercroft.settings.model import Settings, TierSettings
from undercroft.settings.sizes import format_bytes

__all__ = [
    "DEFAULT_CAPACITY_BYTES",
    "Bound",
    "HostLimits",
    "check_host_bytes",
    "check_sizes",
    "host_limits",
    "with_capacity",
]

DEFAULT_CAPACITY_BYTES = 100 * 1024**3
"""At most this much for stock's `fs` tier when no capacity is written."""

_UNLIMITED_BYTES = 2**60
_MAX_DIGITS = 20
_MAX_TEXT_BYTES = 1 << 20
_Files = tuple[str, str, tuple[str, ...]]
_V1: _Files = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "active_file"),
)
_V2: _Files = ("memory.max", "memory.current", ("active_file",))


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that bounds a region.

    Args:
        source: The file, or mount point, that says so.
        available_bytes: How much more can be had now; for memory, page cache counts as free.
        detail: Where the number comes from, for people.
    """

    source: str
    available_bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Everything that bounds a region on this machine; the tightest decides.

    Args:
        bounds: May be empty, where nothing could be read.
    """

    bounds: tuple[Bound, ...]

    @property
    def tightest(self) -> Bound | None:
        """The bound that decides."""
        return min(self.bounds, key=lambda bound: bound.available_bytes, default=None)


def host_limits(root: Path = Path("/"), *, shm: str | None = "dev/shm") -> HostLimits:
    """Read what bounds shared memory here: cgroups v1 and v2, the machine, the memory file system.

    Args:
        root: Where `proc`, `sys` and `shm` are.
        shm: The file system the region lives on, below `root`; None if it is on none. Remove
            regions of dead engines first: they count as used.

    Cost: some ten small files.
    """
    bounds = [*_cgroup_bounds(root), *_machine_bounds(root)]
    if shm is not None:
        found = _file_system(root / shm) if (root / shm).is_dir() else None
        if found is not None:
            total, free = found
            detail = f"size {format_bytes(total)}, {format_bytes(free)} free"
            bounds.append(Bound(f"/{shm}", free, detail))
    return HostLimits(tuple(bounds))


def check_host_bytes(host_bytes: int, limits: HostLimits) -> None:
    """Refuse a region larger than can be had.

    Raises:
        ConfigError: The message has both numbers and the file that bounds it.
    """
    bound = limits.tightest
    if bound is not None and host_bytes > bound.available_bytes:
        raise ConfigError(
            f"host is {format_bytes(host_bytes)} ({host_bytes} bytes), but only "
            f"{format_bytes(bound.available_bytes)} ({bound.available_bytes} bytes) can be had "
            f"here, bounded by {bound.source} ({bound.detail}); lower host or raise that limit"
        )


def check_sizes(
    settings: Settings, slot_bytes: Sequence[int], limits: HostLimits | None = None
) -> None:
    """Refuse sizes that cannot work with this model's chunks.

    Args:
        settings: What the user wrote.
        slot_bytes: Bytes that one chunk takes, all ranks together, for each group.
        limits: As `host_limits` says; None leaves the machine out of it.

    Raises:
        ConfigError: The message has the bytes needed and the bytes there are.
    """
    needed = sum(slot_bytes)
    each = " + ".join(map(str, slot_bytes))
    if settings.host_bytes < needed:
        raise ConfigError(
            f"host is {settings.host_bytes} bytes, but one chunk of each group needs {needed} "
            f"bytes ({each}); raise host, or make chunks smaller (blocks_per_chunk)"
        )
    for tier in settings.tiers:
        if tier.capacity_bytes is not None and tier.capacity_bytes < needed:
            raise ConfigError(
                f"the capacity of tier {tier.name} is {tier.capacity_bytes} bytes, but one chunk "
                f"of each group needs {needed} bytes ({each}); raise it or leave the tier out"
            )
    if limits is not None:
        check_host_bytes(settings.host_bytes, limits)


def with_capacity(tier: TierSettings, *, own_bytes: int = 0) -> tuple[TierSettings, str | None]:
    """The tier with its bound, checked against its file system.

    Args:
        tier: A tier whose option `path` names a folder, made or not; others pass unchanged.
        own_bytes: What the tier holds there from earlier; it counts as free, so that the bound
            stays the same from start to start.

    Returns:
        The tier, its `capacity_bytes` set, and a line to log if we chose the bound.

    Raises:
        ConfigError: The capacity exceeds the file system; the message has both numbers.
    """
    path = tier.options.get("path")
    found = _file_system(Path(path).expanduser()) if path is not None else None
    if found is None:
        return tier, None
    total, free = found
    if tier.capacity_bytes is not None:
        wanted = tier.capacity_bytes + int(tier.options.get("free_space_floor", 0))
        if wanted > total:
            raise ConfigError(
                f"tier {tier.name} needs {format_bytes(wanted)} ({wanted} bytes: capacity and "
                f"free_space_floor), but the file system of {path} has {format_bytes(total)} "
                f"({total} bytes); lower capacity"
            )
        return tier, None
    bound = max(1, min(DEFAULT_CAPACITY_BYTES, (free + own_bytes) // 2))
    note = (
        f"tier {tier.name}: no capacity is given; it is bounded by {format_bytes(bound)}, the "
        f"smaller of 100 GiB and half of what {path} has free; set capacity to choose"
    )
    return replace(tier, capacity_bytes=bound), note


def _file_system(path: Path) -> tuple[int, int] | None:
    """Total and free bytes of the file system that holds `path` or its nearest parent."""
    for place in (path, *path.absolute().parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return None


def _machine_bounds(root: Path) -> Iterator[Bound]:
    text = _text(root / "proc/meminfo")
    kib = {
        name: number
        for name, _, rest in (line.partition(":") for line in text.splitlines())
        if (number := _whole(rest.removesuffix("kB"))) is not None
    }
    if "MemAvailable" in kib and "MemTotal" in kib:
        detail = f"MemAvailable; MemTotal is {format_bytes(kib['MemTotal'] * 1024)}"
        yield Bound("/proc/meminfo", kib["MemAvailable"] * 1024, detail)


def _cgroup_bounds(root: Path) -> Iterator[Bound]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, said = line.partition(":")
        controllers, is_line, path = said.partition(":")
        if not is_line:
            continue
        if controllers == "":
            places, files = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            places, files = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        for place in places:
            yield from _bounds_upwards(root, root / place, path, files)


def _bounds_upwards(root: Path, top: Path, path: str, files: _Files) -> Iterator[Bound]:
    """Limits of a cgroup and all above it; a path from outside the container reads as its top."""
    limit_name, usage_name, cache_names = files
    own = top / path.strip("/")
    above = [p for p in own.parents if p.is_relative_to(top)] if own != top else []
    for folder in (own, *above):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        usage = _number(folder / usage_name) or 0
        busy = max(0, usage - _page_cache(folder / "memory.stat", cache_names))
        detail = f"limit {format_bytes(limit)}, {format_bytes(busy)} in use"
        source = f"/{(folder / limit_name).relative_to(root)}"
        yield Bound(source, max(0, limit - busy), detail)


def _page_cache(file: Path, active_names: tuple[str, ...]) -> int:
    """Bytes of page cache the kernel can take back, as `memory.stat` has them."""
    stat = dict(line.split(" ", 1) for line in _text(file).splitlines() if " " in line)
    for active in active_names:
        if active in stat:
            inactive = active.replace("active", "inactive")
            return (_whole(stat[active]) or 0) + (_whole(stat.get(inactive, "")) or 0)
    return 0


def _number(file: Path) -> int | None:
    return _whole(_text(file))


def _whole(text: str) -> int | None:
    """The number that `text` is, if the kernel can have meant it."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None


def _text(file: Path) -> str:
    try:
        with file.open("rb") as open_file:
            return open_file.read(_MAX_TEXT_BYTES).decode("ascii", "replace")
    except (OSError, ValueError):  # a name with a zero in it is a ValueError
        return ""
