"""What the vLLM adapter tells a recorder: which chunks a request has, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from vllm.v1.engine import FinishReason
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request as EngineRequest

from undercroft.traces.recorder import Recorder, Told

__all__ = ["KINDS", "Recording", "kind_of", "told_kind"]

_LOG = logging.getLogger(__name__)

_REASON_BITS = 2
_NUMBER_OF = {reason: number for number, reason in enumerate(FinishReason, 1)}
KINDS = "bit 0: the model ended it itself; bit 1: not used; above them how it ended: " + ", ".join(
    f"{number} {reason}" for reason, number in _NUMBER_OF.items()
)
"""What `kind_of` means: the lowest bits are what policies are told, here and by the engine."""


def told_kind(request: EngineRequest) -> int:
    """What policies are told of how a request ended: 1 if the model ended its answer itself."""
    is_stop = request.get_finished_reason() is FinishReason.STOP
    return int(is_stop and request.stop_reason is None)


def kind_of(request: EngineRequest) -> int:
    """The kind to record; 0 if the request has not ended."""
    reason = request.get_finished_reason()
    return 0 if reason is None else _NUMBER_OF[reason] << _REASON_BITS | told_kind(request)


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
        session = getattr(request, "session_id", None)
        told = Told(
            request.num_prompt_tokens,
            request.num_output_tokens,
            session=str(session).encode() if session else b"",
            kind=kind_of(request),
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
