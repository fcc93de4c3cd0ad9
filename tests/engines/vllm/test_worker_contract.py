"""The worker against the engine's own scheduler and worker objects.

`OffloadingConnectorScheduler` decides which blocks belong to which keys; its block tables say what
every position of every chunk must hold. Only the requests and the manager are stand-ins.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_fixtures import NUM_BLOCKS, block_bytes, chunk_page, kv_caches, scramble
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadingKVEventsConfig,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.request import RequestStatus

from undercroft.engines.vllm.device_worker import DeviceWorker
from undercroft.engines.vllm.rank_layout import direct_groups
from undercroft.engines.vllm.slot_worker import Reports
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.engines.vllm.worker import CpuWorker
from undercroft.testing.fake_device import FakeDevice, StepClock

TOKENS_PER_BLOCK = 16
NUM_SLOTS = 64


class Manager:
    """Gives out slots in any order, stores any subset of an offer, and remembers what it said."""

    def __init__(self, slot_bytes: int, num_groups: int, rng: np.random.Generator) -> None:
        self.slot_bytes, self.num_groups, self.rng = slot_bytes, num_groups, rng
        self.free = rng.permutation(NUM_SLOTS).tolist()
        self.slot_of: dict[bytes, int] = {}
        self.stored: list[list[bytes]] = []
        self.keep = 1.0

    def on_new_request(self, _: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)

    def _spec(self, keys: list[bytes], store_id: int) -> SlotSpec:
        groups = [int.from_bytes(key[-4:], "big") for key in keys]
        assert groups == sorted(groups)
        return SlotSpec(
            [self.slot_of[key] * self.slot_bytes for key in keys],
            [groups.count(group) for group in range(self.num_groups)],
            store_id,
        )

    def prepare_store(self, keys: Any, _: Any) -> PrepareStoreOutput:
        taken = [key for key in keys if self.rng.random() < self.keep]
        for key in taken:
            self.slot_of[key] = self.free.pop()
        self.stored.append(taken)
        return PrepareStoreOutput(taken, self._spec(taken, len(self.stored)), [])

    def prepare_load(self, keys: Any, _: Any) -> SlotSpec:
        return self._spec(list(keys), 0)


def _scheduler(bpc: int, manager: Manager) -> OffloadingConnectorScheduler:
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, **shape)
    window = SlidingWindowSpec(block_size=TOKENS_PER_BLOCK, sliding_window=64, **shape)
    kinds = [full, window][: manager.num_groups] + [full] * (manager.num_groups - 2)
    groups = [
        SimpleNamespace(group_id=index, tokens_per_block=TOKENS_PER_BLOCK)
        for index in range(manager.num_groups)
    ]
    spec = SimpleNamespace(
        config=SimpleNamespace(groups=groups),
        blocks_per_chunk=bpc,
        tokens_per_block=tuple(group.tokens_per_block for group in groups),
        tokens_per_hash=TOKENS_PER_BLOCK,
        offload_prompt_only=False,
        kv_events_config=OffloadingKVEventsConfig(False, False),
        get_manager=lambda: manager,
    )
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{i}"], kind) for i, kind in enumerate(kinds)]
    )
    return OffloadingConnectorScheduler(spec, vllm_config, kv_cache_config)


def _request(num_blocks: int) -> Any:
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=None,
        kv_hints=None,
        block_hashes=[index.to_bytes(32, "big") for index in range(num_blocks)],
        num_tokens=num_blocks * TOKENS_PER_BLOCK,
        num_prompt_tokens=num_blocks * TOKENS_PER_BLOCK,
        num_computed_tokens=0,
        shared_prefix_boundary=None,
        skip_reading_prefix_cache=False,
        status=RequestStatus.RUNNING,
        is_finished=lambda: False,
    )


class Rig:
    """Scheduler, manager and worker over one set of caches."""

    def __init__(self, bpc: int, num_blocks: int, seed: int) -> None:
        self.bpc, self.rng = bpc, np.random.default_rng(seed)
        self.caches = kv_caches("overlaid")
        self.num_groups = len(self.caches.group_data_refs)
        stored = direct_groups(self.caches, bpc)
        self.payload = tuple(group.payload_bytes for group in stored)
        self.slot_bytes = -(-max(self.payload) // 4096) * 4096
        self.region = np.full(NUM_SLOTS * self.slot_bytes, 0xAA, np.uint8)
        self.manager = Manager(self.slot_bytes, self.num_groups, self.rng)
        self.scheduler = _scheduler(bpc, self.manager)
        self.request = _request(num_blocks)
        self.failed: list[int] = []
        self.partial: dict[tuple[int, int], int] = {}
        self.worker = CpuWorker(
            self.caches,
            region=self.region,
            groups=stored,
            report_failed=self.failed.append,
            report_partial=lambda *what: self.partial.update({what[:2]: what[2]}),
        )
        self.scheduler.on_new_request(self.request)
        self.status = self.scheduler._req_status["r"]
        self.status.update_offload_keys()

    def store(self, tables: list[list[int]]) -> list[bytes]:
        """One step's store of whole block tables; the keys that were stored."""
        for state, table in zip(self.status.group_states, tables, strict=True):
            state.block_ids[:] = table
        output = SimpleNamespace(
            num_scheduled_tokens={"r": self.request.num_tokens}, finished_req_ids=()
        )
        jobs = self.scheduler._build_store_jobs(output)
        for job_id, job in jobs.items():
            self.worker.submit_store(job_id, job.src_spec, job.dst_spec)
        self.worker.wait(set(jobs))
        assert {result.job_id for result in self.worker.get_finished()} == set(jobs)
        self.status.transfer_jobs.clear()
        return self.manager.stored[-1] if jobs else []

    def place(self, key: bytes) -> tuple[int, int]:
        """Group and chunk index of a key."""
        group = int.from_bytes(key[-4:], "big")
        return group, self.status.group_states[group].offload_keys.index(key)

    def page(self, key: bytes, position: int) -> list[bytes]:
        group, _ = self.place(key)
        start = self.manager.slot_of[key] * self.slot_bytes
        chunk = self.region[start : start + self.payload[group]]
        return chunk_page(self.caches, group, chunk, position, self.bpc)


