"""What the vLLM adapter tells a recorder: which chunks a request has, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from vllm.v1.engine import FinishReason
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request as EngineRequest

from undercroft.traces.recorder import Recorder, Told

__all__ = ["KINDS", "Recording"]

_LOG = logging.getLogger(__name__)

_KIND_OF = {reason: kind for kind, reason in enumerate(FinishReason, 1)}
KINDS = "how it ended: " + ", ".join(f"{kind} {reason}" for reason, kind in _KIND_OF.items())


class Recording:
    """Stands between the manager and a recorder; nothing here raises.

    vLLM keeps the keys of all of a request's chunks in its context, those of generated tokens and
    those that its own cache had included, each with the token where the chunk ends. It shows them
    one at a time only, so they are taken from where they lie; a vLLM that keeps them elsewhere
    leaves nothing to record.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_on = True

    def came(self, context: ReqContext) -> None:
        """A new request."""
        self._guarded(self._came, context)

    def _came(self, context: ReqContext) -> None:
        ends = getattr(context, "_offload_key_positions", None)
        if isinstance(ends, dict):
            self._recorder.came(context.req_id, ends)
        else:
            self._recorder.not_told()

    def began(self, request_ids: Collection[str]) -> None:
        """These begin to run."""
        self._guarded(self._recorder.began, request_ids)

    def ends(self, request: EngineRequest) -> None:
        """Asked by our connector, which sees the engine's own request, before `ended`."""
        self._guarded(self._ends, request)

    def _ends(self, request: EngineRequest) -> None:
        reason = request.get_finished_reason()
        session = getattr(request, "session_id", None)
        told = Told(
            request.num_prompt_tokens,
            request.num_output_tokens,
            session=str(session).encode() if session else b"",
            kind=0 if reason is None else _KIND_OF[reason],
        )
        self._recorder.tell(request.request_id, told)

    def ended(self, request_id: str) -> None:
        """No more will come of it."""
        self._guarded(self._recorder.ended, request_id)

    def _guarded(self, call: Callable[..., None], argument: object) -> None:
        if not self._is_on:
            return
        try:
            call(argument)
        except Exception:  # noqa: BLE001 - engine internals are read here, and they move
            self._is_on = False
            _LOG.exception("fault while recording; requests are not recorded any more")
