"""Memory near the device: which node it hangs on, and asking the kernel for that node's memory.

All of it is a wish. Without nodes, without the right to ask (containers often lack it), or on a
processor whose system calls are not known here, nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["nodes_of_devices", "place_near", "prefer_nodes"]

_SYS_MBIND, _SYS_SET_MEMPOLICY, _SYS_GET_MEMPOLICY = 0, 1, 2
_NUMBERS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}

_MPOL_DEFAULT, _MPOL_PREFERRED, _MPOL_INTERLEAVE = 0, 1, 3
_MAX_NODES = 1024

_LOG = logging.getLogger(__name__)


def nodes_of_devices(
    device: torch.device, num_ranks: int, *, sysfs: Path = Path("/sys/bus/pci/devices")
) -> frozenset[int]:
    """The nodes of memory that the ranks of this replica copy from and to; empty if not known.

    Args:
        device: This rank's.
        num_ranks: With more than one, all devices that this process sees count: the ranks share
            every slot, and each may be on any of them.
        sysfs: Where the kernel lists devices.
    """
    module: Any = torch.get_device_module(device)
    first = device.index or 0
    indices = [first] if num_ranks == 1 else range(module.device_count())
    nodes: set[int] = set()
    for index in indices:
        found = module.get_device_properties(index)
        places = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None in places:
            return frozenset()
        domain, bus, slot = places
        try:
            text = (sysfs / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node").read_text()
            node = int(text)
        except (OSError, ValueError):
            return frozenset()
        if node < 0:  # the machine has one node, or does not say
            return frozenset()
        nodes.add(node)
    return frozenset(nodes)


@contextmanager
def prefer_nodes(nodes: Collection[int]) -> Iterator[None]:
    """Memory that this thread makes exist meanwhile comes from `nodes`, if there is any left."""
    was_set = bool(nodes) and _call(_SYS_SET_MEMPOLICY, _mode(nodes), *_mask(nodes)) == 0
    try:
        yield
    finally:
        if was_set:
            _call(_SYS_SET_MEMPOLICY, _MPOL_DEFAULT, None, 0)


def place_near(address: int, num_bytes: int, nodes: Collection[int]) -> bool:
    """Let pages of a shared mapping that do not exist yet come from `nodes`, whoever makes them.

    Args:
        address: Page-aligned.
        num_bytes: Length.
        nodes: One: preferred; several: in turns. None: nothing is done.

    Returns:
        Whether the kernel took the wish.
    """
    if not nodes or not num_bytes:
        return False
    mask, length = _mask(nodes)
    error = _call(_SYS_MBIND, address, num_bytes, _mode(nodes), mask, length, 0)
    if error:
        _LOG.debug("memory near the device: the kernel said %s", os.strerror(error))
    return error == 0


def _mode(nodes: Collection[int]) -> int:
    return _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE


def _mask(nodes: Collection[int]) -> tuple[Any, int]:
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in nodes:
        if node < _MAX_NODES:
            words[node // 64] |= 1 << node % 64
    return words, _MAX_NODES


def _call(which: int, *arguments: Any) -> int:  # noqa: ANN401 - C decides
    """A system call; its error number, or 0."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    wrapped = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        if libc.syscall(ctypes.c_long(numbers[which]), *wrapped) == 0:
            return 0
        return ctypes.get_errno() or 1
    return errno.ENOSYS
