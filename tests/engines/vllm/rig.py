"""A small engine around the real vLLM connector: no model, real requests, real bytes.

`OffloadingConnector` is built in both of its roles, from a configuration that vLLM itself
translates (`build_offloading_config`), so the spec, its region, its worker and its manager are met
as in serving. The rig schedules as vLLM's scheduler does, with a block pool that hands freed blocks
out again at once, and "computes" bytes that follow from a block's tokens; every load is compared.
"""

import hashlib
import importlib
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from shapes import ONE_GROUP, OURS, TOKENS_PER_BLOCK, engine_config, kv_cache_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing the engine makes torch warn about itself
    _connector = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    )

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from undercroft.clock import SystemClock

NULL = KVCacheBlock(block_id=0, is_null=True)


@dataclass
class Job:
    """One request and where the engine keeps its blocks, per group."""

    request: Any
    blocks: list[list[KVCacheBlock]]
    version: int
    num_hit_tokens: int | None = None
    num_asked: int = 0
    num_failed: int = 0
    loading: bool = False
    started: bool = False
    resumed: bool = False
    num_decoded: int = 0
    num_done: int = 0


class Rig:
    """One engine replica; `step` does what one engine step does, in vLLM's order."""

    def __init__(
        self,
        extra: Any,
        *,
        groups: Any = ONE_GROUP,
        num_blocks: int = 256,
        tokens_per_step: int = 1 << 20,
        version: int = 0,
        events: bool = False,
        layout: str = "LBHNC",
        connector: Any = None,
        current: Any = None,
        **changes: Any,
    ) -> None:
        init_none_hash(sha256)
        self.groups, self.version, self.tokens_per_step = tuple(groups), version, tokens_per_step
        self.kept = [g for g, group in enumerate(self.groups) if group.kept]
        self.cache = kv_cache_config(self.groups, num_blocks, layout)
        if events:
            changes["kv_events_config"] = SimpleNamespace(enable_kv_cache_events=True)
        changes.setdefault("cache_config__kv_cache_layout", layout)
        if extra.get("tiers"):  # a busy machine must make nothing late
            patience = {"promote_deadline_s": 60.0, "drain_deadline_s": 20.0}
            extra = {**patience, "load_only_if_faster": False, **extra}
        self.config = engine_config({**OURS, **extra}, **changes)
        self.tensors = {
            f"g{g}.layer{i}": torch.zeros(
                (num_blocks, 1, TOKENS_PER_BLOCK, 2 * group.head_size), dtype=torch.float32
            )
            for g, group in enumerate(self.groups)
            if group.kept
            for i in range(group.num_layers)
        }
        make = connector or _connector.OffloadingConnector
        self.on_worker = make(self.config, KVConnectorRole.WORKER, self.cache)
        self.on_scheduler: Any = None
        try:
            with set_current_vllm_config(current or self.config):  # as vLLM's worker does
                self.on_worker.register_kv_caches(self.tensors)
            self.on_scheduler = make(self.config, KVConnectorRole.SCHEDULER, self.cache)
        except BaseException:
            self.close()
            raise
        self.hasher = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)
        self.free = [KVCacheBlock(block_id=i) for i in range(num_blocks - 1, 0, -1)]
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.finished: list[str] = []
        self.preempted: set[str] = set()
        self.events: list[Any] = []
        self.stats: list[Any] = []
        self.metas: list[Any] = []
        self.new_blocks: list[int] = []
        self.num_loads_checked = 0
        self.hold_acks = False
        self.during: Any = None
        """Called once, while the workers run the next step: aborts come then, too."""
        self._acks: list[Any] = []
        self._orphans: dict[str, Job] = {}
        self._count = 0

    @property
    def manager(self) -> Any:
        """Ours."""
        return self.on_scheduler.connector_scheduler.manager

    def host_keys(self) -> list[bytes]:
        """Every key in host memory."""
        return [key for key, _slot in self.hierarchy.pool.keys()]  # noqa: SIM118 - no mapping

    @property
    def hierarchy(self) -> Any:
        """Below the manager."""
        return self.manager.hierarchy

    def submit(
        self, tokens: Any, *, num_decode: int = 0, adapter: Any = None, **params: Any
    ) -> Job:
        """Queue a prompt; `params` become its `kv_transfer_params`."""
        self._count += 1
        sampling = SamplingParams(max_tokens=max(1, num_decode))
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            f"{self.config.kv_transfer_config.engine_id}-{self._count}",
            list(tokens),
            sampling,
            None,
            lora_request=adapter,
            block_hasher=self.hasher,
        )
        job = Job(request, [[] for _ in self.groups], self.version)
        job.num_decoded = num_decode
        self.on_scheduler.on_new_request(request)
        self.waiting.append(job)
        return job

    def abort(self, job: Job) -> None:
        """The client went away."""
        job.request.status = RequestStatus.FINISHED_ABORTED
        self._finish(job)

    def preempt(self, job: Job) -> None:
        """Take a running job's blocks away; it starts again when there is room."""
        self.running.remove(job)
        self._drop_blocks(job)
        job.blocks = [[] for _ in self.groups]
        job.num_hit_tokens, job.num_done, job.resumed = None, 0, job.started
        job.request.status, job.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.preempted.add(job.request.request_id)
        self.waiting.append(job)

    def run(self, tokens: Any, *, max_steps: int = 400, **kwargs: Any) -> Job:
        """Submit one prompt and step until nothing is under way any more."""
        job = self.submit(tokens, **kwargs)
        self.settle(max_steps)
        assert job.num_hit_tokens is not None, f"no answer after {max_steps} steps"
        return job

    def settle(self, max_steps: int = 400) -> int:
        """Step until idle, as an engine with pending connector work does; the number of steps."""
        for count in range(max_steps):
            busy = self.waiting or self.running or self.finished
            if not busy and not self.on_scheduler.has_pending_push_work():
                return count
            self.step()
            if count >= 200:
                time.sleep(0.02)  # a busy machine runs the movers late
        return max_steps

    def await_movers(self) -> None:
        """Until no level has anything queued or under way; the next step books what came of it."""
        for level in self.hierarchy.levels:
            assert level.transfers.drain(SystemClock().now_s() + 60)

    # --- one step -----------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, move, compute, acknowledge."""
        self.new_blocks = []
        if not self.preempted:
            self._admit()
        output = self._schedule()
        meta = self.on_scheduler.build_connector_meta(output)
        self.metas.append(meta)
        self.finished, self.preempted = [], set()
        worker = self.on_worker
        worker.bind_connector_metadata(meta)
        worker.handle_preemptions(meta)
        self._scramble(self.new_blocks)
        worker.start_load_kv(None)
        for job in self.running:
            self._compute(job, output.num_scheduled_tokens.get(job.request.request_id, 0))
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        acks = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self._acks.append(
            KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=acks,
            )
        )
        during, self.during = self.during, None
        if during is not None:
            during()
        for held in [] if self.hold_acks else self._take_acks():
            self.on_scheduler.update_connector_output(held)
            self._fail(held.failed_recving)
            self._loaded(held.finished_recving - held.failed_recving)
        stats = self.on_scheduler.get_kv_connector_stats()
        if stats is not None:
            self.stats.append(stats)
        self.events.extend(self.on_scheduler.take_events())
        for job in list(self.running):
            if job.num_done >= job.request.num_tokens and not job.num_decoded:
                job.request.status = RequestStatus.FINISHED_STOPPED
                self._finish(job)
        if self.waiting or self.on_scheduler.has_pending_push_work():
            time.sleep(0.001)

    def _take_acks(self) -> list[Any]:
        acks, self._acks = self._acks, []
        return acks

    def _admit(self) -> None:
        for job in list(self.waiting):
            request = job.request
            if job.loading or (job.num_hit_tokens is None and not self._has_room(job)):
                continue
            if job.num_hit_tokens is None:
                job.num_asked += 1
                hit, _ = self.on_scheduler.get_num_new_matched_tokens(request, 0)
                if hit is None:
                    continue
                job.num_hit_tokens = hit
                if hit:
                    self._load(job, hit)
                    continue
            self.waiting.remove(job)
            self.running.append(job)
            request.status = RequestStatus.RUNNING

    def _has_room(self, job: Job) -> bool:
        """Whether the pool can serve `job` to its end beside those that have begun."""
        begun = [other for other in (*self.running, *self.waiting) if any(other.blocks)]
        lacking = [
            len(self.kept) * -(-(other.request.num_tokens + other.num_decoded) // TOKENS_PER_BLOCK)
            - sum(map(len, other.blocks))
            for other in {id(other): other for other in (*self.running, *begun, job)}.values()
        ]
        return sum(lacking) <= len(self.free)

    def _load(self, job: Job, num_tokens: int) -> None:
        for g, group in enumerate(self.groups):
            need = -(-num_tokens // TOKENS_PER_BLOCK) if group.kept else 0
            skipped = 0
            if group.window is not None:
                skipped = max(0, num_tokens - group.window + 1) // TOKENS_PER_BLOCK
            job.blocks[g] = [NULL] * min(skipped, need) + self._take(max(0, need - skipped))
        blocks = KVCacheBlocks(tuple(job.blocks))
        self.on_scheduler.update_state_after_alloc(job.request, blocks, num_tokens)
        job.loading = True
        job.request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        # vLLM computes the last token of a full hit again.
        job.num_done = min(num_tokens, job.request.num_tokens - 1)
        job.request.num_computed_tokens = job.num_done

    def _loaded(self, received: Any) -> None:
        for job in list(self.waiting):
            if job.loading and job.request.request_id in received:
                job.loading = False
                self._check(job)
        for request_id in received - {job.request.request_id for job in self.waiting}:
            self._drop_blocks(self._orphans.pop(request_id))

    def _fail(self, failed: Any) -> None:
        """What vLLM does with `kv_load_failure_policy: recompute`: from the start, blocks anew."""
        for job in self.waiting:
            if job.loading and job.request.request_id in failed:
                self._drop_blocks(job)
                job.blocks = [[] for _ in self.groups]
                job.loading, job.num_hit_tokens, job.num_done = False, None, 0
                job.num_failed += 1
                job.request.status, job.request.num_computed_tokens = RequestStatus.WAITING, 0
        for request_id in failed & self._orphans.keys():
            self._drop_blocks(self._orphans.pop(request_id))

    def _take(self, count: int) -> list[KVCacheBlock]:
        assert count <= len(self.free), "the rig is out of engine blocks"
        taken = [self.free.pop() for _ in range(count)]
        self.new_blocks += [block.block_id for block in taken]
        return taken

    def _schedule(self) -> SchedulerOutput:
        new, cached, counts = [], CachedRequestData.make_empty(), {}
        for job in self.running:
            request = job.request
            if job.num_done >= request.num_tokens and job.num_decoded:
                request.append_output_token_ids(7000 + job.num_decoded)
                job.num_decoded -= 1
            count = min(self.tokens_per_step, request.num_tokens - job.num_done)
            if count <= 0:
                continue
            request.num_computed_tokens = job.num_done
            fresh = []
            for g, group in enumerate(self.groups):
                need = -(-(job.num_done + count) // TOKENS_PER_BLOCK) if group.kept else 0
                taken = self._take(max(0, need - len(job.blocks[g])))
                job.blocks[g] = job.blocks[g] + taken
                fresh.append([block.block_id for block in taken])
            whole = tuple([block.block_id for block in blocks] for blocks in job.blocks)
            if not job.started:
                job.started = True
                new.append(NewRequestData.from_request(request, whole))
            else:
                cached.req_ids.append(request.request_id)
                if job.resumed:
                    cached.resumed_req_ids.add(request.request_id)
                    fresh, job.resumed = list(whole), False
                cached.new_block_ids.append(tuple(fresh) if any(fresh) else None)
                cached.num_computed_tokens.append(job.num_done)
            counts[request.request_id] = count
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0] * len(self.groups),
            finished_req_ids=set(self.finished),
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.preempted,
        )

    def _finish(self, job: Job) -> None:
        for queue in (self.waiting, self.running):
            if job in queue:
                queue.remove(job)
        self.on_scheduler.request_finished_all_groups(job.request, ())
        self.finished.append(job.request.request_id)
        if job.loading:  # the engine frees these when the load has arrived
            self._orphans[job.request.request_id] = job
        else:
            self._drop_blocks(job)

    def _drop_blocks(self, job: Job) -> None:
        for blocks in job.blocks:
            self.free += [block for block in reversed(blocks) if not block.is_null]

    # --- bytes --------------------------------------------------------------------------------

    def _content(self, job: Job, layer: str, index: int) -> np.ndarray:
        tokens = job.request.all_token_ids[: (index + 1) * TOKENS_PER_BLOCK]
        label = f"{job.version}:{layer}:{list(tokens)}".encode()
        seed = np.frombuffer(hashlib.sha256(label).digest(), np.uint64)
        size = self.tensors[layer][0].numel() * 4
        return np.random.default_rng(seed).integers(0, 256, size, np.uint8)

    def _layers(self, g: int) -> list[str]:
        return [f"g{g}.layer{i}" for i in range(self.groups[g].num_layers)]

    def _row(self, layer: str, block_id: int) -> np.ndarray:
        return self.tensors[layer][block_id].numpy().reshape(-1).view(np.uint8)

    def _compute(self, job: Job, count: int) -> None:
        first = job.num_done // TOKENS_PER_BLOCK
        job.num_done += count
        for g in self.kept:
            for index in range(first, job.num_done // TOKENS_PER_BLOCK):
                block = job.blocks[g][index]
                if not block.is_null:
                    for layer in self._layers(g):
                        self._row(layer, block.block_id)[:] = self._content(job, layer, index)

    def _scramble(self, block_ids: Any) -> None:
        rng = np.random.default_rng(len(self.metas))
        for g in self.kept:
            for layer in self._layers(g):
                for block_id in block_ids:
                    self._row(layer, block_id)[:] = rng.integers(0, 256, 1, np.uint8)

    def _check(self, job: Job) -> None:
        """Every block that was loaded holds the bytes that were computed for its tokens."""
        assert job.num_hit_tokens
        for g in self.kept:
            for index in range(job.num_hit_tokens // TOKENS_PER_BLOCK):
                block = job.blocks[g][index]
                if block.is_null:
                    continue
                for layer in self._layers(g):
                    assert np.array_equal(
                        self._row(layer, block.block_id), self._content(job, layer, index)
                    ), f"{job.request.request_id}: wrong bytes in {layer}, block {index}"
        self.num_loads_checked += 1

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """As vLLM stops: the scheduler's side, then the worker's."""
        if self.on_scheduler is not None:
            self.on_scheduler.shutdown()
        self.on_worker.shutdown()


@contextmanager
def running(*args: Any, **kwargs: Any) -> Any:
    """A rig that is closed at the end."""
    rig = Rig(*args, **kwargs)
    try:
        yield rig
    finally:
        rig.close()
