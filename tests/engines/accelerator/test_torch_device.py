"""The real device, with torch's module and vLLM's operator stood in for: how they are called."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from undercroft.clock import SystemClock
from undercroft.engines.accelerator import torch_device
from undercroft.engines.accelerator.pinning import HostMemory, Pinning
from undercroft.engines.accelerator.torch_device import Operators, TorchDevice, bind_thread
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


class Operator:
    """Copies by memmove, and remembers how it was called."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.calls: list[Any] = []

    def __call__(self, *tensors: Any, is_src_access_order_any: bool) -> None:
        self.calls.append((self.module.inside, len(tensors[0]), is_src_access_order_any))
        for here, there, size in zip(*(each.tolist() for each in tensors), strict=True):
            ctypes.memmove(there, here, size)


@pytest.fixture
def memory() -> Any:
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(rng.integers(0, 100, (8, 64), np.int8)) for _ in range(2)]
    return tensors, np.zeros(4096, np.uint8)


def device_over(memory: Any, kind: str = "cuda", **operators: Any) -> TorchDevice:
    tensors, region = memory
    pinning = Pinning(
        None,
        memory=HostMemory(region.ctypes.data, region.nbytes, lambda: region.nbytes),
        bind_thread=lambda: None,
        clock=SystemClock(),
    )
    return TorchDevice(
        torch.device(kind, 0),
        tensors=tensors,
        region=region,
        operators=Operators(**{"batch": None, **operators}),
        pinning=pinning,
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
    module: Module, memory: Any, to_device: bool
) -> None:
    """One call for the batch, inside the stream, with what was said about the order."""
    operator = Operator(module)
    device = device_over(memory, batch=operator)
    tensors, region = memory
    region[128:192], region[1024:1088] = 5, 6
    wanted = tensors[1][3].tolist(), tensors[0][7].tolist()
    batch = filled(device, memory, to_device=to_device)
    stream = device.new_stream()
    device.copy(stream, batch, 2, to_device=to_device, in_any_order=to_device)
    assert operator.calls == [(stream, 2, to_device)]
    if to_device:
        assert tensors[1][3].tolist() == [5] * 64
        assert tensors[0][7].tolist() == [6] * 64
    else:
        assert (region[128:192].tolist(), region[1024:1088].tolist()) == wanted


def test_a_build_without_the_operator_copies_one_by_one(module: Module, memory: Any) -> None:
    """By torch, in the stream."""
    device = device_over(memory)
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


def test_small_pages_go_by_the_kernel_only_where_it_may_read(module: Module, memory: Any) -> None:
    """Loads of whole words from registered memory; everything else by the operator."""
    operator, kernel = Operator(module), Operator(module)
    device = device_over(memory, batch=operator, small_loads=kernel)
    stream = device.new_stream()
    batch = filled(device, memory, to_device=True)
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)
    assert len(operator.calls) == 1  # not registered
    device._pinning._pinned_bytes = 4096
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)
    assert kernel.calls == [(stream, 2, True)]
    batch.sizes[1] = 60
    device.copy(stream, batch, 2, to_device=True, in_any_order=True)  # not whole words
    batch = filled(device, memory, to_device=False)
    device.copy(stream, batch, 2, to_device=False, in_any_order=False)  # a store
    assert len(kernel.calls) == 1
    assert len(operator.calls) == 3


def test_after_closing_no_memory_is_held(module: Module, memory: Any) -> None:
    """No view of the region and of the tensors is left."""
    device = device_over(memory)
    assert device.close()
    with pytest.raises(Bug):
        device._flat.at(memory[1].ctypes.data, 1)
    assert torch_device.DEVICE_TYPES == ("cuda", "xpu")
