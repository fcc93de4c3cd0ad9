"""What the scheduler side tells the worker about host slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override
from vllm.v1.kv_offload.base import LoadStoreSpec

from undercroft.errors import Bug

__all__ = ["SlotSpec"]


class SlotSpec(LoadStoreSpec):  # type: ignore[misc] # untyped here
    """The slots of one job, in the order of its keys: group by group, chunks in order.

    Args:
        offsets: `(num_chunks,)`, byte offset in the region of each chunk's slot on this rank.
        group_chunks: Chunks per group, for every group, 0 included; their sum is `num_chunks`.
        store_id: Names the job when a store has to be reported as failed; 0 for loads.

    Raises:
        Bug: The counts do not add up.
    """

    def __init__(self, offsets: ArrayLike, group_chunks: Sequence[int], store_id: int = 0) -> None:
        self.offsets: NDArray[np.int64] = np.array(offsets, np.int64)
        self.group_chunks = tuple(group_chunks)
        self.store_id = store_id
        if self.offsets.shape != (sum(self.group_chunks),):
            raise Bug(f"{self.offsets.shape} offsets for chunks per group {self.group_chunks}")

    @override
    def __repr__(self) -> str:
        return (
            f"SlotSpec(num_chunks={len(self.offsets)}, group_chunks={self.group_chunks}, "
            f"store_id={self.store_id})"
        )
