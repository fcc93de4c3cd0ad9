"""What vLLM loads instead of its own `OffloadingConnector`: `kv_connector: UndercroftConnector`.

Everything but three things is inherited. The content of LoRA adapters goes into the keys. A load
that fails is recomputed: the worker names the chunks, the scheduler drops them and asks again. And
requests that queue behind others have their chunks read from lower levels meanwhile.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from undercroft.engines.vllm.adapters import Adapters
from undercroft.engines.vllm.connected import ConnectedManager, ConnectedSpec
from undercroft.engines.vllm.seen_pages import seen_pages
from undercroft.errors import ConfigError, KvError

__all__ = ["UndercroftConnector"]

_LOG = logging.getLogger(__name__)

_PLAIN = "UndercroftSpec"
_MAX_FAILED_LOADS = 3
"""Loads of one request that may fail before it is computed without another try: from host memory,
from below, and of the rest."""
_LEAST_PROMPT_TOKENS = 16
_MAX_HASHES_A_STEP = 1024
"""Of queued requests, after which no further one is looked at in the same step: 1-2 ms."""
_MAX_LOOKED_AHEAD = 4
"""Queued requests, from the head of the queue on, whose chunks are read ahead."""


@dataclass
class _WorkerReport(OffloadingWorkerMetadata):  # type: ignore[misc] # untyped here
    """Stock's, and by request the slots whose chunks are not in the engine's blocks."""

    failed_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        both = super().aggregate(other)
        failed = dict(self.failed_loads)
        for request_id, offsets in getattr(other, "failed_loads", {}).items():
            failed[request_id] = (*failed.get(request_id, ()), *offsets)
        return _WorkerReport(both.completed_jobs, both.transfer_stats, failed)


def _filled_in(config: VllmConfig) -> VllmConfig:
    """A shallow copy of the engine's configuration that names our spec.

    Raises:
        ConfigError: The user named another spec.
    """
    transfer = copy.copy(config.kv_transfer_config)
    given = dict(transfer.kv_connector_extra_config)
    if given.get("spec_name", _PLAIN) not in (_PLAIN, ConnectedSpec.__name__):
        raise ConfigError(
            f"spec_name is {given['spec_name']!r}, but UndercroftConnector brings its own: leave "
            "spec_name and spec_module_path out"
        )
    given |= {"spec_name": ConnectedSpec.__name__, "spec_module_path": ConnectedSpec.__module__}
    transfer.kv_connector_extra_config = given
    filled = copy.copy(config)
    filled.kv_transfer_config = transfer
    return filled


def _prompts_in(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Of each request that computes many tokens in a step: the first of them, and how many.

    Few may be a decode, speculative tokens included. O(1) for a step that only decodes.
    """
    num_tokens = output.num_scheduled_tokens
    if output.total_num_scheduled_tokens < len(num_tokens) + _LEAST_PROMPT_TOKENS:
        return []
    cached = output.scheduled_cached_reqs
    firsts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    firsts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return [
        (firsts.get(request_id, 0), count)
        for request_id, count in num_tokens.items()
        if count >= _LEAST_PROMPT_TOKENS
    ]


