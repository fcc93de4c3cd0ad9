"""Sizes that cannot work are refused with both numbers and the file that bounds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from undercroft.errors import ConfigError
from undercroft.settings import (
    Bound,
    HostLimits,
    TierSettings,
    check_host_bytes,
    check_sizes,
    host_limits,
    load,
    with_capacity,
)

GIB = 1024**3
MEMINFO = "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\nHugePages: 0\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


def test_machine_without_cgroups_is_bounded_by_its_memory(tmp_path: Path) -> None:
    """MemAvailable decides; MemTotal is told."""
    limits = host_limits(machine(tmp_path, {}), shm=None)
    assert [(b.source, b.available_bytes) for b in limits.bounds] == [("/proc/meminfo", 32 * GIB)]
    assert "MemTotal is 64 GiB" in limits.bounds[0].detail


def test_cgroup_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    """The tightest of all cgroups up to the top; page cache in use counts as free."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n",
        },
    )
    bound = host_limits(root, shm=None).tightest
    assert bound == Bound("/sys/fs/cgroup/pod/memory.max", 7 * GIB, "limit 8 GiB, 1 GiB in use")


def test_cgroup_v1_inside_a_container(tmp_path: Path) -> None:
    """The path is the host's, the mount shows only the container's own: its top is read."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/\n4:cpu,memory:/kubepods/x\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": (
                f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file 0\n"
            ),
        },
    )
    bound = host_limits(root, shm=None).tightest
    assert bound is not None
    assert bound.source == "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert bound.available_bytes == 3 * GIB


def test_no_limit_in_v1_is_a_huge_number(tmp_path: Path) -> None:
    """Which bounds nothing."""
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    limits = host_limits(machine(tmp_path, files), shm=None)
    assert [b.source for b in limits.bounds] == ["/proc/meminfo"]


def test_this_machine() -> None:
    """The real files: memory and /dev/shm bound us, at no more than their size."""
    bounds = {b.source: b.available_bytes for b in host_limits().bounds}
    shm = os.statvfs("/dev/shm")
    assert 0 < bounds["/dev/shm"] <= shm.f_blocks * shm.f_frsize
    assert bounds["/proc/meminfo"] > 0


def test_shared_memory_is_a_bound_only_where_it_is(tmp_path: Path) -> None:
    """A region that is on no memory file system is not bounded by one."""
    assert host_limits(machine(tmp_path, {}), shm="dev/shm").bounds == (
        host_limits(tmp_path, shm=None).bounds
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert "/dev/shm" in {b.source for b in host_limits(tmp_path).bounds}


def test_too_much_host_memory_is_refused_with_both_numbers() -> None:
    """The number asked for, the number there is, and the file that says so."""
    limits = HostLimits(
        (Bound("/proc/meminfo", 64 * GIB, "x"), Bound("/dev/shm", 4 * GIB, "size 8 GiB"))
    )
    check_host_bytes(4 * GIB, limits)
    with pytest.raises(ConfigError) as caught:
        check_host_bytes(4 * GIB + 1, limits)
    for part in (str(4 * GIB + 1), str(4 * GIB), "/dev/shm", "size 8 GiB"):
        assert part in str(caught.value)
    check_host_bytes(2**60, HostLimits(()))


def test_host_memory_below_one_chunk_is_refused_with_both_numbers() -> None:
    """One chunk of each group is the least that works."""
    check_sizes(load({"host": 12288}), [4096, 8192])
    with pytest.raises(ConfigError, match=r"host is 12287 bytes.*needs 12288 bytes \(4096 \+ 8192"):
        check_sizes(load({"host": 12287}), [4096, 8192])


def test_a_tier_below_one_chunk_is_refused_with_both_numbers() -> None:
    """By the tier's name."""
    tier = {"type": "disk", "path": "/x", "capacity": 4095, "name": "fast"}
    settings = load({"host": "1MiB", "tiers": [tier]})
    with pytest.raises(ConfigError, match=r"tier fast is 4095 bytes.*needs 4096 bytes"):
        check_sizes(settings, [4096])


def test_sizes_are_held_against_the_machine() -> None:
    """With limits given, they are checked too."""
    limits = HostLimits((Bound("/dev/shm", 4096, "x"),))
    with pytest.raises(ConfigError, match="bounded by /dev/shm"):
        check_sizes(load({"host": "1MiB"}), [4096], limits)


def test_the_default_capacity_is_stated_and_stable(tmp_path: Path) -> None:
    """Half of the free space, at most 100 GiB, counting what the tier holds already as free."""
    settings = load({"host": 1, "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]})
    (tier,) = settings.tiers
    bounded, note = with_capacity(tier)
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    assert bounded.capacity_bytes is not None
    assert bounded.capacity_bytes == pytest.approx(min(100 * GIB, free // 2), rel=0.1)
    assert note is not None
    assert "no capacity is given; it is bounded by" in note
    more, _ = with_capacity(tier, own_bytes=400 * GIB)
    assert more.capacity_bytes == 100 * GIB
    assert with_capacity(bounded) == (bounded, None)


def test_a_folder_that_is_not_made_yet_is_measured_by_its_parent(tmp_path: Path) -> None:
    """The bound is known before the first byte is written, and nothing is made."""
    path = tmp_path / "a" / "b"
    bounded, _ = with_capacity(TierSettings("t", "disk", None, options={"path": str(path)}))
    assert bounded.capacity_bytes
    assert not path.exists()


def test_a_capacity_beyond_the_file_system_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """Capacity and floor together must fit into the file system."""
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize
    options = {"path": str(tmp_path), "free_space_floor": 10}
    with_capacity(TierSettings("t", "disk", total - 10, options=options))
    with pytest.raises(ConfigError, match=rf"tier t needs .*{total + 1} bytes.*{total} bytes"):
        with_capacity(TierSettings("t", "disk", total - 9, options=options))


def test_a_tier_without_a_folder_passes() -> None:
    """Nothing to measure, nothing to say."""
    tier = TierSettings("m", "memory", 5)
    assert with_capacity(tier) == (tier, None)
