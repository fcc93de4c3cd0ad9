"""A tier round a tier of which some chunks take a way of their own, also those of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from undercroft.keys import ChunkKey
from undercroft.testing.injectors import READ, WRITE
from undercroft.tiers.base import Ends, Tier
from undercroft.tiers.wrapping import WrappingTier

__all__ = ["Act", "Choose", "Chunkwise"]

Act = Callable[[memoryview | None, int | None], bool]
"""Does one call; told of the chunk's buffer and of the epoch, where the verb has such."""

Choose = Callable[[str, ChunkKey], Act | None]


class Chunkwise(WrappingTier):
    """Asks of each chunk whether it goes its own way, or straight on to the inner tier.

    Alone in a batch, too: each such chunk has a thread, so that one that hangs holds up no other,
    as in a tier that is `Batched` itself; the others are given to the inner tier in one call. Which
    ones is decided in the order of the batch, before any of them is moved.

    Args:
        inner: The tier inside.
        choose: Told of the verb and the key: what is done instead, perhaps with `straight`; it
            returns and raises what the verb would. None: the chunk goes straight on.
    """

    def __init__(self, inner: Tier, choose: Choose) -> None:
        super().__init__(inner)
        self._choose = choose
        self.on_close: Callable[[], None] | None = None

    def straight(
        self, verb: str, key: ChunkKey, data: memoryview | None, epoch: int | None
    ) -> bool:
        """Done by the inner tier."""
        if verb == READ:
            return bool(self.inner.read_into(key, data))
        if verb == WRITE and data is not None:
            return self.pass_on(key, data, epoch)
        if verb == "contains":
            return bool(self.inner.contains(key))
        self.inner.delete(key)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        return self._one("contains", key)

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        return self._one(READ, key, out)

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        self.write(key, data, None)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        """As `write_from`; for `epoch` if one is given."""
        return self._one(WRITE, key, data, epoch)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self._one("delete", key)

    def close(self) -> None:
        """See `Tier.close`."""
        try:
            self.inner.close()
        finally:
            if self.on_close is not None:
                self.on_close()

    def read_many(self, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> Iterator[Ends]:
        """See `Batched.read_many`."""
        return self._many(READ, [(key, out, None) for key, out in wanted], self._read_rest)

    def write_many(
        self, given: Sequence[tuple[ChunkKey, memoryview, int | None]]
    ) -> Iterator[Ends]:
        """See `Batched.write_many`."""
        return self._many(WRITE, given, self.inner.write_many)

    def delete_many(self, keys: Sequence[ChunkKey]) -> Iterator[Ends]:
        """See `Batched.delete_many`."""
        return self._many("delete", [(key, None, None) for key in keys], self._delete_rest)

    def _read_rest(self, rest: Sequence[tuple[ChunkKey, Any, Any]]) -> Iterator[Ends]:
        ends: Iterator[Ends] = self.inner.read_many([(key, out) for key, out, _ in rest])
        return ends

    def _delete_rest(self, rest: Sequence[tuple[ChunkKey, Any, Any]]) -> Iterator[Ends]:
        ends: Iterator[Ends] = self.inner.delete_many([key for key, _, _ in rest])
        return ends

    def _one(
        self, verb: str, key: ChunkKey, data: memoryview | None = None, epoch: int | None = None
    ) -> bool:
        act = self._choose(verb, key)
        return self.straight(verb, key, data, epoch) if act is None else act(data, epoch)

    def _many(
        self,
        verb: str,
        given: Sequence[tuple[ChunkKey, memoryview | None, int | None]],
        rest_of: Callable[[Sequence[Any]], Iterator[Ends]],
    ) -> Iterator[Ends]:
        acts = [self._choose(verb, key) for key, _, _ in given]
        rest = [index for index, act in enumerate(acts) if act is None]
        ends: SimpleQueue[Ends] = SimpleQueue()

        def go(index: int, act: Act) -> None:
            end: bool | Exception
            try:
                end = act(*given[index][1:])
            except Exception as exc:  # noqa: BLE001 - each chunk has an end of its own
                end = exc
            ends.put([(index, end)])

        alone = [
            threading.Thread(target=go, args=(index, act), daemon=True)
            for index, act in enumerate(acts)
            if act is not None
        ]
        for thread in alone:
            thread.start()
        try:
            if rest:
                for some in rest_of([given[index] for index in rest]):
                    yield [(rest[index], end) for index, end in some]
            for _ in alone:
                yield ends.get()
        finally:
            for thread in alone:  # it has a buffer of the caller's
                thread.join()
