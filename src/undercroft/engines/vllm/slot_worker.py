"""What the workers of all platforms share: which pages a job moves, and what a failure means.

Failures. The engine has no word for a failed job: it asserts success. A store that fails is
acknowledged, and reported through `report_failed`, so that its chunks are never served. The blocks
of a load that fails hold nobody knows what. Whoever sets `tells_failed_loads` asks for them after
each `get_finished`, and keeps the engine from computing on them; otherwise `get_finished` raises.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from undercroft.clock import Clock
from undercroft.engines.jobs import Job
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.errors import Bug, KvError, LayoutMismatch
from undercroft.layout.plan import (
    BlockPlaces,
    Fragments,
    GroupGeometry,
    Offsets,
    TensorGeometry,
    fragments,
    pair_load,
    pair_store,
    place,
)
from undercroft.log import SparingLog

__all__ = [
    "SHUTDOWN_S",
    "AnyMover",
    "NotLoaded",
    "Reports",
    "SlotWorker",
    "absolute_geometries",
    "writable_bytes",
]

SHUTDOWN_S = 3.0
"""The longest that `shutdown` waits for the running copies."""

_NULL_BLOCK_ID = 0
_TURNS = 1 << 32

_LOG = logging.getLogger(__name__)


def absolute_geometries(tensors: list[CanonicalKVCacheTensor]) -> tuple[TensorGeometry, ...]:
    """Where each tensor is, `base_bytes` being its address.

    Raises:
        LayoutMismatch: A tensor without rows, or with rows too short for its pages.
    """
    found = []
    for index, cache in enumerate(tensors):
        tensor = cache.tensor
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
        found.append(TensorGeometry(tensor.data_ptr(), stride_bytes, num_blocks, row_bytes))
    return tuple(found)


def writable_bytes(region: NDArray[np.uint8] | memoryview) -> NDArray[np.uint8]:
    """The region as an array.

    Raises:
        LayoutMismatch: It cannot be written.
    """
    slots = np.frombuffer(region, np.uint8)
    if not slots.flags.writeable:
        raise LayoutMismatch("the region is read-only; map it writable")
    return slots


class NotLoaded(KvError):
    """Some chunks of a load could not be copied; the others were."""

    def __init__(self, slots: Collection[int], num_chunks: int, first: Exception) -> None:
        super().__init__(f"{len(slots)} of {num_chunks} chunks were not copied; first: {first}")
        self.slots = tuple(slots)
        self.first = first


class AnyMover(Protocol):
    """Does the jobs of a worker; see `mover.Mover` and `device_mover.DeviceMover`."""

    def submit(self, job: Job[Any]) -> None:
        """Take the job; never waits for a copy."""
        ...

    def take_finished(self) -> list[Job[Any]]:
        """The jobs that ended since the last call, each exactly once."""
        ...

    def give_back(self, jobs: list[Job[Any]]) -> None:
        """Let the next `take_finished` return these again, first."""
        ...

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until none of these jobs is under way; unknown ids are fine."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop; False if a copy did not end in time."""
        ...


class Reports(NamedTuple):
    """Whom a worker tells what the engine has no words for.

    Args:
        failed: Told the `store_id` of a store whose chunks must never be served. Called before the
            job is reported as finished.
        partial: Told `(store_id, chunk_index, num_unwritten)`, before the job is reported as
            finished, when the first `num_unwritten` blocks of the chunk `chunk_index` (in the
            order of the job's keys) were not there to be stored. All blocks of the chunk: nothing
            was written. Fewer: the rest is written, and the missing pages hold zeros; such a chunk
            may only be served to those who never ask for its first blocks (recurrent state).
            None: a store with such a chunk is reported as failed as a whole.
    """

    failed: Callable[[int], None]
    partial: Callable[[int, int, int], None] | None = None


