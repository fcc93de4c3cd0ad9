"""From block ids and slot offsets to copies of pages: integers in, integers out.

The stored bytes of one chunk are described in docs/reference/chunk-layout.md: for each page of a
block in the group's order, that page of every block of the chunk, one after another. A rank copies
its part of each page, see `page_map`.

Pairing. The engine hands over the blocks of a job group by group, without saying which chunk each
belongs to: only the logical index of the first block and the number of blocks. Blocks fill
the chunks in order, from that index's position in the first chunk on. In a store the engine leaves
out blocks it no longer has (sliding window), but never the last one of a chunk. So the
number of blocks tells whether the pairing is certain: blocks after the first one fill the chunks
completely if and only if none was left out. When some were left out, nobody can say
which, and nothing of that group is copied: a miss is right, a guess is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from undercroft.errors import Bug, LayoutMismatch
from undercroft.layout.page_map import PageMap

__all__ = [
    "BlockPlaces",
    "Fragments",
    "GroupGeometry",
    "Offsets",
    "PageRef",
    "TensorGeometry",
    "fragments",
    "pair_load",
    "pair_store",
    "place",
]

Offsets: TypeAlias = NDArray[np.int64]


class TensorGeometry(NamedTuple):
    """Where the pages of one engine tensor are.

    Args:
        base_bytes: Offset of block 0 from the start of the engine's address span.
        block_stride_bytes: From one block to the next.
        num_blocks: Blocks in the tensor.
        row_bytes: Bytes of one block in this tensor, padding included.
    """

    base_bytes: int
    block_stride_bytes: int
    num_blocks: int
    row_bytes: int


class PageRef(NamedTuple):
    """One page of every block of a group.

    Args:
        tensor_index: In which tensor.
        page_bytes: How many of the row's bytes count.
        part: What of the stored page it is; None: all of it.
    """

    tensor_index: int
    page_bytes: int
    part: PageMap | None = None

    @property
    def stored_bytes(self) -> int:
        """Length of the stored page."""
        return self.part.stored_bytes if self.part else self.page_bytes


class _Pieces(NamedTuple):
    """Pieces of pages that are alike but for their places; arrays are `(num_pieces,)`."""

    piece_bytes: int
    stored_page_bytes: int
    num_writers: int
    writer_index: int
    tensor_indices: tuple[int, ...]
    local_offsets: Offsets
    stored_offsets: Offsets


@dataclass(frozen=True)
class GroupGeometry:
    """The stored layout of the chunks of one group, as far as one rank has part of them.

    Args:
        refs: The pages of one block, in stored order; not empty.
        blocks_per_chunk: Blocks in a chunk, >= 1.
        offset_bytes: Where in the slot this rank's part begins.

    Raises:
        LayoutMismatch: No pages, a page without bytes or of another length than its part, or no
            blocks.
    """

    refs: tuple[PageRef, ...]
    blocks_per_chunk: int
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1:
            raise LayoutMismatch(f"blocks_per_chunk is {self.blocks_per_chunk}; it must be >= 1")
        if not self.refs or min(ref.page_bytes for ref in self.refs) < 1:
            raise LayoutMismatch(f"a group needs pages of at least one byte; it has {self.refs}")
        for ref in self.refs:
            if ref.part is not None and ref.part.local_bytes != ref.page_bytes:
                raise LayoutMismatch(
                    f"a page of {ref.page_bytes} bytes, and copy runs for {ref.part.local_bytes}"
                )

    @cached_property
    def ref_offsets(self) -> tuple[int, ...]:
        """For each ref, the offset in the slot of its stored page of the chunk's first block."""
        ends = accumulate(
            (ref.stored_bytes * self.blocks_per_chunk for ref in self.refs),
            initial=self.offset_bytes,
        )
        return tuple(ends)[:-1]

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a chunk that this rank has part of, from `offset_bytes` on."""
        return self.blocks_per_chunk * sum(ref.stored_bytes for ref in self.refs)

    @cached_property
    def num_pieces(self) -> int:
        """Contiguous pieces of one block."""
        return sum(len(pieces.tensor_indices) for pieces in self.pieces)

    @cached_property
    def pieces(self) -> tuple[_Pieces, ...]:
        """The pieces of one block, alike ones together, in order of first appearance."""
        alike: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
        for ref, ref_offset in zip(self.refs, self.ref_offsets, strict=True):
            part = ref.part or PageMap.whole(ref.page_bytes)
            for run in part.runs:
                kind = run.fragment_bytes, part.stored_bytes, part.num_writers, part.writer_index
                alike.setdefault(kind, []).extend(
                    (ref.tensor_index, local, ref_offset + stored)
                    for local, stored in run.fragments()
                )
        found = []
        for kind, places in alike.items():
            tensors, local, stored = zip(*places, strict=True)
            found.append(
                _Pieces(*kind, tensors, np.array(local, np.int64), np.array(stored, np.int64))
            )
        return tuple(found)

    def unwritten_ranges(self, slot_offset: int, num_positions: int) -> Iterator[tuple[int, int]]:
        """Byte ranges `(offset, length)` of the first `num_positions` blocks of a chunk.

        Whole stored pages, other ranks' bytes too: nobody has those blocks, so all clear the same.
        """
        for ref, ref_offset in zip(self.refs, self.ref_offsets, strict=True):
            if num_positions:
                yield slot_offset + ref_offset, num_positions * ref.stored_bytes


class BlockPlaces(NamedTuple):
    """Blocks of one group and their places; four arrays, `(num_blocks,)` int64.

    Args:
        block_ids: The engine's block ids.
        slot_offsets: Byte offset in the region of the slot of the block's chunk.
        positions: Index of the block in its chunk, below `blocks_per_chunk`.
        turns: Whose turn it is to write the chunk, among ranks with the same bytes.
    """

    block_ids: Offsets
    slot_offsets: Offsets
    positions: Offsets
    turns: Offsets


class Fragments(NamedTuple):
    """Pages, or pieces of pages, of one size to copy; engine `[i, j]` belongs to region `[i, j]`.

    Args:
        page_bytes: Bytes of each.
        engine: `(num_blocks, num_pieces)` offsets in the engine's address span.
        region: `(num_blocks, num_pieces)` offsets in the region.
    """

    page_bytes: int
    engine: Offsets
    region: Offsets


def pair_store(
    num_blocks: int, first_block_index: int, num_chunks: int, blocks_per_chunk: int
) -> int | None:
    """The position of the first block of a store in the first chunk, or None when unknowable.

    Args:
        num_blocks: Blocks handed over for this group.
        first_block_index: Logical index of the first of them in its request.
        num_chunks: Chunks to be stored in this group.
        blocks_per_chunk: Blocks in a whole chunk.

    Returns:
        `p`: blocks fill the chunks in order from position `p` of the first chunk, and the last
        chunk to its end. None: blocks are missing in the middle, nobody can say where.

    Raises:
        Bug: More blocks than the chunks can hold, or fewer than chunks.
    """
    position = first_block_index % blocks_per_chunk if num_chunks else 0
    missing = num_chunks * blocks_per_chunk - position - num_blocks
    if missing < 0 or num_blocks < num_chunks:
        raise Bug(
            f"store of {num_chunks} chunks of {blocks_per_chunk} blocks was given {num_blocks} "
            f"blocks from position {position} on"
        )
    return position if missing == 0 else None


def pair_load(
    num_blocks: int, first_block_index: int, num_chunks: int, blocks_per_chunk: int
) -> int:
    """The position of the first block of a load in the first chunk.

    Blocks of a load are contiguous; the last chunk may be needed only in part.

    Raises:
        Bug: The blocks do not end in the last of the chunks.
    """
    position = first_block_index % blocks_per_chunk if num_blocks else 0
    if -(-(position + num_blocks) // blocks_per_chunk) != num_chunks:
        raise Bug(
            f"load of {num_blocks} blocks from position {position} on does not end in the last "
            f"of {num_chunks} chunks of {blocks_per_chunk} blocks"
        )
    return position


def place(
    block_ids: Offsets,
    slot_offsets: Offsets,
    first_position: int,
    blocks_per_chunk: int,
    first_turn: int = 0,
) -> BlockPlaces:
    """Give each block its slot and position, in order from `first_position` of the first slot.

    Args:
        block_ids: `(num_blocks,)`.
        slot_offsets: `(num_chunks,)`, in the order of the chunks.
        first_position: From `pair_store` or `pair_load`.
        blocks_per_chunk: Blocks in a whole chunk.
        first_turn: Of the first chunk; the others follow.
    """
    chunk_indices, positions = np.divmod(
        np.arange(first_position, first_position + len(block_ids), dtype=np.int64),
        blocks_per_chunk,
    )
    return BlockPlaces(
        block_ids, slot_offsets[chunk_indices], positions, chunk_indices + first_turn
    )


def fragments(
    group: GroupGeometry,
    tensors: Sequence[TensorGeometry],
    places: BlockPlaces,
    region_bytes: int,
    *,
    is_store: bool = False,
) -> list[Fragments]:
    """The pages to copy for `places`, one entry per kind of piece, every offset checked.

    Args:
        group: Stored layout of the group.
        tensors: The engine's tensors, indexed by `PageRef.tensor_index`.
        places: From `place`.
        region_bytes: Size of the region; nothing outside it is named.
        is_store: Leave out what is another rank's turn to write; a load reads everything.

    Raises:
        Bug: A block outside its tensor, or a chunk that reaches outside the region.

    Cost: a few numpy calls per kind of piece, independent of page size.
    """
    block_ids, slot_offsets, positions, turns = places
    if not len(block_ids):
        return []
    lowest, highest = int(slot_offsets.min()), int(slot_offsets.max())
    end_bytes = group.offset_bytes + group.payload_bytes
    if lowest < 0 or highest + end_bytes > region_bytes:
        raise Bug(
            f"slot offsets {lowest}..{highest} with chunks of {end_bytes} bytes reach "
            f"outside the region of {region_bytes} bytes"
        )
    num_blocks = min(tensors[ref.tensor_index].num_blocks for ref in group.refs)
    if int(block_ids.min()) < 0 or int(block_ids.max()) >= num_blocks:
        raise Bug(f"block ids {block_ids.min()}..{block_ids.max()}, but blocks are {num_blocks}")
    found = []
    for pieces in group.pieces:
        ids, slots, at = block_ids, slot_offsets, positions
        if is_store and pieces.num_writers > 1:
            mine = turns % pieces.num_writers == pieces.writer_index
            ids, slots, at = ids[mine], slots[mine], at[mine]
            if not len(ids):
                continue
        places_of = [tensors[index] for index in pieces.tensor_indices]
        bases = np.array([tensor.base_bytes for tensor in places_of], np.int64)
        strides = np.array([tensor.block_stride_bytes for tensor in places_of], np.int64)
        engine = ids[:, None] * strides + (bases + pieces.local_offsets)
        region = (slots + at * pieces.stored_page_bytes)[:, None] + pieces.stored_offsets
        found.append(Fragments(pieces.piece_bytes, engine, region))
    return found
