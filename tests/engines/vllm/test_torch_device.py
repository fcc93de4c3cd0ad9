"""The real device, with torch's module and vLLM's operator stood in for: how they are called."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from undercroft.clock import SystemClock
from undercroft.engines.vllm import torch_device
from undercroft.engines.vllm.pinning import HostMemory, Pinning
from undercroft.engines.vllm.torch_device import TorchDevice, bind_thread
from undercroft.errors import Bug


class Module:
    """What `torch.cuda` and `torch.xpu` offer of what is used."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.inside: Any = None

    def Stream(self, device: Any) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(device=device)

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(enable_timing=enable_timing)

    def current_stream(self, device: Any) -> Any:
        return ("current", device)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.inside = stream
        yield
        self.inside = None

    def set_device(self, index: int) -> None:
        self.log.append(("set_device", index))

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def module(monkeypatch: Any) -> Module:
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: made)
    return made


@pytest.fixture
def operator(module: Module) -> Any:
    """vLLM's operator as its CUDA build declares it, by memmove."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, bool any) -> ()")
    calls: list[Any] = []

    def swap(source: Any, target: Any, sizes: Any, in_any_order: bool) -> None:
        assert source.dtype == target.dtype == sizes.dtype == torch.int64
        calls.append((module.inside, len(sizes), in_any_order))
        rows = zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True)
        for here, there, size in rows:
            ctypes.memmove(there, here, size)

    library.impl("swap_blocks_batch", swap, "CPU")
    yield calls
    library._destroy()


@pytest.fixture
def memory() -> Any:
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(rng.integers(0, 100, (8, 64), np.int8)) for _ in range(2)]
    return tensors, np.zeros(4096, np.uint8)


def device_over(memory: Any, kind: str = "cuda", pages: Any = (64,)) -> TorchDevice:
    tensors, region = memory
    pinning = Pinning(
        None,
        memory=HostMemory(region.ctypes.data, region.nbytes, lambda: region.nbytes),
        bind_thread=lambda: None,
        clock=SystemClock(),
    )
    return TorchDevice(
        torch.device(kind, 0), tensors=tensors, region=region, page_bytes=pages, pinning=pinning
    )


def filled(device: TorchDevice, memory: Any, *, to_device: bool) -> Any:
    """Two rows of the second tensor, and places in the region."""
    tensors, region = memory
    batch = device.new_descriptors(16)
    engine = [tensors[1][3].data_ptr(), tensors[0][7].data_ptr()]
    host = [region.ctypes.data + 128, region.ctypes.data + 1024]
    batch.source[:2], batch.target[:2] = (host, engine) if to_device else (engine, host)
    batch.sizes[:2] = 64
    return batch


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_streams_and_events_are_those_of_the_device(module: Module, memory: Any, kind: str) -> None:
    """Of this rank's device, with timing; the engine's stream is the thread's current one."""
    device = device_over(memory, kind)
    assert device.new_stream().device == torch.device(kind, 0)  # type: ignore[attr-defined] # fake
    assert device.new_event().enable_timing  # type: ignore[attr-defined] # fake
    assert device.current_stream() == ("current", torch.device(kind, 0))  # type: ignore[comparison-overlap] # fake
    bind_thread(torch.device(kind, 3))
    assert module.log == [("set_device", 3)]


def test_descriptors_have_the_type_that_the_operator_takes(module: Module, memory: Any) -> None:
    """Signed on CUDA and ROCm, unsigned on XPU; both views are of the same bytes."""
    for kind, dtype in (("cuda", torch.int64), ("xpu", torch.uint64)):
        batch = device_over(memory, kind).new_descriptors(4)
        assert [tensor.dtype for tensor in batch.tensors] == [dtype] * 3  # type: ignore[attr-defined] # tensors
        batch.target[:] = np.array([1, 2, 3, 4], np.int64) + (1 << 46)
        assert batch.tensors[1].tolist() == [(1 << 46) + i for i in (1, 2, 3, 4)]  # type: ignore[index] # tensors


@pytest.mark.parametrize("to_device", [True, False])
def test_the_engines_operator_copies_in_our_stream(
    module: Module, operator: Any, memory: Any, to_device: bool
) -> None:
    """One call for the batch, inside the stream, with what was said about the order."""
    device = device_over(memory)
    tensors, region = memory
    region[128:192], region[1024:1088] = 5, 6
    wanted = tensors[1][3].tolist(), tensors[0][7].tolist()
    batch = filled(device, memory, to_device=to_device)
    stream = device.new_stream()
    device.copy(stream, batch, 2, to_device=to_device, in_any_order=to_device)
    assert operator == [(stream, 2, to_device)]
    if to_device:
        assert tensors[1][3].tolist() == [5] * 64
        assert tensors[0][7].tolist() == [6] * 64
    else:
        assert (region[128:192].tolist(), region[1024:1088].tolist()) == wanted


def test_a_build_without_the_operator_copies_one_by_one(
    module: Module, memory: Any, caplog: Any
) -> None:
    """By torch, in the stream; said once."""
    device = device_over(memory)
    assert "no batched copy" in caplog.text
    tensors, region = memory
    batch = filled(device, memory, to_device=False)
    device.copy(device.new_stream(), batch, 2, to_device=False, in_any_order=False)
    assert region[128:192].tolist() == tensors[1][3].tolist()
    assert region[1024:1088].tolist() == tensors[0][7].tolist()
    assert not region[:128].any()


def test_an_address_that_is_nobodys_is_refused(module: Module, memory: Any) -> None:
    """Copying one by one looks every address up."""
    device = device_over(memory)
    batch = filled(device, memory, to_device=False)
    for target in (memory[1].ctypes.data + 4096 - 63, memory[1].ctypes.data - 1, 8):
        batch.target[0] = target
        with pytest.raises(Bug, match="in no tensor"):
            device.copy_singly(device.new_stream(), batch, 2, to_device=False)


def test_small_pages_go_by_the_kernel_only_where_it_may_read(
    module: Module, operator: Any, memory: Any, monkeypatch: Any
) -> None:
    """Loads of whole words from registered memory; everything else by the operator."""
    device = device_over(memory)
    kernel: list[int] = []
    device._kernel = lambda source, *_rest, **_more: kernel.append(len(source))
    stream = device.new_stream()
    batch = filled(device, memory, to_device=True)
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)
    assert kernel == []  # not registered
    device._pinning._pinned_bytes = 4096
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)
    assert kernel == [2]
    batch.sizes[1] = 60
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)  # not whole words
    batch = filled(device, memory, to_device=False)
    device.copy(stream, batch, 2, to_device=False, in_any_order=False)  # a store
    assert kernel == [2]
    assert len(operator) == 3


def test_the_kernel_is_not_used_where_it_cannot_be(
    module: Module, memory: Any, monkeypatch: Any
) -> None:
    """Not on XPU and ROCm, not for big pages, and not if it cannot be compiled, as here."""
    assert device_over(memory, "xpu")._kernel is None
    assert device_over(memory)._kernel is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device_over(memory)._kernel is None


def test_after_closing_no_memory_is_held(module: Module, memory: Any) -> None:
    """No view of the region and of the tensors is left."""
    device = device_over(memory)
    assert device.close()
    with pytest.raises(Bug):
        device._flat.at(memory[1].ctypes.data, 1)
    assert torch_device.DEVICE_TYPES == ("cuda", "xpu")
