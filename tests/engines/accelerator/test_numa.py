"""Memory near the device is a wish: found where the kernel lists it, harmless where it does not."""

import ctypes
import mmap
import os
import platform
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from undercroft.engines.accelerator import numa
from undercroft.engines.accelerator.numa import nodes_of_devices, place_near, prefer_nodes


class Module:
    """What torch says of two devices."""

    def __init__(self, **more: Any) -> None:
        self.properties = [
            SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0, **more),
            SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC3, pci_device_id=2, **more),
        ]

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> Any:
        return self.properties[index]


@pytest.fixture
def sysfs(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setattr(torch, "get_device_module", lambda _device: Module())
    for name, node in (("0000:1b:00.0", 0), ("0001:c3:02.0", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_the_node_is_the_one_that_the_device_hangs_on(sysfs: Any) -> None:
    """One rank: its device's; several: those of all devices, for they share every slot."""
    assert nodes_of_devices(torch.device("cuda", 1), 1, sysfs=sysfs) == {3}
    assert nodes_of_devices(torch.device("cuda"), 1, sysfs=sysfs) == {0}
    assert nodes_of_devices(torch.device("cuda", 1), 2, sysfs=sysfs) == {0, 3}


@pytest.mark.parametrize("text", ["-1\n", "", "what"])
def test_an_unknown_node_is_no_node(sysfs: Any, text: str) -> None:
    """The kernel may not say; then nothing is asked for."""
    (sysfs / "0000:1b:00.0" / "numa_node").write_text(text)
    assert nodes_of_devices(torch.device("cuda", 0), 1, sysfs=sysfs) == set()


def test_a_device_without_a_place_on_the_bus_has_no_node(sysfs: Any, monkeypatch: Any) -> None:
    """Neither has one that torch does not place, nor one that is not listed."""
    for found in (
        SimpleNamespace(),
        SimpleNamespace(pci_domain_id=9, pci_bus_id=1, pci_device_id=1),
    ):
        module = SimpleNamespace(get_device_properties=lambda _index, found=found: found)
        monkeypatch.setattr(torch, "get_device_module", lambda _device, module=module: module)
        assert nodes_of_devices(torch.device("xpu", 0), 1, sysfs=sysfs) == set()


def _policy(address: int = 0, flags: int = 0) -> int | None:
    """The memory policy of this thread, or of an address; None: the kernel does not say."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        return None
    mode = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(each) for each in (0, 0, address, flags)]
    error = libc.syscall(ctypes.c_long(number), ctypes.byref(mode), *words)
    return None if error else mode.value


def test_the_kernel_is_asked_and_then_left_as_it_was() -> None:
    """A thread's wish lasts as long as the block; where asking is forbidden nothing happens."""
    before = _policy()
    with prefer_nodes({0}):
        during = _policy()
    assert _policy() == before
    with prefer_nodes(set()):
        assert _policy() == before
    if numa._call(numa._SYS_SET_MEMPOLICY, 0, None, 0) == 0 and before is not None:
        assert during == 1  # MPOL_PREFERRED


def test_a_shared_mapping_takes_the_wish_and_still_works() -> None:
    """Its policy is set where that is allowed; its bytes are there in any case."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as memory:
        array = np.frombuffer(memory, np.uint8)
        address = array.ctypes.data
        taken = place_near(address, 1 << 20, {0})
        policy = _policy(address, 2)
        array[:] = 7
        assert int(array.sum()) == 7 << 20
        if taken and policy is not None:
            assert policy == 1
        del array
    os.close(fd)


def test_a_node_that_is_not_there_and_an_unknown_processor_do_no_harm(monkeypatch: Any) -> None:
    """False, no exception."""
    assert not place_near(0, 0, {0})
    assert not place_near(4096, 4096, set())
    assert not place_near(1, 4096, {900})  # not a page, no such node
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert not place_near(4096, 4096, {0})
    with prefer_nodes({0}):
        pass
