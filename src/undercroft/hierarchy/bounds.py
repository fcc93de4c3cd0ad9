"""Bounds of the movers that seldom need a change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferLimits"]


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds that seldom need a change.

    Args:
        num_extra_threads: Replacements for threads that hang; None: as many as `num_threads`.
        retry_pause_s: Wait before the first retry; doubled before each further one.
        delete_timeout_s: Deadline of a delete, from submission.
        max_in_a_row: Reads that may pass waiting writes and deletes in a row.
        failures_to_open: Consecutive failures that open the breaker.
        first_pause_s: How long the breaker stays open the first time.
        max_pause_s: The longest it stays open.
    """

    num_extra_threads: int | None = None
    retry_pause_s: float = 0.05
    delete_timeout_s: float = 10.0
    max_in_a_row: int = 16
    failures_to_open: int = 5
    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
