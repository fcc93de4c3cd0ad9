"""How one transfer between level 0 and a lower tier ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from undercroft.errors import KvError, TierClosed, TierTimeout, TierUnavailable
from undercroft.keys import ChunkKey

__all__ = ["Done", "Op", "Outcome", "StandingErrors"]


class Op(Enum):
    """What a transfer does in the tier."""

    READ = "read"
    WRITE = "write"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one key's transfer.

    Args:
        key: The chunk.
        error: Why it failed; None if it did not. An absent chunk is no error. Not to be raised:
            moves that never reached the tier, or did not come back, share one object.
        num_bytes: Bytes moved: the chunk's length after a read that found it or a write that
            worked, otherwise 0. A write without an error that moved none came too late: the epoch
            that it was for is over.
        seconds: From submission to this end, waiting and retries included.
        found: A read filled its buffer with the verified chunk. False for every other end, and
            always for writes and deletes.
    """

    key: ChunkKey
    error: KvError | None
    num_bytes: int
    seconds: float
    found: bool


@dataclass(frozen=True, slots=True)
class Done:
    """The one report that a ticket gets.

    Args:
        ticket: What `read`, `write` or `delete` gave out.
        op: Which of them.
        outcome: How it ended.
        buffer_free: No thread touches the buffer any more. If False, it must stay as it is until
            `Transfers.take_released` names the ticket.
    """

    ticket: int
    op: Op
    outcome: Outcome
    buffer_free: bool


class StandingErrors:
    """The ends that are the tier's, not one chunk's: made once, so that a thousand are cheap."""

    def __init__(self, tier: str) -> None:
        self.not_started = TierTimeout(
            f"tier {tier!r}: not started within the deadline: it is too slow or too busy", tier=tier
        )
        self.still_running = TierTimeout(
            f"tier {tier!r}: no answer within the deadline; the call is still running", tier=tier
        )
        self.left_alone = TierUnavailable(
            f"tier {tier!r} is left alone after failures, and tried again later", tier=tier
        )
        self.cancelled = TierUnavailable(f"tier {tier!r}: cancelled before it started", tier=tier)
        self.closed = TierClosed(f"tier {tier!r} is closed", tier=tier)
