"""How the ranks of one replica share layers, heads and tokens.

Ranks count as the engine counts them: pipeline stages outermost, then prefill context parallel,
then tensor parallel ranks. Decode context parallelism reuses the tensor parallel ranks: neighbours
hold the same heads of different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from undercroft.errors import LayoutMismatch

__all__ = ["RankPlace", "Topology"]


class RankPlace(NamedTuple):
    """Where one rank stands.

    Args:
        stage: Its pipeline stage.
        tp_index: Its number among the tensor parallel ranks of its stage.
        cp_index: Its number among the ranks that share out the tokens of a block.
    """

    stage: int
    tp_index: int
    cp_index: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The parallel sizes of one replica.

    Args:
        tp_size: Tensor parallel ranks: they share out heads.
        pp_size: Pipeline stages: they share out layers.
        pcp_size: Prefill context parallel ranks: they share out tokens.
        dcp_size: Decode context parallel size; divides `tp_size`.
        interleave_tokens: Tokens that go to one context parallel rank before the next one's turn.

    Raises:
        LayoutMismatch: A size below one, or `dcp_size` does not divide `tp_size`.
    """

    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        sizes = (*self.sizes, self.interleave_tokens)
        if min(sizes) < 1 or self.tp_size % self.dcp_size:
            raise LayoutMismatch(f"no such topology: {self}")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tensor, pipeline, prefill context and decode context parallel size."""
        return self.tp_size, self.pp_size, self.pcp_size, self.dcp_size

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage: each layer is on all of them, in whole or in part."""
        return self.pcp_size * self.tp_size

    @property
    def cp_size(self) -> int:
        """Ranks that share out the tokens of a block."""
        return self.pcp_size * self.dcp_size

    def place(self, rank: int) -> RankPlace:
        """Where `rank` stands.

        Raises:
            LayoutMismatch: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutMismatch(f"rank {rank} of {self.world_size} ranks")
        stage, in_stage = divmod(rank, self.stage_size)
        pcp_index, tp_index = divmod(in_stage, self.tp_size)
        return RankPlace(stage, tp_index, pcp_index * self.dcp_size + tp_index % self.dcp_size)

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of a pipeline stage."""
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def stored_token(self, cp_index: int, token: int) -> int:
        """Place in the whole block of the token that is number `token` in a rank's part of it."""
        turn, in_turn = divmod(token, self.interleave_tokens)
        return (turn * self.cp_size + cp_index) * self.interleave_tokens + in_turn
