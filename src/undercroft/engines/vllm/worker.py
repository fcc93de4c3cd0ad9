"""The worker of one rank on the CPU platform: copies between engine blocks and host slots.

All copies run on one thread, see `mover`; the engine's thread only hands over jobs. Compute is
synchronous on this platform, so a submitted store finds its bytes written, and nobody writes the
targets of a submitted load. A load that fails is tried once more, chunk by chunk and page by page;
what a failure then means, see `slot_worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from undercroft.clock import Clock, SystemClock
from undercroft.engines.vllm.copy import Span, copy_pages, copy_pages_singly
from undercroft.engines.vllm.mover import Mover
from undercroft.engines.vllm.slot_worker import (
    SHUTDOWN_S,
    NotLoaded,
    Reports,
    SlotWorker,
    absolute_geometries,
    writable_bytes,
)
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.errors import LayoutMismatch
from undercroft.layout.plan import BlockPlaces, GroupGeometry, Offsets, TensorGeometry

__all__ = ["SHUTDOWN_S", "CpuWorker"]

_Copy: TypeAlias = Callable[[Span, Offsets, Span, Offsets, int], Iterator[int]]


class CpuWorker(SlotWorker):
    """Copies KV between this rank's engine blocks and the host slots in `region`.

    Args:
        kv_caches: The engine's tensors, in host memory, and the pages of each group.
        region: The host slots, `(region_bytes,)` contiguous writable bytes.
        groups: The stored layout of each group.
        report_failed: As `Reports.failed`; called by the mover.
        report_partial: As `Reports.partial`; called by the mover.
        clock: Times the copies, and how often a failure is told.

    Raises:
        LayoutMismatch: Tensors that are not plain host memory, refs that do not fit them, or a
            region that cannot be written.

    Threads: the engine's thread calls; nothing but `wait` and `shutdown` blocks.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        region: NDArray[np.uint8] | memoryview,
        groups: Sequence[GroupGeometry],
        report_failed: Callable[[int], None],
        report_partial: Callable[[int, int, int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._engine, tensors = _engine_span(kv_caches.tensors)
        slots = writable_bytes(region)
        self._region = Span.of(slots)
        clock = clock or SystemClock()
        reports = Reports(report_failed, report_partial)
        super().__init__(groups, tensors, slots, Mover(clock), reports, clock)

    @override
    def _let_go(self) -> None:
        super()._let_go()
        self._region = self._engine = Span.of(np.zeros(0, np.uint8))

    @override
    def _store_steps(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        for group, places, num_missing in self._store_parts(spec, slots):
            self._zero(group, int(places.slot_offsets[0]), num_missing)
            for pages in self._pages(group, places, is_store=True):
                yield from copy_pages(
                    self._region, pages.region, self._engine, pages.engine, pages.page_bytes
                )

    @override
    def _load_steps(self, job_id: int, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        try:
            yield from self._load_with(copy_pages, self._load_parts(spec, slots))
        except Exception:  # noqa: BLE001 - any failure of the fast way: try the plain one
            self._log.warning(
                "load job %d failed, trying again page by page", job_id, with_traceback=True
            )
            yield from self._load_chunk_by_chunk(spec, slots)

    def _load_chunk_by_chunk(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        """The plain way: what fails is named, and keeps nothing else from being copied."""
        failed: dict[int, Exception] = {}
        for group, places in self._load_parts(spec, slots):
            for offset in dict.fromkeys(places.slot_offsets.tolist()):
                of_chunk = places.slot_offsets == offset
                chunk = BlockPlaces(*(values[of_chunk] for values in places))
                try:
                    yield from self._load_with(copy_pages_singly, iter([(group, chunk)]))
                except Exception as error:  # noqa: BLE001 - whatever it is: one chunk is lost
                    failed[offset] = error
        if failed:
            first = next(iter(failed.values()))
            raise NotLoaded(failed, len(slots.offsets), first) from first

    def _load_with(
        self, copy: _Copy, parts: Iterator[tuple[GroupGeometry, BlockPlaces]]
    ) -> Iterator[int]:
        for group, places in parts:
            for pages in self._pages(group, places):
                yield from copy(
                    self._engine, pages.engine, self._region, pages.region, pages.page_bytes
                )


def _engine_span(
    tensors: list[CanonicalKVCacheTensor],
) -> tuple[Span, tuple[TensorGeometry, ...]]:
    """One stretch of addresses over all tensors, and where each tensor is in it."""
    for index, cache in enumerate(tensors):
        if cache.tensor.device.type != "cpu":
            raise LayoutMismatch(
                f"KV tensor {index} is on {cache.tensor.device}: this worker copies on the CPU "
                "platform only"
            )
    found = absolute_geometries(tensors)
    start = min(item.base_bytes for item in found)
    end = max(
        item.base_bytes + (item.num_blocks - 1) * item.block_stride_bytes + item.row_bytes
        for item in found
    )
    span = Span(start, end - start, (cache.tensor for cache in tensors))
    return span, tuple(item._replace(base_bytes=item.base_bytes - start) for item in found)