class UndercroftConnector(OffloadingConnector):  # type: ignore[misc] # untyped here
    """Names Undercroft to vLLM: `kv_connector`; settings are in `kv_connector_extra_config`.

    Raises:
        ConfigError: The settings or the engine's configuration cannot work; one line says why.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role == KVConnectorRole.SCHEDULER:
            # The scheduler reads it after it has made its connector. Its default would end a
            # request with an error when a load fails.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        super().__init__(_filled_in(vllm_config), role, kv_cache_config)
        # The worker's side.
        self._load_requests: dict[int, str] = {}
        self._failed_loads: dict[str, tuple[int, ...]] = {}
        # The scheduler's side.
        self._adapters = Adapters(os.environ)
        self._num_failed_loads: Counter[str] = Counter()
        self._queued: dict[str, Request] = {}
        self._looked_ahead: set[str] = set()
        self._looks_ahead = True
        self._sees_steps = True

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return super().build_prom_metrics(
            _filled_in(vllm_config), metric_types, labelnames, per_engine_labelvalues
        )

    # --- a worker: its tensors ----------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker = self.connector_worker
        worker.spec.seen = seen_pages(worker.vllm_config, worker.kv_cache_config, kv_caches)
        super().register_kv_caches(kv_caches)

    # --- a worker: which loads failed ---------------------------------------------------------

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, OffloadingConnectorMetadata):
            self._load_requests |= {id_: job.req_id for id_, job in metadata.load_jobs.items()}
        super().start_load_kv(forward_context, **kwargs)

    def _take_finished(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = super().get_finished(finished_req_ids)
        failed = {
            self._load_requests[job_id]: offsets
            for job_id, offsets in self.connector_worker.worker.take_failed_loads().items()
        }
        self._failed_loads |= failed
        if received:
            left = self._load_requests.items()
            self._load_requests = {id_: req_id for id_, req_id in left if req_id not in received}
        return KVConnectorTransferResults(sent, received, set(failed))

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._take_finished(finished_req_ids)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self._take_finished(finished_req_ids)
        if results.failed_recving:
            raise KvError(
                f"the loads of {sorted(results.failed_recving)} failed, and this engine does not "
                "ask which did: it must not compute on their blocks; restart it, and report this"
            )
        return results.finished_sending, results.finished_recving

    @override
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        # Also when nothing failed: the first rank's report adds up those of the others.
        failed, self._failed_loads = self._failed_loads, {}
        return _WorkerReport(meta.completed_jobs, meta.transfer_stats, failed)

    # --- the scheduler ------------------------------------------------------------------------

    @property
    def _manager(self) -> ConnectedManager:
        manager: ConnectedManager = self.scheduler.manager
        return manager

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, _WorkerReport):
            for request_id, offsets in report.failed_loads.items():
                self._manager.fail_load(request_id, frozenset(offsets))
        # Once a load, when its last rank has ended, though several may have failed at it.
        self._num_failed_loads.update(connector_output.failed_recving)
        super().update_connector_output(connector_output)

    @override
    def on_new_request(self, request: Request) -> None:
        adapter = request.lora_request
        if adapter is not None:
            tag = self._adapters.tag(adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
            self._manager.tag_next(request.request_id, tag)
        super().on_new_request(request)
        self._manager.prompt_came(request)
        self._queued[request.request_id] = request

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._leave_queue(request)
        answer: tuple[int | None, bool]
        if self._num_failed_loads.get(request.request_id, 0) < _MAX_FAILED_LOADS:
            answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        else:
            # The base has books to keep; in no tokens it finds nothing.
            answer = self.scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens=0
            )
        return answer

    @override
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request)
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return] # untyped here

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return] # untyped here

    def _forget(self, request: Request) -> None:
        self._manager.ends(request)
        self._leave_queue(request)
        self._num_failed_loads.pop(request.request_id, None)

    def _leave_queue(self, request: Request) -> None:
        if self._queued.pop(request.request_id, None) is not None:
            self._looked_ahead.discard(request.request_id)

    @override
    def reset_cache(self) -> bool | None:
        # Of a reset since the last step, whose jobs the next one is to flush: vLLM 0.32 asserts
        # that there was none, though a reset may well follow a sleep or another reset.
        to_flush: set[int] = getattr(self.scheduler, "_current_batch_jobs_to_flush", set())
        held = set(to_flush)
        to_flush.clear()
        try:
            done: bool | None = super().reset_cache()
        finally:
            to_flush |= held
        return done

    # --- looking ahead ------------------------------------------------------------------------

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # Whom this step's pass over the queue has not reached waits behind others.
        if self._queued and self._looks_ahead:
            try:
                self._look_ahead()
            except Exception:  # noqa: BLE001 - engine internals are read here, and they move
                self._looks_ahead = False
                _LOG.exception("fault while looking ahead; this engine does so no more")
        meta = super().build_connector_meta(self._without_loading(scheduler_output))
        if self._sees_steps:
            try:
                self._manager.step_computes(_prompts_in(scheduler_output))
            except Exception:  # noqa: BLE001 - as above
                self._sees_steps = False
                _LOG.exception("fault while looking at a step; its prefill speed is not known")
        return meta

    def _without_loading(self, output: SchedulerOutput) -> SchedulerOutput:
        """`output`, in which no request that loads counts as preempted.

        A reset of vLLM's own cache may preempt all that runs. The next step asks for their chunks
        and then asserts, at the cost of the engine, that the preempted ones have only stores.
        """
        loading = self._manager.hierarchy.loads.requests.keys()
        preempted = output.preempted_req_ids
        if not preempted or loading.isdisjoint(preempted):
            return output
        return dataclasses.replace(output, preempted_req_ids=preempted - loading)

    def _look_ahead(self) -> None:
        """Have the chunks of queued requests brought up, once each.

        One walk over a request's keys a step, and more as long as all are short together.
        """
        num_left = _MAX_HASHES_A_STEP
        for request in islice(self._queued.values(), _MAX_LOOKED_AHEAD):
            if request.request_id in self._looked_ahead:
                continue
            self._looked_ahead.add(request.request_id)
            with self._manager.looking_ahead(request.request_id) as can:
                if can and not request.skip_reading_prefix_cache:
                    super().get_num_new_matched_tokens(request, self._num_tokens_here(request))
            num_left -= len(request.block_hashes)
            if num_left <= 0:
                return

    def _num_tokens_here(self, request: Request) -> int:
        """The prefix that the engine's own cache has, in whole blocks; nothing is read for it."""
        if self._kv_cache_manager is None or not self._kv_cache_manager.enable_caching:
            return 0
        _, num_tokens = self._kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )[:2]
        block_tokens: int = self.scheduler.config.kv_group_configs[0].tokens_per_block
        return int(num_tokens) // block_tokens * block_tokens
