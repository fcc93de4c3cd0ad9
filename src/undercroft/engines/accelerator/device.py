"""What `DeviceMover` needs of an accelerator: streams, events, and a copy of many pieces.

`TorchDevice` is the real one, `undercroft.testing.fake_device` delays and reorders what a real one
may delay and reorder.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Addresses", "Descriptors", "Device", "Event", "Stream"]

Addresses: TypeAlias = NDArray[np.int64] | NDArray[np.uint64]


class Stream(Protocol):
    """A queue of the device: what is put in runs in order, and after the events it is to await."""

    def wait_event(self, event: Event, /) -> None:
        """Let what is put in from now on run only after what `event` was last recorded for."""
        ...


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Stream, /) -> None:
        """Put the mark into `stream`, and forget where it was before."""
        ...

    def query(self) -> bool:
        """Whether everything before the mark has ended; never waits.

        Raises:
            Exception: The device is broken, whatever its driver calls that.
        """
        ...

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds from this mark to `end`; both have been passed."""
        ...


class Descriptors(NamedTuple):
    """Room for a batch's addresses and sizes; the device may read them until the batch ends.

    Args:
        source: `(capacity,)` addresses to read from.
        target: `(capacity,)` addresses to write to.
        sizes: `(capacity,)` bytes.
        tensors: The same three as the copy operator takes them.
    """

    source: Addresses
    target: Addresses
    sizes: Addresses
    tensors: object


class Device(Protocol):
    """One accelerator, from one process. Nothing here waits for it.

    Attributes:
        piece_bytes: No copy may cross a multiple of it in the region.
    """

    piece_bytes: int

    def new_stream(self) -> Stream:
        """A stream that runs beside all others."""
        ...

    def new_event(self) -> Event:
        """An event with timing."""
        ...

    def current_stream(self) -> Stream:
        """Where the engine's own work of the calling thread goes."""
        ...

    def new_descriptors(self, capacity: int) -> Descriptors:
        """Room for a batch."""
        ...

    def copy(
        self,
        stream: Stream,
        batch: Descriptors,
        num_copies: int,
        *,
        to_device: bool,
        in_any_order: bool,
    ) -> None:
        """Put the first `num_copies` of `batch` into `stream`, as one call.

        Args:
            stream: From `new_stream`.
            batch: Filled in.
            num_copies: How many of its entries count.
            to_device: From the region into engine blocks; otherwise the other way.
            in_any_order: Nobody writes the sources: they may be read at once, before what precedes
                in the stream has ended.

        Raises:
            Exception: The copies were refused, as a whole or in part.
        """
        ...

    def copy_singly(
        self, stream: Stream, batch: Descriptors, num_copies: int, *, to_device: bool
    ) -> None:
        """As `copy`, one by one by another way: slow, with nothing clever to go wrong."""
        ...

    def close(self) -> bool:
        """Let go of all memory; no copy is under way any more.

        Returns:
            False if the driver does not let go of the region: it must stay mapped.
        """
        ...
