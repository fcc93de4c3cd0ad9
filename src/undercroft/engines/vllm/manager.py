"""The scheduler side of the vLLM adapter: vLLM's manager interface over the hierarchy.

vLLM calls everything here on the engine core's scheduler thread and stops the engine when a call
raises. So each call turns a fault into the safe answer (a miss, nothing stored) and counts it; a
broken invariant of ours moreover switches the cache off, since bytes can no longer be vouched for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from undercroft.clock import SystemClock
from undercroft.engines.vllm.every_key import EveryKey
from undercroft.engines.vllm.metrics import StepStats
from undercroft.engines.vllm.pause import is_pause
from undercroft.engines.vllm.recording import Recording
from undercroft.engines.vllm.self_check import SelfCheck
from undercroft.engines.vllm.tally import Tally
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.slots import SlotState
from undercroft.key_table import SHARD_SHIFT
from undercroft.keys import ChunkKey
from undercroft.log import SparingLog

__all__ = ["GROUP_ID_BYTES", "UndercroftManager", "group_key", "safe"]

_LOG = logging.getLogger(__name__)
GROUP_ID_BYTES = 4

# A global's name costs half of an enum member's on the path taken per key.
_READY = int(SlotState.READY)
_HIT, _MISS, _PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
_IS_HIT, _IS_MISS = Lookup.HIT, Lookup.MISS
_ALL_TIERS = TierFilter.ALL

_T = TypeVar("_T")


def safe(default: Callable[[], Any]) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Turn any fault in a call from the engine into `default()`, and switch the cache off."""

    def wrap(method: Callable[..., _T]) -> Callable[..., _T]:
        @wraps(method)
        def call(self: UndercroftManager, *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401 - passed on
            if self.is_off:
                return default()  # type: ignore[no-any-return] # a _T
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the engine dies of whatever passes
                self.switch_off(error)
                return default()  # type: ignore[no-any-return] # a _T

        return call

    return wrap


def group_key(group_id: int) -> bytes:
    """The end of every key of a group, as vLLM packs it."""
    return group_id.to_bytes(GROUP_ID_BYTES, "big")


def _group_of(key: ChunkKey) -> bytes:
    return key[-GROUP_ID_BYTES:]


def _result(found: Lookup) -> LookupResult:
    # No dict: hashing an enum's member costs as much as a lookup.
    return _MISS if found is _IS_MISS else _HIT if found is _IS_HIT else _PENDING


def _nothing_stored() -> PrepareStoreOutput:
    return PrepareStoreOutput([], SlotSpec([], []), [])


class UndercroftManager(OffloadingManager):  # type: ignore[misc] # untyped here
    """See the module. One per engine replica.

    Args:
        hierarchy: Where everything happens.
        group_ids: The engine's ids of the offloaded groups, in its order.
        close: Called once at shutdown, after the hierarchy closed.
        refresh: Called now and at the end of each step; tells the pool how much memory exists.
        tally: Counts into the hierarchy's counters.
        localities: By name, the levels that other machines can reach, or cannot.
        reset_s: How long each lower level may take when a reset has to be repeated.
        keeps_across_sleep: What the user says of weights while the engine sleeps: they stay.
        recording: Told of the requests, if they are to be recorded.
        prompts_only: The engine stores no generated tokens.
    """

    def __init__(  # noqa: PLR0913 - wired once, by the spec
        self,
        hierarchy: Hierarchy,
        *,
        group_ids: Sequence[int],
        close: Callable[[], None],
        refresh: Callable[[], None],
        tally: Tally,
        localities: Mapping[str, Locality] | None = None,
        reset_s: float = 1.0,
        keeps_across_sleep: bool = False,
        recording: Recording | None = None,
        prompts_only: bool = True,
    ) -> None:
        self.hierarchy = hierarchy
        self.recording = recording
        self._keeps_across_sleep = keeps_across_sleep
        self._localities = dict(localities or {})
        self._reset_s = reset_s
        self._group_ids = [group_key(group_id) for group_id in group_ids]
        self.is_off = False
        self._close = close
        self._refresh = refresh
        self._log = SparingLog(_LOG, SystemClock())
        self._tally = tally
        self._stats = StepStats(hierarchy, tally.pace)
        hierarchy.restores.worth.compute_s = tally.pace.seconds_of
        self._requests: dict[str, Request] = {}
        self._group_of = _group_of if len(group_ids) > 1 else None
        names = self._group_ids if self._group_of else [None]
        tokens = tally.tokens_per_chunk
        self.check = SelfCheck(
            hierarchy,
            clock=tally.clock,
            groups=dict(zip(names, zip(group_ids, tokens, strict=True), strict=True)),
        )
        self._every_key: EveryKey | None = None
        if hierarchy.telling.is_needed:
            self._every_key = EveryKey(
                self._named,
                self._group_of,
                dict(zip(names, tokens, strict=True)),
                prompts_only=prompts_only,
            )
        # What every lookup needs, one attribute away.
        self._shards = hierarchy.pool.table.shards
        self._states = hierarchy.pool.slots.states
        self._knows_adapters = False
        """Whether `_named` has anything to do."""
        self._asking: dict[str, Request] = {}
        """Those that have begun this step, and that `lookup` may answer by itself."""
        self._outdated: dict[str, bool] = {}
        """Requests that lived through a reset; whether to begin running makes them trusted."""
        refresh()

    def switch_off(self, error: BaseException) -> None:
        """Serve and store nothing from now on. Loads under way end as they would have."""
        was_off, self.is_off = self.is_off, True
        self._asking.clear()
        self.hierarchy.counters.broken_invariants += 1
        if was_off:
            return
        _LOG.error(
            "internal fault, the cache is off until the engine restarts; "
            "requests are recomputed. Please report this.",
            exc_info=error,
        )

    def _request(self, context: ReqContext) -> Request:
        request = self._requests.get(context.req_id)
        if request is None:
            request = Request(context.req_id, context.get_offload_key_position, self._group_of)
            self._requests[context.req_id] = request
        return request

    # --- requests -----------------------------------------------------------------------------

    @override
    @safe(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = self._request(req_context)
        # Most are looked up in the step in which they come.
        self.hierarchy.begin_lookups(request)
        self._may_ask_plainly(request, req_context)
        if self.recording is not None:
            self.recording.came(req_context)
        if self._every_key is not None:
            self._every_key.came(req_context)
        return RequestOffloadingContext()

    @override
    @safe(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        self._asking.pop(req_context.req_id, None)
        self._outdated.pop(req_context.req_id, None)
        if self._every_key is not None:
            self._every_key.ended(req_context.req_id)
        if self.recording is not None:
            self.recording.ended(req_context.req_id)
        if request is not None:
            self.hierarchy.finish_request(request)
            if request.loading or request.num_storing:
                # Completions may still come, and name the request by its context only.
                req_context.set_state(request)

    def _named(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[ChunkKey]:
        """What the chunks of `keys` are called here, for a request of one of many adapters."""
        del req_context
        return keys

    def _any_request(self, context: ReqContext) -> Request:
        return context.get_state(Request) or self._request(context)

    # --- lookups and loads --------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # One frame for what is asked most, by far; see `Hierarchy.lookup`.
        try:
            request = self._asking[req_context.req_id]
            slot = self._shards[hash(key) >> SHARD_SHIFT].get(key)
            if slot is not None and self._states[slot] >= _READY:
                request.asked.append(key)
                return _HIT
        except KeyError:
            return self._look_first(key, req_context)
        except Exception as error:  # noqa: BLE001 - the engine dies of whatever passes
            self.switch_off(error)
            return _MISS
        try:
            found = self.hierarchy.lookup_elsewhere(key, request, -1 if slot is None else slot)
        except Exception as error:  # noqa: BLE001 - as above
            self.switch_off(error)
            return _MISS
        return _result(found)

    @safe(lambda: LookupResult.MISS)
    def _look_first(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._look_up(key, req_context)

    def _look_up(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """`lookup`, the long way: a request's first of a step, and what needs a closer look."""
        request = self._requests.get(req_context.req_id) or self._request(req_context)
        tiers = req_context.load_tier_filter
        if tiers is not _ALL_TIERS and not self._allowed(ChunkKey(key), tiers, request):
            return _MISS
        found = self.hierarchy.lookup(ChunkKey(key), request)
        self._may_ask_plainly(request, req_context)
        return _result(found)

    def _may_ask_plainly(self, request: Request, req_context: ReqContext) -> None:
        """From now on and in this step, if it takes hits from everywhere and its keys are plain."""
        if req_context.load_tier_filter is _ALL_TIERS:
            self._asking[request.id] = request

    def _allowed(self, key: ChunkKey, tiers: TierFilter, request: Request) -> bool:
        """Whether the request wants hits from where `key` is."""
        below = request.promoted.get(key)
        if below is None:
            if tiers.allows(Medium.CPU, Locality.LOCAL) and self.hierarchy.pool.find(key) >= 0:
                return True
            level = self.hierarchy.restores.level_with(key)
            if level is None:
                return False
            below = level.name
        return bool(tiers.allows(Medium.STORAGE, self._locality(below)))

    def _locality(self, level: str) -> Locality:
        return self._localities.get(level, Locality.LOCAL)

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        # Asked per key of a load, so without `safe`, which costs twice as much.
        if self.is_off:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        try:
            if self._knows_adapters:
                (key,) = self._named([key], req_context)
            source = self.hierarchy.source_of(ChunkKey(key), self._any_request(req_context))
        except Exception as error:  # noqa: BLE001 - the engine dies of whatever passes
            self.switch_off(error)
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if source == LEVEL_0 else CacheHitSource.DISK

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        # Not caught: the engine will read whatever slots are named here, so a fault must stop it.
        if self._knows_adapters:
            keys = self._named(keys, req_context)
        chunk_keys: list[ChunkKey] = list(keys)  # a copy: the caller's may be any collection
        request = self._requests.get(req_context.req_id) or self._request(req_context)
        has_waited = request.queued
        slots = self.hierarchy.prepare_load(chunk_keys, request)
        spec = self._spec(chunk_keys, slots, 0)
        self._note_load(request, chunk_keys, spec, has_waited)
        return spec

    @safe(lambda: None)
    def _note_load(
        self,
        request: Request,
        keys: list[ChunkKey],
        spec: SlotSpec,
        has_waited: bool,  # noqa: FBT001 - by position, as `safe` passes it on
    ) -> None:
        self._tally.load_began(request, keys, spec.group_chunks, has_waited=has_waited)

    @override
    @safe(lambda: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._knows_adapters:
            keys = self._named(keys, req_context)
        self._tally.load_ended(req_context.req_id)
        self.hierarchy.complete_load(keys, self._any_request(req_context))

    def _spec(self, keys: list[ChunkKey], slots: list[int], store_id: int) -> SlotSpec:
        offsets = self.hierarchy.pool.slots.offsets(slots)
        if self._group_of is None:
            return SlotSpec(offsets, (len(keys),), store_id)
        per_group = Counter(map(self._group_of, keys))
        return SlotSpec(offsets, [per_group[group_id] for group_id in self._group_ids], store_id)

    # --- stores -------------------------------------------------------------------------------

    @override
    @safe(_nothing_stored)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        if self._knows_adapters:
            keys = self._named(keys, req_context)
        if req_context.req_id in self._outdated:
            counters = self.hierarchy.counters
            counters.declined_chunks[LEVEL_0, "before_reset"] += len(keys)
            counters.note(LEVEL_0, "declined", "before_reset", *keys)
            return _nothing_stored()
        request = self._requests.get(req_context.req_id) or self._request(req_context)
        plan = self.hierarchy.prepare_store(list(keys), request)
        if not plan.keys:
            if not plan.is_whole:
                self.check.declined(request, keys)
            return _nothing_stored()
        spec = self._spec(plan.keys, plan.slots, plan.store_id)
        self.check.planned(request, plan.keys, spec.group_chunks)
        self._tally.store_began(req_context.req_id, plan, spec.group_chunks)
        return PrepareStoreOutput(list(plan.keys), spec, [])

    @override
    @safe(lambda: None)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        if self._knows_adapters:
            keys = self._named(keys, req_context)
        self._tally.store_ended(req_context.req_id, keys)
        self.hierarchy.complete_store(keys, self._any_request(req_context), success=success)

    # --- steps --------------------------------------------------------------------------------

    @override
    @safe(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._asking.clear()
        self._refresh()
        self._tally.pace.step_began()
        if context.new_req_ids:
            self.check.began(map(self._requests.get, context.new_req_ids))
            if self.recording is not None:
                self.recording.began(context.new_req_ids)
            if self._every_key is not None:
                self._every_key.began(map(self._requests.get, context.new_req_ids))
        self.check.look()
        if self.hierarchy.end_step(context.new_req_ids):
            self._distrust()
        if self._outdated:
            self._trust_again(context)

    @override
    @safe(lambda: False)
    def has_pending_work(self) -> bool:
        return self.hierarchy.has_pending_work()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        # The engine asks once for each step whose output it has processed.
        self._step_ended()
        return self._take_stats()

    @safe(lambda: None)
    def _step_ended(self) -> None:
        self._tally.pace.step_ended()
        self.hierarchy.step_ended()

    def _take_stats(self) -> OffloadingConnectorStats | None:
        # Also while the cache is off: that it is off must be seen.
        try:
            return self._stats.take(is_off=self.is_off)
        except Exception as error:  # noqa: BLE001 - the engine dies of whatever passes
            if not self.is_off:
                self.switch_off(error)
                return self._take_stats()
            return None

    @override
    @safe(list)
    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium.CPU if event.level == LEVEL_0 else Medium.STORAGE,
                removed=event.removed,
                locality=self._locality(event.level),
                ownership=None if event.level == LEVEL_0 else event.level,
                removal_expected=True,
            )
            for event in self.hierarchy.events.take()
        ]

    # --- reset and shutdown -------------------------------------------------------------------

    def _distrust(self) -> None:
        """Store nothing for requests that are under way: what they computed is from before.

        Nor may it be read: vLLM 0.32 offers all their chunks anew, and takes them from blocks that
        a sliding window has given up and others own by now.
        """
        for request_id, request in self._requests.items():
            has_loaded = bool(request.loaded or request.loading)
            self._outdated[request_id] = self._outdated.get(request_id, True) and not has_loaded
        self.check.forget()

    def _trust_again(self, context: ScheduleEndContext) -> None:
        """Requests that compute from the start again, or begin only now, have new bytes."""
        for request_id in context.preempted_req_ids:
            self._outdated.pop(request_id, None)
        for request_id in context.new_req_ids:
            if self._outdated.get(request_id):
                del self._outdated[request_id]

    @override
    def reset_cache(self) -> None:
        self._distrust()
        self._tally.reset()
        # Also while the cache is off: what lies on disk outlives this engine, and others share it.
        try:
            if self._keeps_across_sleep and is_pause():
                self.hierarchy.forget_jobs()
                return
            self.hierarchy.reset()
        except Exception as error:  # noqa: BLE001 - the engine dies of whatever passes
            self.switch_off(error)
            self._void_levels()

    def _void_levels(self) -> None:
        """Make what the lower levels hold void although a reset failed."""
        for level in self.hierarchy.levels:
            try:
                level.owe_reset()
                level.void()
                level.voider.wait_for_a_try(self._reset_s)
            except Exception:  # noqa: BLE001 - the other levels get their turn
                self._log.warning("tier %s could not be reset", level.name, with_traceback=True)

    @override
    def shutdown(self) -> None:
        for close in (self.hierarchy.close, self._close):
            try:
                close()
            except Exception:  # noqa: BLE001 - nothing may keep the engine from stopping
                _LOG.exception("fault while shutting down")
