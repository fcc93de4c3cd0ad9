"""What a rank's page of each kind of layer is of the page that one rank alone would have.

Attention has, for each token and head, a key and a value. Elements follow head by head (HND) or
token by token (NHD); key and value are neighbours (packed) or in a half of the page each (split).
A stored page keeps that order, with all heads and all tokens of the block. What cannot be certified
is stored as it is, and is not portable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from undercroft.layout.page_map import CopyRun, PageMap, coalesce
from undercroft.layout.topology import Topology

__all__ = ["HeadsPage", "Order", "heads_page", "latent_page", "opaque_page"]


class Order(Enum):
    """What follows what in a page of attention."""

    HEADS = "HND"
    TOKENS = "NHD"


@dataclass(frozen=True, slots=True)
class HeadsPage:
    """Attention with keys and values per head.

    Args:
        num_heads: KV heads of the model.
        num_tokens: Tokens of a block on one rank.
        element_bytes: Of one token and one head: key and value if packed, else one of them.
        order: What follows what.
        is_split: All keys first, then all values.
    """

    num_heads: int
    num_tokens: int
    element_bytes: int
    order: Order = Order.HEADS
    is_split: bool = False


def heads_page(page: HeadsPage, topology: Topology, rank: int) -> PageMap:
    """The page of `rank`: its heads, or one that it shares with other ranks, of its tokens.

    Tensor parallel ranks share out the heads; with more ranks than heads, neighbours hold the same
    head, and decode context parallelism shares out its tokens among them.
    """
    tp, num_heads = topology.tp_size, page.num_heads
    whole, rest = divmod(num_heads, tp) if num_heads >= tp else divmod(tp, num_heads)
    num_copies = 1 if num_heads >= tp else whole
    local_heads = whole if num_heads >= tp else 1
    local_bytes = (1 + page.is_split) * local_heads * page.num_tokens * page.element_bytes
    interleave = topology.interleave_tokens
    if rest:
        return opaque_page(local_bytes, f"{num_heads} KV heads do not share out over {tp} ranks")
    if num_copies % topology.dcp_size:
        why = f"decode context parallel size {topology.dcp_size}, but {num_copies} copies of a head"
        return opaque_page(local_bytes, why)
    if topology.cp_size > 1 and page.num_tokens % interleave:
        why = f"{page.num_tokens} tokens do not share out by {interleave}"
        return opaque_page(local_bytes, why)
    place = topology.place(rank)
    shard, copy_index = divmod(place.tp_index, num_copies)
    runs = coalesce(_runs(page, local_heads, shard * local_heads, topology, place.cp_index))
    return PageMap(
        local_bytes=local_bytes,
        stored_bytes=(1 + page.is_split)
        * num_heads
        * page.num_tokens
        * topology.cp_size
        * page.element_bytes,
        runs=runs,
        num_writers=num_copies // topology.dcp_size,
        writer_index=copy_index // topology.dcp_size,
        is_portable=topology.cp_size == 1,
        why="" if topology.cp_size == 1 else _CONTEXT_PARALLEL,
    )


_CONTEXT_PARALLEL = "context parallelism shares out the tokens of a block"


def _runs(
    page: HeadsPage, local_heads: int, first_head: int, topology: Topology, cp_index: int
) -> Iterator[CopyRun]:
    """One run per half, head and stretch of tokens that stay together."""
    size, tokens = page.element_bytes, page.num_tokens
    local = _Offsets(page, local_heads, tokens)
    stored = _Offsets(page, page.num_heads, tokens * topology.cp_size)
    step = tokens if topology.cp_size == 1 else topology.interleave_tokens
    for half in range(1 + page.is_split):
        for head in range(local_heads):
            for token in range(0, tokens, step):
                there = topology.stored_token(cp_index, token) if topology.cp_size > 1 else token
                yield CopyRun(
                    local.of(half, head, token),
                    stored.of(half, first_head + head, there),
                    size,
                    step,
                    local.token_stride,
                    stored.token_stride,
                )


class _Offsets:
    """Where an element lies in a page of so many heads and tokens."""

    def __init__(self, page: HeadsPage, num_heads: int, num_tokens: int) -> None:
        size, is_by_head = page.element_bytes, page.order is Order.HEADS
        self.token_stride = size if is_by_head else num_heads * size
        self._head_stride = num_tokens * size if is_by_head else size
        self._half_bytes = num_heads * num_tokens * size

    def of(self, half: int, head: int, token: int) -> int:
        return half * self._half_bytes + head * self._head_stride + token * self.token_stride


def latent_page(num_tokens: int, row_bytes: int, topology: Topology, rank: int) -> PageMap:
    """The page of `rank` of one latent vector per token (MLA): every tensor parallel rank has it.

    Args:
        num_tokens: Tokens of a block on one rank.
        row_bytes: Of one token.
        topology: The replica.
        rank: Whose page.
    """
    return heads_page(HeadsPage(1, num_tokens, row_bytes, Order.TOKENS), topology, rank)


def opaque_page(num_bytes: int, why: str) -> PageMap:
    """A page of which nothing is known but its length: stored as it is, each rank's by itself."""
    return PageMap.whole(num_bytes, is_portable=False, why=why)
