"""What vLLM loads: the spec, in all three kinds of its processes.

The API front end only asks for metric definitions, each worker for its mover, the scheduler for the
manager. Nothing is opened before it is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.version import __version__ as vllm_version

from undercroft.clock import SystemClock
from undercroft.config import EngineConfig, from_engine, to_json
from undercroft.engines.accelerator.numa import prefer_nodes
from undercroft.engines.assemble import Geometry, assemble, check_plugins
from undercroft.engines.recording import recorder_for
from undercroft.engines.start_line import start_line
from undercroft.engines.vllm.facts import leave_facts, model_facts, take_facts
from undercroft.engines.vllm.hosts import check_one_host
from undercroft.engines.vllm.log_lines import log_where_vllm_logs
from undercroft.engines.vllm.manager import GROUP_ID_BYTES, UndercroftManager, group_key
from undercroft.engines.vllm.metrics import metric_definitions
from undercroft.engines.vllm.platforms import Platform
from undercroft.engines.vllm.rank_layout import Ranks, rank_layout
from undercroft.engines.vllm.recording import KINDS, Recording
from undercroft.engines.vllm.slot_worker import Reports, SlotWorker
from undercroft.engines.vllm.tally import Tally
from undercroft.engines.vllm.unserved import check_attention
from undercroft.engines.vllm.version import doubt, own_version
from undercroft.errors import ConfigError
from undercroft.hierarchy.hierarchy import Hierarchy, failed_chunk
from undercroft.hierarchy.region import Region, RegionConfig
from undercroft.hierarchy.rendezvous import region_path, sweep_dead_regions
from undercroft.hierarchy.slots import SLOT_ALIGNMENT_BYTES, slot_bytes_for
from undercroft.identity import EngineFacts, key_hash, namespace, weights_fingerprint
from undercroft.keys import ChunkKey, Namespace
from undercroft.layout.page_map import PageMap
from undercroft.settings import check_host_bytes, check_sizes, host_limits, load

__all__ = ["UndercroftSpec"]

_LOG = logging.getLogger(__name__)
_KV_FORMAT = 1
"""Raised when the bytes this adapter stores for a chunk change."""
_SETTLED_EXTRAS = frozenset({"model.max_model_len"})
"""What later versions of vLLM tell and `facts` takes in where it decides bytes."""


class _RegionWorker(OffloadingWorker):  # type: ignore[misc] # untyped here
    """A worker, and this rank's seat in the region, which it leaves last."""

    def __init__(
        self,
        worker: SlotWorker,
        seat: Region,
        join_deadline_s: float,
        offsets: Callable[[Region], Sequence[int]],
    ) -> None:
        self._worker = worker
        self._seat: Region | None = seat
        self._join_deadline_s = join_deadline_s
        self._offsets = offsets
        self._is_seated = False

    def _sit(self) -> None:
        """Before the first byte moves, all are proven to see the same memory.

        The scheduler joins after the workers, and where this rank's bytes go in a slot follows from
        what all ranks said. Once done this costs nothing.
        """
        if self._seat is not None and not self._is_seated:
            self._seat.wait_joined(self._join_deadline_s)
            self._worker.sit_at(self._offsets(self._seat))
            self._is_seated = True

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._sit()
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec))

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._sit()
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec))

    @override
    def get_finished(self) -> list[TransferResult]:
        finished: list[TransferResult] = self._worker.get_finished()
        return finished

    def take_failed_loads(self) -> dict[int, tuple[int, ...]]:
        """See `SlotWorker.take_failed_loads`."""
        return self._worker.take_failed_loads()

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._worker.shutdown()
        if self._seat is not None:
            self._seat.close()
            self._seat = None


def _common(engine: EngineConfig) -> str:
    """The configuration without what differs between the participants of one replica.

    vLLM shows its scheduler one layer of a group for all, and judges the layout by what it shows.
    The ranks see all layers; their judgement is compared in `Ranks.of`.
    """
    config = engine.config
    alike = dataclasses.replace(
        config,
        groups=tuple(dataclasses.replace(group, layer_names=("*",)) for group in config.groups),
        worker_kv_bytes_per_block=1,
        parallel=dataclasses.replace(config.parallel, rank=0, is_parallelism_agnostic=False),
        replicated_layout=False,
    )
    return to_json(EngineConfig(alike, engine.extras))


