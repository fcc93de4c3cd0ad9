"""Which worker copies where, and a whole engine on a device, from the spec down."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kv_fixtures import kv_caches
from rig import running
from shapes import prompt

from undercroft.clock import SystemClock
from undercroft.engines.vllm import platforms
from undercroft.engines.vllm.device_worker import DeviceWorker
from undercroft.engines.vllm.platforms import Platform
from undercroft.engines.vllm.rank_layout import direct_groups
from undercroft.engines.vllm.slot_worker import Reports
from undercroft.engines.vllm.worker import CpuWorker
from undercroft.errors import ConfigError, LayoutMismatch
from undercroft.testing.fake_device import FakeDevice

NOWHERE = Reports(lambda _store_id: None)


def caches_on(*names: str) -> Any:
    """No more of the engine's tensors than is looked at."""
    tensors = [SimpleNamespace(tensor=SimpleNamespace(device=torch.device(name))) for name in names]
    return SimpleNamespace(tensors=tensors)


def make(platform: Platform, region: Any) -> Any:
    caches = kv_caches("overlaid")
    return platform.make_worker(
        caches,
        region=region,
        ready_bytes=lambda: len(region),
        groups=direct_groups(caches, 1),
        reports=NOWHERE,
        clock=SystemClock(),
    )


class Driver:
    """Registers whatever it is told to."""

    held: set[int] = set()  # noqa: RUF012 - shared on purpose

    def register(self, address: int, num_bytes: int) -> bool:
        self.held.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.held.remove(address)


@pytest.fixture
def devices(monkeypatch: Any) -> list[FakeDevice]:
    """Every platform is a device; those that were made."""
    made: list[FakeDevice] = []

    def fake(_device: Any, *, pinning: Any, **_more: Any) -> FakeDevice:
        device = FakeDevice(len(made), max_steps=200, piece_bytes=pinning.piece_bytes)
        device.close = pinning.close  # type: ignore[method-assign] # as the real one
        made.append(device)
        return device

    monkeypatch.setattr(platforms, "TorchDevice", fake)
    monkeypatch.setattr(platforms, "EngineRegistrar", Driver)
    monkeypatch.setattr(platforms, "operators_for", lambda _device, _pages: None)
    monkeypatch.setattr(platforms, "bind_thread", lambda _device: None)
    there = Platform(torch.device("cuda", 0), frozenset({0}))
    monkeypatch.setattr(platforms.Platform, "of", classmethod(lambda *_, **__: there))
    return made


@pytest.mark.parametrize("name", ["cuda:1", "xpu:0"])
def test_an_accelerator_is_taken_as_torch_names_it(name: str, monkeypatch: Any) -> None:
    """CUDA, ROCm (also cuda) and XPU; with the nodes near it."""
    seen = []

    def nodes(device: Any, num_ranks: int) -> frozenset[int]:
        seen.append((str(device), num_ranks))
        return frozenset({1})

    monkeypatch.setattr(platforms, "nodes_of_devices", nodes)
    found = Platform.of(caches_on(name, name), num_ranks=2)
    assert found == Platform(torch.device(name), frozenset({1}))
    assert seen == [(name, 2)]


def test_host_memory_is_copied_by_the_processor() -> None:
    """As before, without a driver or a node."""
    found = Platform.of(kv_caches("overlaid"), num_ranks=1)
    assert found == Platform(None)
    worker = make(found, np.zeros(1 << 16, np.uint8))
    assert isinstance(worker, CpuWorker)
    worker.shutdown()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("mps:0",), "on mps:0: Undercroft copies on CUDA, ROCm, XPU and the CPU"),
        (("cuda:0", "cuda:1"), "on cuda:0, cuda:1; it must be on one device"),
        ((), "on nowhere"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(names: Any, text: str) -> None:
    """The line says where the KV cache is, and what is served."""
    with pytest.raises(ConfigError, match=text):
        Platform.of(caches_on(*names), num_ranks=1)


def test_a_device_gets_a_worker_over_registered_memory(devices: Any) -> None:
    """All of the region is registered before the worker is there, nothing after it has gone."""
    region = np.zeros(1 << 16, np.uint8)
    worker = make(Platform(torch.device("cuda", 0)), region)
    assert isinstance(worker, DeviceWorker)
    assert Driver.held == {region.ctypes.data}
    worker.shutdown()
    assert Driver.held == set()


def test_a_worker_that_cannot_be_made_leaves_nothing_registered(devices: Any) -> None:
    """The error is the worker's own."""
    region = np.zeros(1 << 16, np.uint8)
    caches = kv_caches("overlaid")
    caches.tensors[1].page_size_bytes = 1 << 20
    with pytest.raises(LayoutMismatch):
        Platform(torch.device("cuda", 0)).make_worker(
            caches,
            region=region,
            ready_bytes=lambda: len(region),
            groups=direct_groups(caches, 1),
            reports=NOWHERE,
            clock=SystemClock(),
        )
    assert Driver.held == set()


def test_an_engine_on_a_device_gets_its_bytes_back(devices: Any) -> None:
    """By way of the connector of vLLM: prompts stored, evicted there, loaded, compared."""
    with running({"host": "1MiB"}, num_blocks=40) as rig:
        for number in range(4):
            rig.run(prompt(number, 160))
        for number in range(4):
            assert rig.run(prompt(number, 160)).num_hit_tokens
        assert rig.num_loads_checked
        (device,) = devices
        assert device.num_batches > 4
        assert device.num_singly == 0
        assert len(Driver.held) == 1
    assert Driver.held == set()
