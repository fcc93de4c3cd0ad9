"""The worker of one rank on the CPU platform: copies between engine blocks and host slots.

All copies run on one thread, see `mover`; the engine's thread only hands over jobs. Compute is
synchronous on this platform, so a submitted store finds its bytes written, and nobody writes the
targets of a submitted load.

Failures. The engine has no word for a failed job: it asserts success. A store that fails is
acknowledged, and reported through `report_failed`, so that its chunks are never served. A load that
fails is tried once more, chunk by chunk and page by page; the blocks of a chunk that fails again
hold nobody knows what. Whoever sets `tells_failed_loads` asks for them after each `get_finished`,
and keeps the engine from computing on them; otherwise `get_finished` raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from undercroft.clock import Clock, SystemClock
from undercroft.engines.vllm.copy import Span, copy_pages, copy_pages_singly
from undercroft.engines.vllm.mover import Job, Mover
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.errors import Bug, KvError, LayoutMismatch
from undercroft.layout.plan import (
    BlockPlaces,
    GroupGeometry,
    Offsets,
    PageRef,
    TensorGeometry,
    fragments,
    pair_load,
    pair_store,
    place,
)
from undercroft.log import SparingLog

__all__ = ["SHUTDOWN_S", "CpuWorker", "chunk_payload_bytes", "group_geometries"]

SHUTDOWN_S = 3.0
"""The longest that `CpuWorker.shutdown` waits for the running copy."""

_NULL_BLOCK_ID = 0

_Copy: TypeAlias = Callable[[Span, Offsets, Span, Offsets, int], Iterator[int]]

_LOG = logging.getLogger(__name__)


def group_geometries(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int
) -> tuple[GroupGeometry, ...]:
    """The stored layout of each group's chunks on this rank.

    Raises:
        LayoutMismatch: A ref to a page that its tensor does not have.
    """
    groups = []
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            row_bytes = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if ref.page_size_bytes > row_bytes:
                raise LayoutMismatch(
                    f"a page of {ref.page_size_bytes} bytes in rows of {row_bytes} bytes"
                )
        pages = tuple(PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs)
        groups.append(GroupGeometry(pages, blocks_per_chunk))
    return tuple(groups)


def chunk_payload_bytes(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> tuple[int, ...]:
    """Bytes of one chunk of each group on this rank, without slot padding."""
    return tuple(group.payload_bytes for group in group_geometries(kv_caches, blocks_per_chunk))


class _NotLoaded(KvError):
    """Some chunks of a load could not be copied; the others were."""

    def __init__(self, slots: Collection[int], num_chunks: int, first: Exception) -> None:
        super().__init__(f"{len(slots)} of {num_chunks} chunks were not copied; first: {first}")
        self.slots = tuple(slots)
        self.first = first


class CpuWorker(OffloadingWorker):  # type: ignore[misc] # untyped here
    """Copies KV between this rank's engine blocks and the host slots in `region`.

    Args:
        kv_caches: The engine's tensors, in host memory, and the pages of each group.
        region: The host slots, `(region_bytes,)` contiguous writable bytes.
        blocks_per_chunk: Blocks in a chunk, for every group.
        report_failed: Told the `store_id` of a store whose chunks must never be served. Called
            by the mover, before the job is reported as finished.
        report_partial: Told `(store_id, chunk_index, num_unwritten)`, before the job is reported
            as finished, when the first `num_unwritten` blocks of the chunk `chunk_index` (in the
            order of the job's keys) were not there to be stored. All blocks of the chunk: nothing
            was written. Fewer: the rest is written, and the missing pages hold zeros; such a chunk
            may only be served to those who never ask for its first blocks (recurrent state).
            None: a store with such a chunk is reported as failed as a whole.
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
        blocks_per_chunk: int,
        report_failed: Callable[[int], None],
        report_partial: Callable[[int, int, int], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._groups = group_geometries(kv_caches, blocks_per_chunk)
        self._engine, self._tensors = _engine_span(kv_caches.tensors)
        slots = np.frombuffer(region, np.uint8)
        if not slots.flags.writeable:
            raise LayoutMismatch("the region is read-only; map it writable")
        self._region = Span.of(slots)
        self._report_failed = report_failed
        self._report_partial = report_partial
        self.tells_failed_loads = False
        """Whether the caller takes the failed loads; see the module."""
        self._failed_loads: dict[int, tuple[int, ...]] = {}
        clock = clock or SystemClock()
        self._log = SparingLog(_LOG, clock)
        self._mover = Mover(clock)

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        slots = _slots(job_id, dst_spec)
        self._mover.submit(
            Job(
                job_id=job_id,
                is_store=True,
                blocks=frozenset(src_spec.block_ids.tolist()),
                slots=frozenset(slots.offsets.tolist()),
                steps=lambda: self._store_steps(src_spec, slots),
                on_failure=lambda error: self._store_failed(slots.store_id, error),
            )
        )
        return True

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        slots = _slots(job_id, src_spec)
        self._mover.submit(
            Job(
                job_id=job_id,
                is_store=False,
                blocks=frozenset(dst_spec.block_ids.tolist()) - {_NULL_BLOCK_ID},
                slots=frozenset(slots.offsets.tolist()),
                steps=lambda: self._load_steps(job_id, dst_spec, slots),
                on_failure=lambda error: _LOG.error("load job %d failed: %s", job_id, error),
            )
        )
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        finished = self._mover.take_finished()
        for index, job in enumerate(finished):
            if job.error is None or job.is_store:
                continue
            if not self.tells_failed_loads:
                self._mover.give_back(finished[:index] + finished[index + 1 :])
                raise KvError(
                    f"load job {job.job_id} of {len(job.slots)} chunks could not be copied "
                    f"into engine blocks: {job.error}. The engine cannot be told that a load "
                    "failed, and must not compute on its blocks: restart it, and report this"
                ) from (job.error.first if isinstance(job.error, _NotLoaded) else job.error)
            failed = job.error.slots if isinstance(job.error, _NotLoaded) else tuple(job.slots)
            self._failed_loads[job.job_id] = failed
        return [
            TransferResult(
                job_id=job.job_id,
                success=True,
                transfer_size=job.num_bytes,
                transfer_time=job.seconds,
            )
            for job in finished
        ]

    def take_failed_loads(self) -> dict[int, tuple[int, ...]]:
        """Loads that the last `get_finished` gave although they failed, each exactly once.

        Returns:
            By job, the offsets of the slots whose chunks are not in the engine's blocks.
        """
        failed, self._failed_loads = self._failed_loads, {}
        return failed

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._mover.wait(job_ids)

    @override
    def shutdown(self) -> None:
        """Stop copying, within `SHUTDOWN_S`; stores not done are reported as failed."""
        if not self._mover.close(SHUTDOWN_S):
            _LOG.warning("a copy of KV cache did not end within %.0f s of shutdown", SHUTDOWN_S)
            return
        # The mappings can only be closed once nobody views them.
        self._region = self._engine = Span.of(np.zeros(0, np.uint8))

    def _store_failed(self, store_id: int, error: Exception) -> None:
        self._log.warning("store %d failed, its chunks are dropped: %s", store_id, error)
        try:
            self._report_failed(store_id)
        except Exception:  # noqa: BLE001 - the callable is not ours; the engine must not see it
            self._log.warning(
                "store %d could not be reported as failed", store_id, with_traceback=True
            )

    def _store_steps(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        if not np.all(spec.block_ids):
            raise Bug(f"block {_NULL_BLOCK_ID} is nobody's, and was to be stored")
        first_chunk = 0
        for part in self._parts(spec, slots):
            num_chunks, bpc = len(part.slot_offsets), part.group.blocks_per_chunk
            position = pair_store(len(part.block_ids), part.first_index, num_chunks, bpc)
            if position is None:
                for index in range(first_chunk, first_chunk + num_chunks):
                    self._tell_partial(slots.store_id, index, bpc)
            elif num_chunks:
                if position:
                    self._tell_partial(slots.store_id, first_chunk, position)
                    self._zero(part.group, int(part.slot_offsets[0]), position)
                places = place(part.block_ids, part.slot_offsets, position, bpc)
                for pages in fragments(part.group, self._tensors, places, self._region.num_bytes):
                    yield from copy_pages(
                        self._region, pages.region, self._engine, pages.engine, pages.page_bytes
                    )
            first_chunk += num_chunks

    def _tell_partial(self, store_id: int, chunk_index: int, num_unwritten: int) -> None:
        if self._report_partial is None:
            raise KvError(f"{num_unwritten} blocks of its chunk {chunk_index} are not there")
        self._report_partial(store_id, chunk_index, num_unwritten)

    def _zero(self, group: GroupGeometry, slot_offset: int, num_positions: int) -> None:
        if slot_offset < 0 or slot_offset + group.payload_bytes > self._region.num_bytes:
            raise Bug(f"a slot at {slot_offset} of a region of {self._region.num_bytes} bytes")
        region = np.frombuffer(self._region.buffer, np.uint8)
        for offset, length in group.unwritten_ranges(slot_offset, num_positions):
            region[offset : offset + length] = 0

    def _load_steps(self, job_id: int, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        try:
            yield from self._load_with(copy_pages, self._load_places(spec, slots))
        except Exception:  # noqa: BLE001 - any failure of the fast way: try the plain one
            self._log.warning(
                "load job %d failed, trying again page by page", job_id, with_traceback=True
            )
            yield from self._load_chunk_by_chunk(spec, slots)

    def _load_chunk_by_chunk(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[int]:
        """The plain way: what fails is named, and keeps nothing else from being copied."""
        failed: dict[int, Exception] = {}
        for group, places in self._load_places(spec, slots):
            for offset in dict.fromkeys(places.slot_offsets.tolist()):
                of_chunk = places.slot_offsets == offset
                chunk = BlockPlaces(*(values[of_chunk] for values in places))
                try:
                    yield from self._load_with(copy_pages_singly, iter([(group, chunk)]))
                except Exception as error:  # noqa: BLE001 - whatever it is: one chunk is lost
                    failed[offset] = error
        if failed:
            first = next(iter(failed.values()))
            raise _NotLoaded(failed, len(slots.offsets), first) from first

    def _load_places(
        self, spec: GPULoadStoreSpec, slots: SlotSpec
    ) -> Iterator[tuple[GroupGeometry, BlockPlaces]]:
        for part in self._parts(spec, slots):
            bpc = part.group.blocks_per_chunk
            position = pair_load(len(part.block_ids), part.first_index, len(part.slot_offsets), bpc)
            places = place(part.block_ids, part.slot_offsets, position, bpc)
            # The null block stands for blocks that this request never reads.
            real = part.block_ids != _NULL_BLOCK_ID
            yield part.group, BlockPlaces(*(values[real] for values in places))

    def _load_with(
        self, copy: _Copy, groups: Iterator[tuple[GroupGeometry, BlockPlaces]]
    ) -> Iterator[int]:
        for group, places in groups:
            for pages in fragments(group, self._tensors, places, self._region.num_bytes):
                yield from copy(
                    self._engine, pages.engine, self._region, pages.region, pages.page_bytes
                )

    def _parts(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> list[_Part]:
        counts = (len(self._groups), len(spec.group_sizes), len(slots.group_chunks))
        if len(set(counts)) != 1:
            raise Bug(f"groups here, in the engine's spec, in the slots': {counts}")
        block_ids = np.asarray(spec.block_ids, np.int64)
        parts, block, chunk = [], 0, 0
        for index, group in enumerate(self._groups):
            block_end = block + int(spec.group_sizes[index])
            chunk_end = chunk + slots.group_chunks[index]
            parts.append(
                _Part(
                    group,
                    block_ids[block:block_end],
                    int(spec.block_indices[index]),
                    slots.offsets[chunk:chunk_end],
                )
            )
            block, chunk = block_end, chunk_end
        return parts


class _Part(NamedTuple):
    """The blocks and slots of one group in a job."""

    group: GroupGeometry
    block_ids: Offsets
    first_index: int
    slot_offsets: Offsets


def _slots(job_id: int, spec: LoadStoreSpec) -> SlotSpec:
    if not isinstance(spec, SlotSpec):
        raise Bug(f"job {job_id} names its slots by a {type(spec).__name__}, not a SlotSpec")
    return spec


def _engine_span(
    tensors: list[CanonicalKVCacheTensor],
) -> tuple[Span, tuple[TensorGeometry, ...]]:
    """One stretch of addresses over all tensors, and where each tensor is in it."""
    found: list[tuple[int, TensorGeometry]] = []
    for index, cache in enumerate(tensors):
        tensor = cache.tensor
        if tensor.device.type != "cpu":
            raise LayoutMismatch(
                f"KV tensor {index} is on {tensor.device}: this version copies on the CPU platform "
                "only; run without this connector there"
            )
        num_blocks, item_bytes = int(tensor.shape[0]), tensor.element_size()
        if not num_blocks or not tensor[0].is_contiguous():
            raise LayoutMismatch(f"KV tensor {index} of shape {tuple(tensor.shape)} has no rows")
        stride_bytes = int(tensor.stride(0)) * item_bytes
        row_bytes = tensor[0].numel() * item_bytes
        if cache.page_size_bytes > row_bytes or stride_bytes < row_bytes:
            raise LayoutMismatch(
                f"KV tensor {index}: pages of {cache.page_size_bytes} bytes in rows of "
                f"{row_bytes} bytes, {stride_bytes} bytes apart"
            )
        geometry = TensorGeometry(0, stride_bytes, num_blocks, row_bytes)
        found.append((tensor.data_ptr(), geometry))
    start = min(address for address, _ in found)
    end = max(
        address + (item.num_blocks - 1) * item.block_stride_bytes + item.row_bytes
        for address, item in found
    )
    span = Span(start, end - start, (cache.tensor for cache in tensors))
    return span, tuple(item._replace(base_bytes=address - start) for address, item in found)
