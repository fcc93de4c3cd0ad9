"""An accelerator as torch names it: CUDA, ROCm (which torch calls cuda too), XPU.

Streams and events are torch's; the copies of many pieces in one call are the engine's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from undercroft.engines.accelerator.device import Descriptors, Event, Stream
from undercroft.engines.accelerator.pinning import Pinning
from undercroft.errors import Bug

__all__ = ["DEVICE_TYPES", "Operators", "TorchDevice", "bind_thread"]

DEVICE_TYPES = ("cuda", "xpu")
"""What torch calls the devices that KV can be copied from and to; ROCm calls itself cuda."""


class Operators(NamedTuple):
    """The engine's copies of many pieces in one call.

    All take `(source, target, sizes, is_src_access_order_any=...)`, three tensors and a flag, as
    vLLM's `swap_blocks_batch`, and work in the current stream.

    Args:
        batch: Copies between the device and any host memory; None: torch copies piece by piece.
        small_loads: Faster for loads of small pieces, from registered memory and in whole words of
            8 bytes only; None: there is none.
        can_pin: Whether torch can make pinned host memory here.
    """

    batch: Callable[..., None] | None
    small_loads: Callable[..., None] | None = None
    can_pin: bool = False


def bind_thread(device: torch.device) -> None:
    """Make the calling thread speak to this device, not to the first one there is."""
    module: Any = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device.index)


class TorchDevice:
    """See `device.Device`.

    Args:
        device: Where the tensors are.
        tensors: The engine's tensors: all addresses copied from or to are in their storages.
        region: The host slots; the other addresses.
        operators: The engine's copies.
        pinning: Of the region; closed with this.

    Threads: the engine's thread.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tensors: Iterable[torch.Tensor],
        region: NDArray[np.uint8],
        operators: Operators,
        pinning: Pinning,
    ) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._region_address = region.ctypes.data
        self._pinning = pinning
        self.piece_bytes = pinning.piece_bytes
        self._flat = _Flat([*(_storage(tensor) for tensor in tensors), torch.from_numpy(region)])
        self._operators = operators

    def new_stream(self) -> Stream:
        """See `Device.new_stream`."""
        stream: Stream = self._module.Stream(device=self.device)
        return stream

    def new_event(self) -> Event:
        """See `Device.new_event`."""
        event: Event = self._module.Event(enable_timing=True)
        return event

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        stream: Stream = self._module.current_stream(self.device)
        return stream

    def new_descriptors(self, capacity: int) -> Descriptors:
        """See `Device.new_descriptors`."""
        # The operator wants int64 on CUDA and ROCm, uint64 on XPU.
        dtype = torch.uint64 if self.device.type == "xpu" else torch.int64
        tensors = [
            torch.empty(capacity, dtype=dtype, pin_memory=self._operators.can_pin) for _ in range(3)
        ]
        source, target, sizes = (tensor.numpy() for tensor in tensors)
        return Descriptors(source, target, sizes, tensors)

    def copy(
        self,
        stream: Stream,
        batch: Descriptors,
        num_copies: int,
        *,
        to_device: bool,
        in_any_order: bool,
    ) -> None:
        """See `Device.copy`."""
        operator, kernel = self._operators.batch, self._operators.small_loads
        if operator is None:
            self.copy_singly(stream, batch, num_copies, to_device=to_device)
            return
        if to_device and kernel is not None and self._suits_kernel(batch, num_copies):
            operator = kernel
        tensors: Any = batch.tensors
        with self._module.stream(stream):
            operator(
                *(tensor[:num_copies] for tensor in tensors), is_src_access_order_any=in_any_order
            )

    def copy_singly(
        self,
        stream: Stream,
        batch: Descriptors,
        num_copies: int,
        *,
        to_device: bool,  # noqa: ARG002 - the addresses say it too
    ) -> None:
        """See `Device.copy_singly`."""
        rows = zip(
            *(values[:num_copies].tolist() for values in (batch.source, batch.target, batch.sizes)),
            strict=True,
        )
        with self._module.stream(stream):
            for source, target, size in rows:
                self._flat.at(target, size).copy_(self._flat.at(source, size), non_blocking=True)

    def close(self) -> bool:
        """See `Device.close`."""
        self._flat = _Flat([])
        return self._pinning.close()

    def _suits_kernel(self, batch: Descriptors, num_copies: int) -> bool:
        """Whether a kernel may read these sources: registered, and in whole words."""
        end = int((batch.source[:num_copies] + batch.sizes[:num_copies]).max())
        words = batch.source[:num_copies] | batch.target[:num_copies] | batch.sizes[:num_copies]
        is_even = not int(np.bitwise_or.reduce(words)) & 7
        return is_even and end - self._region_address <= self._pinning.pinned_bytes


class _Flat:
    """Bytes by address, in one of some stretches of memory."""

    def __init__(self, stretches: list[torch.Tensor]) -> None:
        by_address = {stretch.data_ptr(): stretch for stretch in stretches}
        self._starts = sorted(by_address)
        self._stretches = [by_address[start] for start in self._starts]

    def at(self, address: int, size: int) -> torch.Tensor:
        """A view, `(size,)` uint8.

        Raises:
            Bug: There is no such memory.
        """
        index = bisect_right(self._starts, address) - 1
        offset = address - self._starts[index] if index >= 0 else -1
        if offset < 0 or offset + size > len(self._stretches[index]):
            raise Bug(f"{size} bytes at {address:#x} are in no tensor and not in the region")
        return self._stretches[index][offset : offset + size]


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that `tensor` is a view of."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
