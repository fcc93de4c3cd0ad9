"""Our log lines beside vLLM's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

from typing_extensions import override

__all__ = ["log_where_vllm_logs"]


class _Forwarding(logging.Handler):
    """Gives records to other handlers, our name first: vLLM's format does not show the logger."""

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._targets = tuple(targets)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.msg = f"undercroft: {record.msg}"
        for target in self._targets:
            if named.levelno >= target.level:
                target.handle(named)


def log_where_vllm_logs() -> None:
    """Send our lines where vLLM's go, unless the user set up a logger for us. Twice is fine."""
    ours, theirs = logging.getLogger("undercroft"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.addHandler(_Forwarding(theirs.handlers))
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
