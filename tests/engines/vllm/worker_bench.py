"""A worker of either kind over fresh caches and a region."""

from typing import Any

import numpy as np
from kv_fixtures import kv_caches
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from undercroft.clock import SystemClock
from undercroft.engines.vllm.device_worker import DeviceWorker
from undercroft.engines.vllm.rank_layout import direct_groups
from undercroft.engines.vllm.slot_worker import Reports
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.engines.vllm.worker import CpuWorker
from undercroft.testing.fake_device import FakeDevice, StepClock

OS_PAGE = 4096


class Bench:
    """A worker over fresh caches and a region, with what it reported."""

    def __init__(
        self,
        kind: Any = "overlaid",
        bpc: Any = 1,
        num_slots: Any = 40,
        *,
        partial: Any = True,
        on: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.caches = kv_caches(kind)
        self.bpc = bpc
        groups = direct_groups(self.caches, bpc)
        self.payload = tuple(group.payload_bytes for group in groups)
        self.slot_bytes = -(-max(self.payload) // OS_PAGE) * OS_PAGE
        self.region = np.full(self.slot_bytes * num_slots, 0xAA, np.uint8)
        self.failed, self.partial = [], []
        told = (lambda *what: self.partial.append(what)) if partial else None
        self.device = FakeDevice(seed, max_steps=40, piece_bytes=3 * OS_PAGE + 17)
        self.worker: Any = (
            CpuWorker(
                self.caches,
                region=self.region,
                groups=groups,
                report_failed=self.failed.append,
                report_partial=told,
                clock=SystemClock(),
            )
            if on == "cpu"
            else DeviceWorker(
                self.caches,
                region=self.region,
                groups=groups,
                device=self.device,
                reports=Reports(self.failed.append, told),
                clock=StepClock(self.device),
            )
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()

    def slots(self, *indices: Any, store_id: Any = 0) -> Any:
        """A `SlotSpec` from one list of slot numbers per group."""
        groups = [list(group) for group in indices]
        groups += [[]] * (len(self.payload) - len(groups))
        flat = [index * self.slot_bytes for group in groups for index in group]
        return SlotSpec(flat, [len(group) for group in groups], store_id)

    def blocks(self, *groups: Any, first: Any = ()) -> Any:
        """The engine's spec from one list of block ids per group."""
        filled = [list(group) for group in groups]
        filled += [[]] * (len(self.payload) - len(filled))
        firsts = list(first) + [0] * (len(filled) - len(first))
        flat = [block for group in filled for block in group]
        return GPULoadStoreSpec(flat, [len(group) for group in filled], firsts)

    def chunk(self, group: Any, slot: Any) -> Any:
        return self.region[slot * self.slot_bytes :][: self.payload[group]]

    def finish(self, *job_ids: Any) -> Any:
        self.worker.wait(set(job_ids))
        return self.worker.get_finished()
