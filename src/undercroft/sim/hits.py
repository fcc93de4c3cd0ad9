"""What a policy got out of a trace with one level of one size."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hits"]


@dataclass(frozen=True, slots=True)
class Hits:
    """Counts of one replay; those before the end of a warm start are in none of them.

    Args:
        capacity_blocks: How many blocks fit.
        num_requests: Requests counted.
        num_references: Their blocks, each as often as it occurs.
        hit_blocks: Those of them that were found: of each request the longest prefix that was
            there.
        num_tokens: Input tokens of the requests, in blocks or not.
        hit_tokens: Those in the blocks that were found.
        num_stored: Blocks written, each as often as it was.
        num_evicted: Blocks that left for another one.
    """

    capacity_blocks: int
    num_requests: int
    num_references: int
    hit_blocks: int
    num_tokens: int
    hit_tokens: int
    num_stored: int
    num_evicted: int

    @property
    def block_hit_ratio(self) -> float:
        """Hits among references; 0 where there are none."""
        return self.hit_blocks / self.num_references if self.num_references else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Hits among input tokens; 0 where there are none."""
        return self.hit_tokens / self.num_tokens if self.num_tokens else 0.0
