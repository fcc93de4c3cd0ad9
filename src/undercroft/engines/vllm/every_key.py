"""All chunks of a request, those that vLLM's own cache had among them, for policies that learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypeVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey

__all__ = ["EveryKey"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class EveryKey:
    """Takes keys from where vLLM keeps them; nothing here raises.

    A manager is asked for chunks that vLLM has to load or store, and hears nothing of the others.
    Without those a prompt's path has no root, and one that is served from the engine's own cache
    all day looks unused. vLLM shows the keys in a context one at a time only, so they are taken
    from where they lie; where a vLLM keeps them elsewhere, what it loads and stores has to do.

    Args:
        named: What chunks are called here, for a request.
        group_of: The group of a key; None if there is one only.
        tokens_per_chunk: Of each group.
        prompts_only: Generated tokens are not stored, so they count when they are a prompt's.
    """

    def __init__(
        self,
        named: Callable[[Collection[OffloadKey], ReqContext], Collection[ChunkKey]],
        group_of: Callable[[ChunkKey], bytes] | None,
        tokens_per_chunk: dict[bytes | None, int],
        *,
        prompts_only: bool,
    ) -> None:
        self._named = named
        self._prompts_only = prompts_only
        self._coming: dict[str, ReqContext] = {}
        self._group_of = group_of
        self._tokens_per_chunk = tokens_per_chunk
        self._is_on = True

    def came(self, context: ReqContext) -> None:
        """A new request."""
        self._coming[context.req_id] = context

    def ended(self, request_id: str) -> None:
        """It may never have run: nobody has used what it asked for."""
        self._coming.pop(request_id, None)

    def began(self, requests: Iterable[Request | None]) -> None:
        """They begin to run, and have used, or will have, all chunks of their prompts."""
        for request in requests:
            context = self._coming.pop(request.id, None) if request is not None else None
            if request is not None and context is not None:
                num_keys = self._guarded(partial(self._num_keys, context), 0)
                request.use.every_key = partial(self._every, context, num_keys)

    def _num_keys(self, context: ReqContext) -> int:
        return len(self._ends(context))

    def _every(
        self, context: ReqContext, num_at_first: int, chain: Iterable[ChunkKey]
    ) -> list[list[ChunkKey]]:
        nothing: list[list[OffloadKey]] = []
        groups = self._guarded(partial(self._of, context, num_at_first, chain), nothing)
        return [list(self._named(keys, context)) for keys in groups]

    def _guarded(self, read: Callable[[], _T], default: _T) -> _T:
        if not self._is_on:
            return default
        try:
            return read()
        except Exception:  # noqa: BLE001 - engine internals are read here, and they move
            self._is_on = False
            _LOG.exception("fault while reading a request's keys; eviction learns less from now on")
            return default

    @staticmethod
    def _ends(context: ReqContext) -> dict[OffloadKey, int]:
        ends = getattr(context, "_offload_key_positions", None)
        return ends if isinstance(ends, dict) else {}

    def _of(
        self, context: ReqContext, num_at_first: int, chain: Iterable[ChunkKey]
    ) -> list[list[OffloadKey]]:
        ends = self._ends(context)
        num = num_at_first if self._prompts_only else len(ends)
        groups: dict[bytes | None, list[OffloadKey]] = {}
        within: dict[bytes | None, list[OffloadKey]] = {}
        for at, (key, end) in enumerate(ends.items()):
            group = self._group_of(key) if self._group_of is not None else None
            keys, num_tokens = groups.setdefault(group, []), self._tokens_per_chunk[group]
            if at < num and end == (len(keys) + 1) * num_tokens:
                keys.append(key)
            elif end % num_tokens:
                within.setdefault(group, []).append(key)
        used = set(chain) if within else set()
        for group, tails in within.items():  # the last states of a recurrent group, if stored
            keys = groups[group]
            least = len(keys) * self._tokens_per_chunk[group]
            for key in tails:
                if ends[key] > least and not used.isdisjoint(self._named([key], context)):
                    keys.append(key)
        return [keys for keys in groups.values() if keys]
