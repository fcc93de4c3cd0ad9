"""Which worker copies on which platform. The one place that decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import CanonicalKVCaches

from undercroft.clock import Clock
from undercroft.engines.accelerator.numa import nodes_of_devices, place_near
from undercroft.engines.accelerator.pinning import HostMemory, Pinning
from undercroft.engines.accelerator.torch_device import DEVICE_TYPES, TorchDevice, bind_thread
from undercroft.engines.vllm.device_worker import DeviceWorker
from undercroft.engines.vllm.operators import EngineRegistrar, operators_for
from undercroft.engines.vllm.slot_worker import Reports, SlotWorker, writable_bytes
from undercroft.engines.vllm.worker import CpuWorker
from undercroft.errors import ConfigError
from undercroft.layout.plan import GroupGeometry

__all__ = ["Platform"]


@dataclass(frozen=True, slots=True)
class Platform:
    """Where this rank's KV cache is.

    Args:
        device: The accelerator; None: host memory.
        nodes: The memory nodes near it; empty if not known, or all the same.
    """

    device: torch.device | None
    nodes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, kv_caches: CanonicalKVCaches, *, num_ranks: int) -> Platform:
        """The platform of these tensors.

        Raises:
            ConfigError: One that is not served; the message says what is.
        """
        devices = {cache.tensor.device for cache in kv_caches.tensors}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "nowhere"
            raise ConfigError(f"the KV cache of one rank is on {names}; it must be on one device")
        (device,) = devices
        if device.type == "cpu":
            return cls(None)
        if device.type not in DEVICE_TYPES:
            raise ConfigError(
                f"the KV cache is on {device}: Undercroft copies on CUDA, ROCm, XPU and the CPU "
                "platform; on this one run without it"
            )
        return cls(device, nodes_of_devices(device, num_ranks))

    def make_worker(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        region: NDArray[np.uint8] | memoryview,
        ready_bytes: Callable[[], int],
        groups: Sequence[GroupGeometry],
        reports: Reports,
        clock: Clock,
    ) -> SlotWorker:
        """The worker of this rank.

        Args:
            kv_caches: The engine's tensors, and the pages of each group.
            region: The host slots.
            ready_bytes: How much of the region, from its start, exists by now.
            groups: The stored layout of each group.
            reports: Whom to tell about failures.
            clock: Source of time.

        Raises:
            LayoutMismatch: The tensors or the region do not fit.
            ConfigError: vLLM's operators cannot be loaded.
        """
        if self.device is None:
            return CpuWorker(
                kv_caches,
                region=region,
                groups=groups,
                report_failed=reports.failed,
                report_partial=reports.partial,
                clock=clock,
            )
        slots = writable_bytes(region)
        place_near(slots.ctypes.data, slots.nbytes, self.nodes)
        pages = {pieces.piece_bytes for group in groups for pieces in group.pieces}
        pinning = Pinning(
            _registrar(),
            memory=HostMemory(slots.ctypes.data, slots.nbytes, ready_bytes),
            bind_thread=partial(bind_thread, self.device),
            clock=clock,
        )
        try:
            device = TorchDevice(
                self.device,
                tensors=[cache.tensor for cache in kv_caches.tensors],
                region=slots,
                operators=operators_for(self.device, pages),
                pinning=pinning,
            )
            return DeviceWorker(
                kv_caches,
                region=slots,
                groups=groups,
                device=device,
                reports=reports,
                clock=clock,
            )
        except BaseException:
            pinning.close()
            raise


def _registrar() -> EngineRegistrar | None:
    try:
        return EngineRegistrar()
    except ImportError:
        return None