class SlotWorker(OffloadingWorker):  # type: ignore[misc] # untyped here
    """Copies KV between this rank's engine blocks and the host slots.

    Args:
        groups: The stored layout of each group.
        tensors: Where the engine's tensors are.
        region: The host slots, `(region_bytes,)`.
        mover: Does the copies.
        reports: Whom to tell about failures.
        clock: How often a failure is told.

    Threads: the engine's thread calls; nothing but `wait` and `shutdown` blocks.
    """

    def __init__(
        self,
        groups: Sequence[GroupGeometry],
        tensors: Sequence[TensorGeometry],
        region: NDArray[np.uint8],
        mover: AnyMover,
        reports: Reports,
        clock: Clock,
    ) -> None:
        self._groups = tuple(groups)
        self._tensors = tuple(tensors)
        self._slots = region
        self._mover = mover
        self._reports = reports
        self._log = SparingLog(_LOG, clock)
        self.tells_failed_loads = False
        """Whether the caller takes the failed loads; see the module."""
        self._failed_loads: dict[int, tuple[int, ...]] = {}

    def sit_at(self, offsets: Sequence[int]) -> None:
        """Say where in the slots of each group this rank's part begins, before the first job."""
        self._groups = tuple(
            replace(group, offset_bytes=offset)
            for group, offset in zip(self._groups, offsets, strict=True)
        )

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
                on_failure=lambda error: self._log.warning("load job %d failed: %s", job_id, error),
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
                ) from (job.error.first if isinstance(job.error, NotLoaded) else job.error)
            failed = job.error.slots if isinstance(job.error, NotLoaded) else tuple(job.slots)
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
        if self._mover.close(SHUTDOWN_S):
            self._let_go()
        else:
            _LOG.warning("a copy of KV cache did not end within %.0f s of shutdown", SHUTDOWN_S)

    def _let_go(self) -> None:
        """Drop all views: the mappings can only be closed once nobody has any."""
        self._slots = np.zeros(0, np.uint8)

    @abstractmethod
    def _store_steps(self, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[Any]:
        """What the mover does for a store."""

    @abstractmethod
    def _load_steps(self, job_id: int, spec: GPULoadStoreSpec, slots: SlotSpec) -> Iterator[Any]:
        """What the mover does for a load."""

    def _store_failed(self, store_id: int, error: Exception) -> None:
        self._log.warning("store %d failed, its chunks are dropped: %s", store_id, error)
        try:
            self._reports.failed(store_id)
        except Exception:  # noqa: BLE001 - the callable is not ours; the engine must not see it
            self._log.warning(
                "store %d could not be reported as failed", store_id, with_traceback=True
            )

    def _store_parts(
        self, spec: GPULoadStoreSpec, slots: SlotSpec
    ) -> Iterator[tuple[GroupGeometry, BlockPlaces, int]]:
        """Of each group with something to copy: which blocks, and how many before them are missing.

        The places of the missing ones, in the first chunk, are to be zero.
        """
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
                # Every rank sees the store's number and the order of its chunks alike.
                turn = slots.store_id % _TURNS + first_chunk
                places = place(part.block_ids, part.slot_offsets, position, bpc, turn)
                yield part.group, places, position
            first_chunk += num_chunks

    def _tell_partial(self, store_id: int, chunk_index: int, num_unwritten: int) -> None:
        if self._reports.partial is None:
            raise KvError(f"{num_unwritten} blocks of its chunk {chunk_index} are not there")
        self._reports.partial(store_id, chunk_index, num_unwritten)

    def _zero(self, group: GroupGeometry, slot_offset: int, num_positions: int) -> None:
        """Clear the first blocks of a slot."""
        end = slot_offset + group.offset_bytes + group.payload_bytes
        if slot_offset < 0 or end > self._slots.nbytes:
            raise Bug(f"a slot at {slot_offset} of a region of {self._slots.nbytes} bytes")
        for offset, length in group.unwritten_ranges(slot_offset, num_positions):
            self._slots[offset : offset + length] = 0

    def _load_parts(
        self, spec: GPULoadStoreSpec, slots: SlotSpec
    ) -> Iterator[tuple[GroupGeometry, BlockPlaces]]:
        """Of each group, where to and from."""
        for part in self._parts(spec, slots):
            bpc = part.group.blocks_per_chunk
            position = pair_load(len(part.block_ids), part.first_index, len(part.slot_offsets), bpc)
            places = place(part.block_ids, part.slot_offsets, position, bpc)
            # The null block stands for blocks that this request never reads.
            real = part.block_ids != _NULL_BLOCK_ID
            yield part.group, BlockPlaces(*(values[real] for values in places))

    def _pages(
        self, group: GroupGeometry, places: BlockPlaces, *, is_store: bool = False
    ) -> list[Fragments]:
        return fragments(group, self._tensors, places, self._slots.nbytes, is_store=is_store)

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
