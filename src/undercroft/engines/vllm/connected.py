"""The spec and the manager behind `UndercroftConnector`: what the plain ones cannot know.

Stock's connector hides the engine's queue, the adapters of its requests, and which loads failed.
Ours hands them on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.request import Request as EngineRequest

from undercroft.engines.vllm.adapters import AdapterTag, untagged
from undercroft.engines.vllm.manager import UndercroftManager, safe
from undercroft.engines.vllm.recording import told_kind
from undercroft.engines.vllm.spec import UndercroftSpec
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey

__all__ = ["ConnectedManager", "ConnectedSpec"]

_BEGINNING_TOKENS = 16


class ConnectedManager(UndercroftManager):
    """Knows the adapters of requests, looks ahead for those that queue, and drops failed loads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the base's
        super().__init__(*args, **kwargs)
        self._scout: Request | None = None
        self._tags: dict[str, AdapterTag] = {}

    # --- adapters -----------------------------------------------------------------------------

    def tag_next(self, request_id: str, tag: AdapterTag) -> None:
        """All keys of the request that comes next under this id are `tag`'s."""
        self._tags[request_id] = tag
        self._knows_adapters = True

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        tag = self._tags.pop(req_context.req_id, None)
        if tag is not None:
            # In the context, because completions may name a request that has ended by it only.
            req_context.set_state(tag)
        offloading: RequestOffloadingContext = super().on_new_request(req_context)
        request = self._requests.get(req_context.req_id)
        if tag is not None and request is not None:
            position_of = req_context.get_offload_key_position
            request.position_of = lambda key: position_of(OffloadKey(untagged(key)))
        return offloading

    def _tag(self, context: ReqContext) -> AdapterTag | None:
        return context.get_state(AdapterTag) if self._knows_adapters else None

    @override
    def _named(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[ChunkKey]:
        tag = self._tag(req_context)
        return tag.on_all(keys) if tag else keys

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        tag = self._tag(req_context)
        if tag is None:
            return super().prepare_store(keys, req_context)
        output = super().prepare_store(keys if tag.is_sure else [], req_context)
        if output is not None:
            output.keys_to_store = [OffloadKey(untagged(key)) for key in output.keys_to_store]
        return output

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events = list(super().take_events())
        for event in events:
            event.keys = [OffloadKey(untagged(key)) for key in event.keys]
        return events

    # --- lookups ------------------------------------------------------------------------------

    @override
    def _look_up(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        tag = self._tag(req_context)
        if tag is not None:
            if not tag.is_sure:
                return LookupResult.MISS
            key = tag.on(key)
        if self._scout is not None:
            return self._look(ChunkKey(key), req_context, self._scout)
        return super()._look_up(key, req_context)

    @override
    def _may_ask_plainly(self, request: Request, req_context: ReqContext) -> None:
        if self._tag(req_context) is None:
            super()._may_ask_plainly(request, req_context)

    @contextmanager
    def looking_ahead(self, request_id: str) -> Iterator[bool]:
        """Within: lookups for this request only note what there is, and say HIT for all of it.

        What is below is brought up from the end of the step on. Gives False if nothing can be.
        """
        request = None if self.is_off else self._requests.get(request_id)
        if request is not None:
            self._scout = self.hierarchy.ahead.scout(
                request_id, request.position_of, request.group_of
            )
            self._asking.pop(request_id, None)
        try:
            yield self._scout is not None
        finally:
            self._scout = None

    def _look(self, key: ChunkKey, context: ReqContext, scout: Request) -> LookupResult:
        tiers = context.load_tier_filter
        if tiers is not TierFilter.ALL and not self._allowed(key, tiers, scout):
            return LookupResult.MISS
        found = self.hierarchy.ahead.finds(key, scout)
        return LookupResult.HIT if found else LookupResult.MISS

    def prompt_came(self, prompt: EngineRequest) -> None:
        """What the self-check wants to know of a request, and a context does not say."""
        if self.is_off or self.check.is_over:
            return
        try:
            tokens, adapter = prompt.prompt_token_ids, prompt.lora_request
            is_plain = prompt.cache_salt is not None and tokens and not prompt.mm_features
            self.check.came(
                prompt.num_prompt_tokens,
                tokens[:_BEGINNING_TOKENS] if is_plain else None,
                prompt.cache_salt,
                adapter.lora_name if adapter else "",
            )
        except Exception:  # noqa: BLE001 - engine internals are read here, and they move
            self.check.end()

    def ends(self, prompt: EngineRequest) -> None:
        """The engine's own request, which says how it ended; `on_request_finished` is next."""
        if self.recording is not None:
            self.recording.ends(prompt)
        request = None if self.is_off else self._requests.get(prompt.request_id)
        if request is None or self._every_key is None:
            return
        try:
            request.use.kind = told_kind(prompt)
        except Exception:  # noqa: BLE001 - engine internals are read here, and they move
            request.use.kind = 0

    @safe(lambda: None)
    def step_computes(self, prompts: Iterable[tuple[int, int]]) -> None:
        """What the step just scheduled computes of prompts: first tokens, and how many."""
        pace = self._tally.pace
        pace.is_told = True
        for first, num_tokens in prompts:
            pace.computed(num_tokens, first)

    # --- loads that failed --------------------------------------------------------------------

    @safe(lambda: None)
    def fail_load(self, request_id: str, offsets: Collection[int]) -> None:
        """The chunks in the slots at `offsets` did not reach the engine's blocks."""
        self.hierarchy.loads.fail(request_id, offsets)


class ConnectedSpec(UndercroftSpec):
    """`UndercroftSpec` as `UndercroftConnector` makes it; not for users to name."""

    _manager_class = ConnectedManager
    _tells_failed_loads = True
