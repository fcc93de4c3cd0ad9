"""Which bytes of a rank's page are which bytes of the stored page, and the proof that none is lost.

A rank's page is the bytes of one block of one layer on that rank. The stored page is what the slot
holds of it: the same bytes (direct), or the page as if there were one rank (canonical).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from undercroft.errors import LayoutMismatch

__all__ = ["CopyRun", "PageMap", "check_ranks", "coalesce", "is_writer"]


class CopyRun(NamedTuple):
    """`num_fragments` pieces of `fragment_bytes`, evenly spaced in both pages."""

    local_offset: int
    stored_offset: int
    fragment_bytes: int
    num_fragments: int
    local_stride: int
    stored_stride: int

    def fragments(self) -> Iterator[tuple[int, int]]:
        """Each piece's offset in the rank's page and in the stored page."""
        for index in range(self.num_fragments):
            yield (
                self.local_offset + index * self.local_stride,
                self.stored_offset + index * self.stored_stride,
            )


def coalesce(runs: Iterable[CopyRun]) -> tuple[CopyRun, ...]:
    """The same bytes in as few pieces as they allow, and those in as few runs.

    Pieces that touch on both sides become one; equal pieces that follow at one distance on each
    side become one run. The result depends on the bytes only, not on how `runs` said it.
    """
    pieces = sorted(
        (local, stored, run.fragment_bytes) for run in runs for local, stored in run.fragments()
    )
    whole: list[tuple[int, int, int]] = []
    for local, stored, size in pieces:
        if whole and (local - whole[-1][0], stored - whole[-1][1]) == (whole[-1][2],) * 2:
            whole[-1] = (*whole[-1][:2], whole[-1][2] + size)
        else:
            whole.append((local, stored, size))
    found: list[CopyRun] = []
    for local, stored, size in whole:
        last = found[-1] if found else None
        if last is not None and last.fragment_bytes == size:
            is_second = last.num_fragments == 1
            steps = (
                local - last.local_offset - (last.num_fragments - 1) * last.local_stride,
                stored - last.stored_offset - (last.num_fragments - 1) * last.stored_stride,
            )
            if is_second or steps == (last.local_stride, last.stored_stride):
                strides = _first_steps(last, local, stored) if is_second else steps
                found[-1] = CopyRun(*last[:3], last.num_fragments + 1, *strides)
                continue
        found.append(CopyRun(local, stored, size, 1, size, size))
    return tuple(found)


def _first_steps(run: CopyRun, local: int, stored: int) -> tuple[int, int]:
    return local - run.local_offset, stored - run.stored_offset


def is_writer(turn: int, num_writers: int, writer_index: int) -> bool:
    """Whether this rank writes the pages of the chunk whose turn it is.

    Ranks with equal bytes take turns by a number that all of them see alike.
    """
    return turn % num_writers == writer_index


@dataclass(frozen=True)
class PageMap:
    """One rank's page in the stored page.

    Args:
        local_bytes: Length of the rank's page, without padding.
        stored_bytes: Length of the stored page.
        runs: The correspondence; together they cover the rank's page exactly once.
        num_writers: Ranks that hold these very bytes and take turns in writing them.
        writer_index: This rank's number among them.
        is_portable: The stored page is the same under every topology that certifies it.
        why: What keeps it from being portable; empty if it is.

    Raises:
        LayoutMismatch: The runs do not cover the page exactly once, reach outside the stored page
            or overlap there, or the writer's number cannot be.
    """

    local_bytes: int
    stored_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int = 1
    writer_index: int = 0
    is_portable: bool = False
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.writer_index < self.num_writers:
            raise LayoutMismatch(f"writer {self.writer_index} of {self.num_writers} writers")
        local, stored = self._spans(is_stored=False), self._spans(is_stored=True)
        if not _tiles(local, self.local_bytes):
            raise LayoutMismatch(
                f"copy runs do not cover a page of {self.local_bytes} bytes exactly once: {local}"
            )
        is_disjoint = all(before[1] <= after[0] for before, after in pairwise(stored))
        if not is_disjoint or stored[0][0] < 0 or stored[-1][1] > self.stored_bytes:
            raise LayoutMismatch(
                f"copy runs overlap in, or reach outside, a stored page of {self.stored_bytes} "
                f"bytes: {stored}"
            )

    @classmethod
    def whole(cls, num_bytes: int, *, is_portable: bool = False, why: str = "") -> PageMap:
        """A page that is stored as it is.

        Raises:
            LayoutMismatch: It has no bytes.
        """
        run = CopyRun(0, 0, num_bytes, 1, num_bytes, num_bytes)
        return cls(num_bytes, num_bytes, (run,), is_portable=is_portable, why=why)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the stored page is this page, byte for byte."""
        return self.stored_bytes == self.local_bytes and all(
            local == stored for run in self.runs for local, stored in run.fragments()
        )

    def stored_spans(self) -> list[tuple[int, int]]:
        """The stored page's bytes that this rank has: `(start, end)`, ascending."""
        return self._spans(is_stored=True)

    def _spans(self, *, is_stored: bool) -> list[tuple[int, int]]:
        return sorted(
            (places[is_stored], places[is_stored] + run.fragment_bytes)
            for run in self.runs
            for places in run.fragments()
        )


def _tiles(spans: Sequence[tuple[int, int]], num_bytes: int) -> bool:
    """Whether ascending spans cover `num_bytes` exactly once."""
    is_joined = all(before[1] == after[0] for before, after in pairwise(spans))
    return (
        bool(spans)
        and num_bytes > 0
        and is_joined
        and (spans[0][0], spans[-1][1])
        == (
            0,
            num_bytes,
        )
    )


def check_ranks(maps: Sequence[PageMap]) -> None:
    """Prove that whoever writes, each byte of the stored page is written exactly once.

    Args:
        maps: Of one page, from all ranks that have part of it.

    Raises:
        LayoutMismatch: Under some choice of writers it is not.
    """
    shapes = {(page.stored_bytes, page.num_writers) for page in maps}
    if len(shapes) != 1:
        raise LayoutMismatch(f"ranks disagree on the stored page and its writers: {shapes}")
    ((stored_bytes, num_writers),) = shapes
    for turn in range(num_writers):
        writers = [page for page in maps if is_writer(turn, num_writers, page.writer_index)]
        spans = sorted(span for page in writers for span in page.stored_spans())
        if not _tiles(spans, stored_bytes):
            raise LayoutMismatch(
                f"the writers of turn {turn} do not write a page of {stored_bytes} bytes exactly "
                f"once: {spans}"
            )
