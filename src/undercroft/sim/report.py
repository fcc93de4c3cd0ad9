"""What a simulation of several levels came to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LevelReport", "Report"]


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level's part. Bytes are those of whole chunks.

    Args:
        name: Of the level; the first is `host`.
        capacity_blocks: How many fit.
        hit_blocks: That requests loaded and that came from here.
        hit_tokens: In them.
        hit_bytes: Of them.
        saved_prefill_s: Seconds of computing that they saved.
        num_read: Chunks read: loads of host memory, reads of a lower level, whether used or not.
        num_written: Chunks written: stores, cascades, promotions.
        num_distinct_written: Different ones among them.
        num_evicted: Chunks that left for others.
        num_declined: Offers that were not written: not admitted, no room, too slow. A chunk may be
            offered more than once.
    """

    name: str
    capacity_blocks: int
    hit_blocks: int
    hit_tokens: int
    hit_bytes: int
    saved_prefill_s: float
    num_read: int
    num_written: int
    num_distinct_written: int
    num_evicted: int
    num_declined: int

    @property
    def write_amplification(self) -> float:
        """How often a chunk was written on average; 0 where none was."""
        return self.num_written / self.num_distinct_written if self.num_distinct_written else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What requests found, by level; those of a warm start are in none of the numbers.

    Args:
        num_requests: Requests counted.
        num_references: Their full blocks, each as often as it occurs.
        num_tokens: Their input tokens.
        waited_s: How long they waited for lower levels, all together.
        spanned_s: From the first of them to the end.
        levels: Nearest first.
    """

    num_requests: int
    num_references: int
    num_tokens: int
    waited_s: float
    spanned_s: float
    levels: tuple[LevelReport, ...]

    @property
    def hit_blocks(self) -> int:
        """On all levels."""
        return sum(level.hit_blocks for level in self.levels)

    @property
    def hit_tokens(self) -> int:
        """On all levels."""
        return sum(level.hit_tokens for level in self.levels)

    @property
    def saved_prefill_s(self) -> float:
        """On all levels."""
        return sum(level.saved_prefill_s for level in self.levels)

    @property
    def block_hit_ratio(self) -> float:
        """Hits among references; 0 where there are none."""
        return self.hit_blocks / self.num_references if self.num_references else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Hits among input tokens; 0 where there are none."""
        return self.hit_tokens / self.num_tokens if self.num_tokens else 0.0
