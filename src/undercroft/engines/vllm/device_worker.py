"""The worker of one rank on an accelerator: copies between its blocks and host slots.

The engine's thread puts the copies into streams of the device, see `device_mover`; what a failure
means, see `slot_worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from undercroft.clock import Clock, SystemClock
from undercroft.engines.accelerator.descriptors import copies
from undercroft.engines.accelerator.device import Device
from undercroft.engines.accelerator.device_mover import BATCH_COPIES, DeviceMover, DeviceWork
from undercroft.engines.vllm.slot_worker import (
    Reports,
    SlotWorker,
    absolute_geometries,
    writable_bytes,
)
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.layout.plan import BlockPlaces, GroupGeometry

__all__ = ["DeviceWorker"]

_PLANNED_PAGES = 1 << 14  # at a time: a few hundred microseconds of planning


class DeviceWorker(SlotWorker):
    """Copies KV between this rank's blocks on a device and the host slots in `region`.

    Args:
        kv_caches: The engine's tensors, and the pages of each group.
        region: The host slots, `(region_bytes,)` contiguous writable bytes.
        groups: The stored layout of each group.
        device: Where the tensors are; closed with the worker.
        reports: Whom to tell about failures.
        clock: Deadlines, and how often a failure is told.

    Raises:
        LayoutMismatch: Refs that do not fit their tensors, or a region that cannot be written.

    Threads: the engine's thread calls; nothing but `wait` and `shutdown` blocks.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        region: NDArray[np.uint8] | memoryview,
        groups: Sequence[GroupGeometry],
        device: Device,
        reports: Reports,
        clock: Clock | None = None,
    ) -> None:
        tensors = absolute_geometries(kv_caches.tensors)
        slots = writable_bytes(region)
        clock = clock or SystemClock()
        mover = DeviceMover(device, clock, region_address=slots.ctypes.data)
        super().__init__(groups, tensors, slots, mover, reports, clock)
        self._device = device
        self._owners = [cache.tensor for cache in kv_caches.tensors]

    @override
    def _let_go(self) -> None:
        if self._device.close():
            super()._let_go()
            self._owners = []

    @override
    def _store_steps(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[DeviceWork]:
        for group, places, num_missing in self._store_parts(spec, slots):
            if num_missing:
                yield partial(self._zero, group, int(places.slot_offsets[0]), num_missing)
            yield from self._copies(group, places, is_store=True)

    @override
    def _load_steps(
        self, job_id: int, spec: GPULoadStoreSpec, slots: SlotSpec
    ) -> Iterator[DeviceWork]:
        for group, places in self._load_parts(spec, slots):
            yield from self._copies(group, places)

    def _copies(
        self, group: GroupGeometry, places: BlockPlaces, *, is_store: bool = False
    ) -> Iterator[DeviceWork]:
        bpc = group.blocks_per_chunk
        step = max(1, _PLANNED_PAGES // (group.num_pieces * bpc)) * bpc
        for first in range(0, len(places.block_ids), step):
            some = BlockPlaces(*(values[first : first + step] for values in places))
            for pages in self._pages(group, some, is_store=is_store):
                yield from copies(
                    pages, piece_bytes=self._device.piece_bytes, max_copies=BATCH_COPIES
                )