@st.composite
def _tables(draw: Any) -> Any:
    """Blocks per chunk, number of chunks, and which blocks of the window group are gone."""
    bpc, num_chunks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["anywhere", "front", "anywhere", "none"]))
    count = bpc * num_chunks
    if kind == "front":
        gone = [index < draw(st.shared(st.integers(0, count), key="n")) for index in range(count)]
    elif kind == "anywhere":
        gone = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    else:
        gone = [False] * count
    return bpc, num_chunks, gone, draw(st.sampled_from([1.0, 0.6])), draw(st.integers(0, 2**32))


@settings(max_examples=150, deadline=None)
@given(_tables())
def test_every_stored_page_is_the_block_the_scheduler_meant(case: Any) -> None:
    """Every chunk not reported holds, at every position, the block of the scheduler's table.

    A chunk reported as lacking its first blocks holds zeros there and the right blocks after.
    Nothing but a chunk with missing blocks, or one after it in its group, is ever reported.
    """
    bpc, num_chunks, gone, keep, seed = case
    rig = Rig(bpc, bpc * num_chunks, seed)
    try:
        rig.manager.keep = keep
        ids = iter((rig.rng.permutation(NUM_BLOCKS - 1) + 1).tolist())
        tables = [[next(ids) for _ in gone] for _ in range(rig.num_groups)]
        tables[1] = [0 if lost else block for block, lost in zip(tables[1], gone, strict=True)]
        keys = rig.store(tables)
        assert rig.failed == []
        for index, key in enumerate(keys):
            group, chunk = rig.place(key)
            unwritten = rig.partial.get((1, index), 0)
            blocks = tables[group][chunk * bpc : (chunk + 1) * bpc]
            if unwritten:
                assert group == 1
                assert any(gone)
            for position, block in enumerate(blocks):
                if unwritten == bpc:
                    assert all(set(page) == {0xAA} for page in rig.page(key, position))
                elif position < unwritten:
                    assert block == 0
                    assert not any(any(page) for page in rig.page(key, position))
                else:
                    assert rig.page(key, position) == block_bytes(rig.caches, group, block)
    finally:
        rig.worker.shutdown()


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_every_loaded_block_gets_the_page_the_scheduler_meant(
    bpc: int, num_chunks: int, data: Any
) -> None:
    """From any local hit, to a hit that may end inside a chunk, with a window at the end."""
    count = bpc * num_chunks
    rig = Rig(bpc, count, data.draw(st.integers(0, 2**32)))
    try:
        ids = iter((rig.rng.permutation(NUM_BLOCKS - 1) + 1).tolist())
        tables = [[next(ids) for _ in range(count)] for _ in range(rig.num_groups)]
        keys = rig.store(tables)
        # The scheduler leaves out what no later hit could reach.
        have = set(map(rig.place, keys))
        wanted = [[block_bytes(rig.caches, g, b) for b in t] for g, t in enumerate(tables)]

        scramble(rig.caches, 99)
        local = data.draw(st.integers(0, count - 1))
        end_tokens = data.draw(st.integers(local * TOKENS_PER_BLOCK + 1, count * TOKENS_PER_BLOCK))
        end = -(-end_tokens // TOKENS_PER_BLOCK)
        window_start = max(local, (max(0, end_tokens - 63)) // TOKENS_PER_BLOCK)
        rig.status.num_locally_computed_tokens = local * TOKENS_PER_BLOCK
        starts = [local, window_start, local]
        for group, start in enumerate(starts):
            chunks = range(start // bpc, -(-end // bpc))
            if not all((group, chunk) in have for chunk in chunks):
                return  # the scheduler would not have found a hit
        ids = iter((rig.rng.permutation(NUM_BLOCKS - 1) + 1).tolist())
        targets = []
        for start in starts:
            fresh = [
                SimpleNamespace(block_id=next(ids), is_null=False, block_hash=None)
                if index >= start
                else SimpleNamespace(block_id=0, is_null=True, block_hash=None)
                for index in range(end)
            ]
            for block in fresh[:local]:
                block.block_hash = b"cached"
            targets.append(fresh)
        rig.scheduler.update_state_after_alloc(
            rig.request,
            SimpleNamespace(blocks=targets),
            end_tokens - local * TOKENS_PER_BLOCK,
        )
        ((job_id, job),) = rig.scheduler._current_batch_load_jobs.items()
        rig.worker.submit_load(job_id, job.src_spec, job.dst_spec)
        rig.worker.wait({job_id})
        assert [result.job_id for result in rig.worker.get_finished()] == [job_id]
        for group, start in enumerate(starts):
            for index in range(start, end):
                got = block_bytes(rig.caches, group, targets[group][index].block_id)
                assert got == wanted[group][index]
    finally:
        rig.worker.shutdown()


def _on_cpu(kv: Any, region: Any, failed: Any) -> Any:
    return CpuWorker(kv, region=region, groups=direct_groups(kv, 2), report_failed=failed)


def _on_device(kv: Any, region: Any, failed: Any) -> Any:
    device = FakeDevice(5, max_steps=20)
    return DeviceWorker(
        kv,
        region=region,
        groups=direct_groups(kv, 2),
        device=device,
        reports=Reports(failed),
        clock=StepClock(device),
    )


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("make", [_on_cpu, _on_device])
def test_it_serves_the_engines_own_connector_worker(make: Any, waits: bool) -> None:
    """Deferred store, flush, load, completion: as the engine's worker object drives them."""
    caches = kv_caches("padded")
    region = np.zeros(1 << 20, np.uint8)
    failed: list[int] = []
    spec = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
        get_worker=lambda kv: make(kv, region, failed.append),
    )
    connector = OffloadingConnectorWorker(spec, SimpleNamespace(), SimpleNamespace())
    connector._init_worker(caches)
    wanted = [block_bytes(caches, 1, block) for block in (4, 5)]

    def meta(**what: Any) -> OffloadingConnectorMetadata:
        return OffloadingConnectorMetadata(
            **{"load_jobs": {}, "store_jobs": {}, "jobs_to_flush": None, **what}
        )

    stores = {
        0: TransferJob("a", GPULoadStoreSpec([4, 5], [0, 2, 0], [0, 0, 0]), _slots([8192], 1, 71)),
        1: TransferJob("b", GPULoadStoreSpec([6], [1, 0, 0], [3, 0, 0]), _slots([16384], 0, 72)),
    }
    connector.prepare_store_kv(meta(store_jobs=stores))
    assert connector.get_finished(set()) == (set(), set())  # not submitted before the next step
    connector.handle_preemptions(meta(jobs_to_flush={0, 1, 17} if waits else None))
    if waits:
        scramble(caches, 8)  # the engine may reuse the blocks now
    else:
        connector.worker.wait({0})
        scramble(caches, 8)
    load = TransferJob("c", _slots([8192], 1), GPULoadStoreSpec([40, 41], [0, 2, 0], [0, 0, 0]))
    connector.start_kv_transfers(meta(load_jobs={2: load}))
    done: set[str] = set()
    acknowledged: dict[int, int] = {}
    connector.worker.wait({0, 1, 2})
    for _ in range(3):
        sending, receiving = connector.get_finished(set())
        assert not sending
        done |= receiving
        if (worker_meta := connector.build_connector_worker_meta()) is not None:
            assert not acknowledged.keys() & worker_meta.completed_jobs.keys()
            acknowledged |= worker_meta.completed_jobs
    assert done == {"c"}
    assert acknowledged == {0: 1, 1: 1, 2: 1}
    assert [block_bytes(caches, 1, block) for block in (40, 41)] == wanted
    assert failed == [72]  # job 1 lacks its chunk's first block, and nobody takes partial chunks
    connector.shutdown()


def _slots(offsets: list[int], group: int, store_id: int = 0) -> SlotSpec:
    return SlotSpec(
        offsets, [len(offsets) if index == group else 0 for index in range(3)], store_id
    )