def _reports(region: Region) -> Reports:
    def partial(store_id: int, chunk_index: int, _num_unwritten: int) -> None:
        region.report_failed_store(failed_chunk(store_id, chunk_index))

    return Reports(region.report_failed_store, partial)


class UndercroftSpec(OffloadingSpec):  # type: ignore[misc] # untyped here
    """Names Undercroft to vLLM: `spec_name` of `kv_connector_extra_config`.

    Raises:
        ConfigError: The settings or the engine's configuration cannot work; one line says why.
    """

    _manager_class: type[UndercroftManager] = UndercroftManager
    _tells_failed_loads = False
    """Whether somebody asks the worker which loads failed; stock's connector does not."""
    seen: Mapping[str, PageMap] = MappingProxyType({})
    """A rank's pages by layer, from `seen_pages`; stock's connector shows no spec its tensors."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        log_where_vllm_logs()
        self._engine = from_engine(config)
        self._settings = load(config.extra_config, environ=os.environ)
        check_plugins(self._settings)
        self.offload_prompt_only = self._settings.offload_prompt_only
        self.kv_events_config = OffloadingKVEventsConfig(
            enable_kv_cache_events=config.enable_kv_cache_events,
            self_describing_kv_events=self._settings.self_describing_kv_events,
        )
        self._clock = SystemClock()
        identity = hashlib.sha256(_common(self._engine).encode())
        self._region_config = RegionConfig(
            engine_id=config.engine_id,
            num_ranks=config.parallel.world_size,
            total_bytes=self._settings.host_bytes // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES,
            identity=identity.digest(),
            version=own_version(),
        )

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    # --- a worker -----------------------------------------------------------------------------

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        check_attention(get_current_vllm_config_or_none())
        config = self._engine.config
        check_one_host(config)
        layout = rank_layout(kv_caches, config, self.seen)
        check_sizes(self._settings, [slot_bytes_for(n) for n in layout.chunk_bytes])
        self._check_room()
        platform = Platform.of(kv_caches, num_ranks=config.parallel.world_size)
        with prefer_nodes(platform.nodes):
            region = Region.join(
                self._region_config,
                role=config.parallel.rank,
                chunk_bytes=layout.chunk_bytes,
                note=layout.note(),
                deadline_s=self._settings.join_deadline_s,
                clock=self._clock,
            )
        try:
            if config.parallel.rank == 0:
                # Stock shows a spec the model's name and dtype only: a rank knows the rest.
                found = model_facts(get_current_vllm_config_or_none(), os.environ)
                leave_facts(region.buffer, found)
            worker = platform.make_worker(
                kv_caches,
                region=region.buffer,
                ready_bytes=region.ready_bytes,
                groups=layout.groups,
                reports=_reports(region),
                clock=self._clock,
            )
        except BaseException:
            region.close()
            raise
        worker.tells_failed_loads = self._tells_failed_loads
        return _RegionWorker(worker, region, self._settings.join_deadline_s, self._offsets)

    def _check_room(self) -> None:
        """Whether the region fits, unless another rank has made it: then it counts as used."""
        region = self._region_config
        # So would what a killed engine left, and keep this one from ever starting.
        sweep_dead_regions(region.directory, keep=Path())
        limits = host_limits()  # first: what is absent afterwards is not in them
        if not region_path(region.directory, region.engine_id).exists():
            check_host_bytes(self._settings.host_bytes, limits)

    def _offsets(self, region: Region) -> list[int]:
        """Of each group, where in a slot this rank's part begins."""
        return [
            share.offsets[self._engine.config.parallel.rank] for share in self._ranks(region).shares
        ]

    def _ranks(self, region: Region) -> Ranks:
        """What all ranks store together."""
        return Ranks.of(self._engine.config, region.notes(), region.chunk_bytes())

    # --- the scheduler ------------------------------------------------------------------------

    @override
    def get_manager(self) -> OffloadingManager:
        settings, config = self._settings, self._engine.config
        if unknown := doubt(vllm_version):
            _LOG.warning("undercroft: %s", unknown)
        for note in settings.notes:
            _LOG.info("%s", note)
        region = Region.join(
            self._region_config,
            role="scheduler",
            deadline_s=settings.join_deadline_s,
            clock=self._clock,
        )
        try:
            region.wait_joined(settings.join_deadline_s)
            ranks = self._ranks(region)
            geometry = self._geometry(ranks)
            check_sizes(settings, [slot_bytes_for(n) for n in geometry.chunk_bytes])
            model = take_facts(region.buffer)
            self._check_sleep(model)
            made = self._namespace(geometry, ranks, model)
            hierarchy = assemble(
                settings,
                geometry,
                namespace=made,
                buffer=region.buffer,
                clock=self._clock,
                num_replicas=config.parallel.data_parallel_size,
                with_events=config.enable_kv_cache_events,
                take_failed_stores=region.take_failed_stores,
                memory=region.memory(),
            )
        except BaseException:
            region.close()
            raise
        if ranks.why:
            _LOG.warning(
                "canonical_layout was asked for, but each rank's pages are stored as they are, and "
                "only engines with the same parallel sizes share them: %s",
                ranks.why,
            )
        _LOG.info(
            "ready: key space %s (engines that share chunks print the same); %s",
            made.id,
            start_line(settings, geometry, hierarchy),
        )
        slots = hierarchy.pool.slots
        return self._manager_class(
            hierarchy,
            group_ids=[group.group_id for group in config.groups],
            close=region.close,
            refresh=lambda: slots.set_ready_bytes(region.ready_bytes()),
            tally=Tally(hierarchy.counters, self._clock, geometry.tokens_per_chunk),
            localities={
                tier.name: Locality(tier.locality) for tier in settings.tiers if tier.locality
            },
            reset_s=settings.drain_deadline_s,
            keeps_across_sleep=settings.keep_across_sleep,
            recording=self._recording(geometry, hierarchy),
            prompts_only=self.offload_prompt_only,
        )

    def _recording(self, geometry: Geometry, hierarchy: Hierarchy) -> Recording | None:
        recorder = recorder_for(
            self._settings,
            geometry.tokens_per_chunk,
            [group_key(group.group_id) for group in self._engine.config.groups],
            clock=self._clock,
            results=hierarchy.counters.recorded_requests,
            kinds=KINDS,
        )
        if recorder is None:
            return None
        recorder.start()
        hierarchy.on_close.append(recorder.close)
        return Recording(recorder)

    def _check_sleep(self, model: Mapping[str, Any]) -> None:
        if not self._settings.keep_across_sleep:
            return
        if "weight_transfer" in model:
            raise ConfigError(
                "keep_across_sleep says that weights stay as they are while the engine is paused, "
                "and --weight-transfer-config that they are replaced: leave one of them out"
            )
        _LOG.info(
            "keep_across_sleep: a sleep or pause drops nothing here; after other weights were "
            "loaded, reset_prefix_cache with reset_connector has to come before requests do"
        )

    def _geometry(self, ranks: Ranks) -> Geometry:
        config = self._engine.config
        index = {group_key(group.group_id): i for i, group in enumerate(config.groups)}

        def group_of(key: ChunkKey) -> int:
            return index[key[-GROUP_ID_BYTES:]]

        return Geometry(
            chunk_bytes=[share.payload_bytes for share in ranks.shares],
            tokens_per_chunk=[
                group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups
            ],
            group_of=group_of,
        )

    def _namespace(self, geometry: Geometry, ranks: Ranks, model: Mapping[str, Any]) -> Namespace:
        config = self._engine.config
        fingerprint = weights_fingerprint(
            config.model.name,
            model_id=self._settings.model_id,
            revision=model.get("model", {}).get("revision"),
            environ=os.environ,
        )
        hashed = key_hash(model.get("cache", {}).get("prefix_caching_hash_algo"), os.environ)
        for note in (fingerprint.note, hashed.note):
            if note:
                _LOG.warning("%s", note)
        ids = [group.group_id for group in config.groups]
        facts = EngineFacts(
            name="vllm",
            version=vllm_version,
            kv_format=_KV_FORMAT,
            chunk_bytes=dict(zip(ids, geometry.chunk_bytes, strict=True)),
            key_hash=hashed,
            stored_layout=ranks.stored.value,
            layer_names=dict(zip(ids, ranks.layer_names, strict=True)),
            stages=[
                dict(zip(ids, stage, strict=True))
                for stage in ranks.stages
                if len(ranks.stages) > 1
            ],
            model=model,
            settled_extras=_SETTLED_EXTRAS,
        )
        return namespace(self._engine, fingerprint, facts)
