"""What a trace is: which blocks each request had, in columns.

A block stands for a whole prefix, so that blocks form trees: a request is the path from a root to
its deepest block. That makes a trace small: of each request only the deepest block that was seen
before is kept, and how many new ones follow it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from undercroft.errors import ConfigError
from undercroft.traces.lines import Lines

__all__ = ["Trace", "TraceBuilder", "TraceReader"]

_MAX_BLOCKS = 2**31 - 1
_MAX_REQUEST_BLOCKS = 1 << 24  # a damaged number must not fill the memory


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, in columns, `(num_requests,)` each but `parent`.

    Ids of blocks are 0, 1, 2, ... in order of first appearance; an id names a whole prefix.

    Args:
        name: For people.
        block_tokens: Tokens in a full block. The last block of a request is partly filled where
            its blocks would hold more than `input_tokens`.
        parent: `(num_blocks,)` int32: the block before this one in every request with it; -1: none.
        times_ms: int64, milliseconds since the trace's start; never falls.
        sessions: int32, -1: unknown.
        kinds: int16, what the source tells of how a request ended; 0 where it tells nothing.
        input_tokens: int64.
        output_tokens: int64.
        deepest: int32, the deepest block that an earlier request had as well; -1: none.
        first_new: int32, the first block that no earlier request had, if there is one: its id would
            be this.
        num_new: int32, how many there are, each the child of the one before.
    """

    name: str
    block_tokens: int
    parent: NDArray[np.int32]
    times_ms: NDArray[np.int64]
    sessions: NDArray[np.int32]
    kinds: NDArray[np.int16]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    deepest: NDArray[np.int32]
    first_new: NDArray[np.int32]
    num_new: NDArray[np.int32]

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.times_ms)

    @property
    def num_blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.parent)

    @cached_property
    def depth(self) -> NDArray[np.int32]:
        """`(num_blocks,)` int32: how many blocks are above each. Cost: O(requests + blocks)."""
        depth = np.empty(self.num_blocks, np.int32)
        # All new blocks of a request in one go, as they lie side by side.
        steps = np.arange(1, 1 + max(self.num_new, default=0), dtype=np.int32)
        rows = (column.tolist() for column in (self.deepest, self.first_new, self.num_new))
        for deepest, first, num_new in zip(*rows, strict=True):
            if num_new:
                above = depth[deepest] if deepest >= 0 else -1
                depth[first : first + num_new] = above + steps[:num_new]
        return depth

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """`(num_requests,)` int32: the number of blocks of each request."""
        if not self.num_blocks:
            return np.zeros(self.num_requests, np.int32)
        above = np.where(self.deepest >= 0, self.depth[self.deepest] + 1, 0)
        return (above + self.num_new).astype(np.int32)

    @cached_property
    def last(self) -> NDArray[np.int32]:
        """`(num_requests,)` int32: the last block of each request; -1 where it has none."""
        new = self.first_new + self.num_new - 1
        return np.where(self.num_new > 0, new, self.deepest).astype(np.int32)

    @property
    def num_references(self) -> int:
        """How many blocks the requests have, all together."""
        return int(self.lengths.sum(dtype=np.int64))

    def tokens_in(self, num_blocks: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Input tokens in the first so many blocks of each request, `(num_requests,)` int64."""
        return np.minimum(num_blocks.astype(np.int64) * self.block_tokens, self.input_tokens)

    def full_blocks(self) -> Trace:
        """The trace without partly filled last blocks, which an engine never stores."""
        builder = TraceBuilder(self.name, self.block_tokens)
        rows = (c.tolist() for c in (self.times_ms, self.sessions, self.kinds, self.output_tokens))
        inputs = self.input_tokens.tolist()
        for path, tokens, (time_ms, session, kind, output) in zip(
            self.iter_blocks(), inputs, zip(*rows, strict=True), strict=True
        ):
            builder.add(
                path[: tokens // self.block_tokens],
                time_ms=time_ms,
                input_tokens=tokens,
                output_tokens=output,
                session=session,
                kind=kind,
            )
        return builder.build()

    def without_kinds(self) -> Trace:
        """The trace as an engine sees it that does not say how requests end."""
        return replace(self, kinds=np.zeros_like(self.kinds))

    def blocks(self, request: int) -> list[int]:
        """The blocks of a request, root first. Cost: O(their number)."""
        path = []
        block = int(self.last[request])
        while block >= 0:
            path.append(block)
            block = int(self.parent[block])
        path.reverse()
        return path

    def iter_blocks(self) -> Iterator[list[int]]:
        """The blocks of each request in turn, root first; some 20 million blocks a second."""
        parent = self.parent.tolist()
        for block in self.last.tolist():
            path = []
            while block >= 0:
                path.append(block)
                block = parent[block]  # noqa: PLW2901 - the walk to the root
            path.reverse()
            yield path


class TraceBuilder:
    """Makes a trace of requests, one after the other.

    Args:
        name: For people.
        block_tokens: Tokens in a full block, > 0.

    Raises:
        ConfigError: `block_tokens` is not positive.

    Threads: one. Memory: some 40 bytes a request and 4 a block; `add` keeps every key besides.
    """

    def __init__(self, name: str, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"trace {name}: block_tokens is {block_tokens}; give 1 or more")
        self._name = name
        self._block_tokens = block_tokens
        self._parent = array("i")
        self._columns = {
            "times_ms": array("q"),
            "sessions": array("i"),
            "kinds": array("h"),
            "input_tokens": array("q"),
            "output_tokens": array("q"),
            "deepest": array("i"),
            "first_new": array("i"),
            "num_new": array("i"),
        }
        self._last_ms = 0
        self._ids: dict[tuple[int, Hashable], int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks so far."""
        return len(self._parent)

    @property
    def num_requests(self) -> int:
        """Requests so far."""
        return len(self._columns["times_ms"])

    def add(
        self,
        keys: Sequence[Hashable],
        *,
        time_ms: int,
        input_tokens: int | None = None,
        output_tokens: int = 0,
        session: int = -1,
        kind: int = 0,
    ) -> None:
        """Append a request whose blocks are known by keys of any kind.

        Args:
            keys: Root first. Equal keys are the same block only after the same blocks, so that a
                key may name a whole prefix or a block's own content.
            time_ms: Not before the request appended last.
            input_tokens: Those of its blocks, all full, where left out.
            output_tokens: What it generated.
            session: Its session's number; -1: unknown.
            kind: See `Trace`.

        Raises:
            ValueError: See `add_path`.
        """
        ids, block, num_known = self._ids, -1, 0
        for key in keys:
            known = ids.get((block, key), -1)
            if known < 0:
                break
            block, num_known = known, num_known + 1
        first = self.num_blocks
        self.add_path(
            block,
            len(keys) - num_known,
            time_ms=time_ms,
            input_tokens=len(keys) * self._block_tokens if input_tokens is None else input_tokens,
            output_tokens=output_tokens,
            session=session,
            kind=kind,
        )
        for new, key in enumerate(keys[num_known:], first):
            ids[block, key] = new
            block = new

    def add_path(  # noqa: PLR0913 - a record of many fields
        self,
        deepest: int,
        num_new: int,
        *,
        time_ms: int,
        input_tokens: int,
        output_tokens: int = 0,
        session: int = -1,
        kind: int = 0,
    ) -> None:
        """Append a request: the path to block `deepest` (-1: none), and `num_new` new blocks.

        Raises:
            ValueError: A number is out of range, or time went back; nothing was appended.
        """
        first = self.num_blocks
        if not -1 <= deepest < first:
            raise ValueError(f"block {deepest} is none of the {first} blocks before it")
        if not 0 <= num_new <= min(_MAX_REQUEST_BLOCKS, _MAX_BLOCKS - first):
            raise ValueError(
                f"{num_new} new blocks after {first}: a request has 0 to {_MAX_REQUEST_BLOCKS}, a "
                f"trace {_MAX_BLOCKS} at most"
            )
        if time_ms < self._last_ms:
            raise ValueError(f"its time, {time_ms} ms, is before {self._last_ms} ms")
        row = (time_ms, session, kind, input_tokens, output_tokens, deepest, first, num_new)
        size = self.num_requests
        try:
            for column, value in zip(self._columns.values(), row, strict=True):
                column.append(value)
        except OverflowError:
            for column in self._columns.values():
                del column[size:]
            raise ValueError(f"a number is too large: {row}") from None
        self._last_ms = time_ms
        if num_new:
            self._parent.append(deepest)
            self._parent.extend(range(first, first + num_new - 1))

    def build(self) -> Trace:
        """All that was appended, as a trace; what is appended later is not in it."""
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            parent=np.array(self._parent, np.int32),
            times_ms=np.array(self._columns["times_ms"], np.int64),
            sessions=np.array(self._columns["sessions"], np.int32),
            kinds=np.array(self._columns["kinds"], np.int16),
            input_tokens=np.array(self._columns["input_tokens"], np.int64),
            output_tokens=np.array(self._columns["output_tokens"], np.int64),
            deepest=np.array(self._columns["deepest"], np.int32),
            first_new=np.array(self._columns["first_new"], np.int32),
            num_new=np.array(self._columns["num_new"], np.int32),
        )


class TraceReader(Protocol):
    """A format of trace files. What the entry point names is one, or a class of one."""

    name: str

    def matches(self, first_line: str) -> bool:
        """Whether a file that begins with this line is one of the format's. Never raises."""
        ...

    def read(self, lines: Lines) -> Trace:
        """The whole trace.

        Raises:
            BadTrace: A line is wrong: `lines.bad("what is wrong")` makes one that names the line.
        """
        ...
