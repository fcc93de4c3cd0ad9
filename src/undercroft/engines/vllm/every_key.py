"""All chunks of a request, those that vLLM's own cache had among them, for policies that learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

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
        group_of: The group of a key; None if there is one only.
        tokens_per_chunk: Of each group.
        prompts_only: Generated tokens are not stored, so they count when they are a prompt's.
    """

    def __init__(
        self,
        group_of: Callable[[ChunkKey], bytes] | None,
        tokens_per_chunk: dict[bytes | None, int],
        *,
        prompts_only: bool,
    ) -> None:
        self._prompts_only = prompts_only
        self._group_of = group_of
        self._tokens_per_chunk = tokens_per_chunk
        self._is_on = True

    def num_now(self, context: ReqContext) -> int:
        """When a request begins to run: how many keys it has by then."""
        return self._guarded(lambda: len(self._ends(context)), 0)

    def of(self, context: ReqContext, num_at_first: int) -> list[list[OffloadKey]]:
        """For each group the keys of full chunks, root first; empty if that is not known.

        Args:
            context: Of the request.
            num_at_first: What `num_now` was.
        """
        num = num_at_first if self._prompts_only else None
        return self._guarded(lambda: self._of(islice(self._ends(context).items(), num)), [])

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

    def _of(self, ends: Iterable[tuple[OffloadKey, int]]) -> list[list[OffloadKey]]:
        groups: dict[bytes | None, list[OffloadKey]] = {}
        for key, end in ends:
            group = self._group_of(key) if self._group_of is not None else None
            keys = groups.setdefault(group, [])
            # Others end within a chunk: the last state of a recurrent group.
            if end == (len(keys) + 1) * self._tokens_per_chunk[group]:
                keys.append(key)
        return [keys for keys in groups.values() if keys]
