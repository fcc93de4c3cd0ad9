"""The accelerator that torch and vLLM name: CUDA, ROCm (which torch calls cuda too), XPU.

Streams and events are torch's. The copy of many pieces is vLLM's own operator
(`vllm._custom_ops.swap_blocks_batch`: one driver call on CUDA 12.8 and later, a loop of
asynchronous copies elsewhere). For loads of small pages on CUDA it is vLLM's Triton kernel, as in
vLLM's own worker: a copy engine is slow below some 28 KiB apiece.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undercroft.engines.vllm.device import Descriptors, Event, Stream
from undercroft.engines.vllm.pinning import Pinning
from undercroft.errors import Bug, ConfigError

__all__ = ["DEVICE_TYPES", "TorchDevice", "bind_thread"]

DEVICE_TYPES = ("cuda", "xpu")
"""What torch calls the devices that KV can be copied from and to; ROCm calls itself cuda."""

_MAX_KERNEL_CHUNK = 8192
_WARM_UP_COPIES = (16, 17)  # Triton compiles anew for counts that sixteen does not divide

_LOG = logging.getLogger(__name__)


def bind_thread(device: torch.device) -> None:
    """Make the calling thread speak to this device, not to the first one there is."""
    module: Any = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device.index)


class TorchDevice:
    """See `device.Device`; the operator is that of vLLM's build, or torch's own copies without it.

    Args:
        device: Where the tensors are.
        tensors: The engine's tensors: all addresses copied from or to are in their storages.
        region: The host slots; the other addresses.
        page_bytes: The sizes of the model's pages.
        pinning: Of the region; closed with this.

    Threads: the engine's thread.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tensors: Iterable[torch.Tensor],
        region: NDArray[np.uint8],
        page_bytes: Iterable[int],
        pinning: Pinning,
    ) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._region_address = region.ctypes.data
        self._pinning = pinning
        self.piece_bytes = pinning.piece_bytes
        self._flat = _Flat([*(_storage(tensor) for tensor in tensors), torch.from_numpy(region)])
        self._can_pin = _can_pin()
        self._operator = _batch_operator()
        self._kernel = self._small_page_kernel(tuple(page_bytes))

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
        tensors = [torch.empty(capacity, dtype=dtype, pin_memory=self._can_pin) for _ in range(3)]
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
        if self._operator is None:
            self.copy_singly(stream, batch, num_copies, to_device=to_device)
            return
        operator = self._operator
        if to_device and self._kernel is not None and self._suits_kernel(batch, num_copies):
            operator = self._kernel
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

    def _small_page_kernel(self, page_bytes: tuple[int, ...]) -> Callable[..., None] | None:
        """The engine's kernel for small pages, compiled, where it is faster than copies."""
        if self.device.type != "cuda" or torch.version.hip or not page_bytes:
            return None
        try:
            from vllm.triton_utils import HAS_TRITON, triton  # noqa: PLC0415 - only on CUDA
            from vllm.v1.kv_offload.cpu.swap_blocks_triton import (  # noqa: PLC0415 - only on CUDA
                THRESHOLD_BYTES,
                swap_blocks_batch,
            )

            if not HAS_TRITON or max(page_bytes) >= THRESHOLD_BYTES:
                return None
            chunk = min(triton.next_power_of_2(max(page_bytes)), _MAX_KERNEL_CHUNK)
            kernel = partial(swap_blocks_batch, bytes_per_chunk=chunk)
            for num_copies in _WARM_UP_COPIES:  # of no bytes; so that no load waits for a compiler
                kernel(*(torch.zeros(num_copies, dtype=torch.int64) for _ in range(3)))
            self._module.synchronize()
        except Exception as error:  # noqa: BLE001 - the operator does the same, slower
            _LOG.info("vLLM's kernel for small pages is not used: %s", error)
            return None
        return kernel


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


def _can_pin() -> bool:
    from vllm.platforms import current_platform  # noqa: PLC0415 - resolving it has side effects

    return bool(torch.accelerator.is_available() and current_platform.is_pin_memory_available())


def _batch_operator() -> Callable[..., None] | None:
    """The engine's operator, or None if this build of vLLM has none.

    Raises:
        ConfigError: vLLM's operators cannot be loaded at all.
    """
    try:
        from vllm import _custom_ops  # noqa: PLC0415 - loading it has side effects
    except ImportError as error:
        raise ConfigError(f"vLLM's operators cannot be loaded: {error}") from error
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):  # noqa: SLF001 - its public name
        _LOG.warning(
            "this build of vLLM has no batched copy (swap_blocks_batch): KV cache is copied piece "
            "by piece, which is slower"
        )
        return None
    operator: Callable[..., None] = _custom_ops.swap_blocks_batch
    return operator
