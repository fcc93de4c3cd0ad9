"""A queue of keys with O(1) moves, cheap in memory and unseen by the garbage collector.

What queue policies (LRU, ARC, 2Q, ...) are built from. A queue is a chain of *segments*; a segment
is a plain dict that holds up to `SEGMENT_KEYS` keys in order of arrival. One table tells a key's
segment. To move a key is to delete it from its segment and to append it to the newest one: small
dict operations in C, in place of the ten array accesses of an intrusive linked list in Python, and
no second table is needed to get from a list position back to the key. A key's value in its segment
is its *mark*, a small number that costs nothing: "visited" to SIEVE, "freq" to S3-FIFO.

Segments thin out as keys move away. For every segment that a queue opens it visits
`VISITS_PER_SEGMENT` neighbouring pairs and joins those that fit into one, so that the number of
segments stays in proportion to the number of keys and no call does more than a fixed amount of
work.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from undercroft.errors import Bug
from undercroft.key_table import SHARD_SHIFT, KeyTable
from undercroft.keys import ChunkKey

__all__ = ["MAX_PASSED", "SEGMENT_KEYS", "VISITS_PER_SEGMENT", "KeyQueue", "SegmentStore"]

SEGMENT_KEYS = 170  # a CPython dict of 256 slots holds exactly this many: no slack to pay for
VISITS_PER_SEGMENT = 4
MAX_PASSED = 1024
"""Marked keys in a row that one call passes; half a millisecond's worth. The next one goes, marked
or not: of a thousand keys that were used, one too many."""


class SegmentStore:
    """The segments of one or more queues, by index, and the table from key to segment index.

    A key is in at most one of the queues that share a store.
    """

    __slots__ = ("free", "keys", "next", "owner", "prev", "table")

    def __init__(self) -> None:
        self.table = KeyTable()
        self.keys: list[dict[ChunkKey, int]] = []  # to the mark
        self.owner: list[int] = []  # queue_id of the queue that the segment belongs to
        self.prev: list[int] = []  # older neighbour, -1: none
        self.next: list[int] = []  # newer neighbour, -1: none
        self.free: list[int] = []  # indexes to use again

    def open(self, queue_id: int, prev: int) -> int:
        """Index of a new, empty segment that follows `prev`."""
        if self.free:
            index = self.free.pop()
            self.keys[index] = {}
            self.owner[index] = queue_id
            self.prev[index] = prev
            self.next[index] = -1
        else:
            index = len(self.keys)
            self.keys.append({})
            self.owner.append(queue_id)
            self.prev.append(prev)
            self.next.append(-1)
        if prev >= 0:
            self.next[prev] = index
        return index

    def owner_of(self, key: ChunkKey) -> int:
        """`queue_id` of the queue that `key` is in, or -1."""
        index = self.table.shards[hash(key) >> SHARD_SHIFT].get(key, -1)
        return -1 if index < 0 else self.owner[index]

    def mark(self, key: ChunkKey, most: int = 1) -> int:
        """Raise the mark of `key` by one, up to `most`; returns as `owner_of` does."""
        index = self.table.shards[hash(key) >> SHARD_SHIFT].get(key, -1)
        if index < 0:
            return -1
        segment = self.keys[index]
        mark = segment[key]
        if mark < most:
            segment[key] = mark + 1
        return self.owner[index]


class KeyQueue:
    """Keys, oldest first.

    Args:
        store: Shared by queues between which keys move; its own where left out.
        queue_id: Names the queue within the store.

    Memory: 65-130 bytes a key beyond the key itself. Threads: one. Cost: O(1) each call; the
    longest joins `VISITS_PER_SEGMENT` pairs of segments.
    """

    __slots__ = (
        "_cursor",
        "_head",
        "_queue_id",
        "_segments",
        "_shards",
        "_store",
        "_tail",
        "_tail_index",
    )

    def __init__(self, store: SegmentStore | None = None, queue_id: int = 0) -> None:
        self._store = SegmentStore() if store is None else store
        self._queue_id = queue_id
        index = self._store.open(queue_id, -1)
        self._head = self._cursor = self._tail_index = index
        # What every call needs, one attribute away.
        self._shards = self._store.table.shards
        self._segments = self._store.keys
        self._tail = self._segments[index]

    def push(self, key: ChunkKey) -> None:
        """Append `key`.

        Raises:
            Bug: The key is in a queue of this store already.
        """
        shard = self._shards[hash(key) >> SHARD_SHIFT]
        if key in shard:
            raise Bug(f"key {key.hex()} is queued already")
        tail = self._tail
        if len(tail) >= SEGMENT_KEYS:
            tail = self._open()
        tail[key] = 0
        shard[key] = self._tail_index

    def pull(self, key: ChunkKey, source: KeyQueue | None = None, mark: int = 0) -> None:
        """Take `key` out of the queue that it is in and append it to this one.

        Args:
            key: In `source`.
            source: A queue of the same store; this one if left out: then `key` becomes the newest.
            mark: Its mark from now on.

        Raises:
            Bug: The key is in no queue of this store.
        """
        shard = self._shards[hash(key) >> SHARD_SHIFT]
        try:
            index = shard[key]
        except KeyError:
            raise Bug(f"key {key.hex()} is in no queue") from None
        segment = self._segments[index]
        del segment[key]
        if not segment:  # before `_open`, which may join it with another
            (self if source is None else source)._close(index)  # noqa: SLF001 - its own class
        tail = self._tail
        if len(tail) >= SEGMENT_KEYS:
            tail = self._open()
        tail[key] = mark
        shard[key] = self._tail_index

    def remove(self, key: ChunkKey) -> None:
        """Take `key`, which must be in this queue, out.

        Raises:
            Bug: The key is in no queue of this store.
        """
        index = self._shards[hash(key) >> SHARD_SHIFT].pop(key, -1)
        if index < 0:
            raise Bug(f"key {key.hex()} is in no queue")
        segment = self._segments[index]
        del segment[key]
        if not segment:
            self._close(index)

    def discard(self, key: ChunkKey) -> None:
        """Take `key` out if it is in this queue; it must not be in another of the store's."""
        if key in self._shards[hash(key) >> SHARD_SHIFT]:
            self.remove(key)

    def pop_first(self) -> ChunkKey:
        """Take the oldest key out.

        Raises:
            Bug: The queue is empty.
        """
        for key in self._segments[self._head]:
            self.remove(key)
            return key
        raise Bug("the first key of an empty queue")

    def first(self) -> ChunkKey | None:
        """The oldest key; None if there is none."""
        return next(iter(self._segments[self._head]), None)

    def pass_marked(self, target: KeyQueue, at_most: int, *, keep: int = 0) -> int:
        """Move keys from the front to the end of `target`, down to the first that has no mark.

        Args:
            target: A queue of the same store; this one: then it ends with a key that was used up.
            at_most: Keys to move.
            keep: Of a mark, beyond the one that is taken: so much at most stays.

        Returns:
            How many were moved. `at_most` may have ended it before an unmarked key did.
        """
        for num_passed in range(at_most):
            key, mark = next(iter(self._segments[self._head].items()), (b"", 0))
            if not mark:  # or the queue is empty
                return num_passed
            target.pull(ChunkKey(key), self, min(keep, mark - 1))
        return at_most

    def lap(self, mark: int, early: set[ChunkKey]) -> Iterator[ChunkKey]:
        """The keys that have this `mark`, oldest first, lazily.

        Where more than `MAX_PASSED` in a row have a greater one, the next comes all the same, and
        goes into `early`. What is in `early` does not come again: laps from 0 up, of one `early`,
        give each key once.
        """
        num_passed = 0
        for key, its_mark in self.items():
            if its_mark < mark or key in early:
                continue
            if its_mark > mark:
                if num_passed < MAX_PASSED:
                    num_passed += 1
                    continue
                early.add(key)
            num_passed = 0
            yield key

    def marked(self, early: Container[ChunkKey]) -> Iterator[ChunkKey]:
        """What lap 0 left out, whatever the mark, oldest first, lazily."""
        return (key for key, mark in self.items() if mark and key not in early)

    def items(self) -> Iterator[tuple[ChunkKey, int]]:
        """The keys and their marks, oldest first, lazily. Any change invalidates the iterator."""
        index = self._head
        while index >= 0:
            yield from self._segments[index].items()
            index = self._store.next[index]

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether `key` is in this queue. Cost: one dict lookup."""
        return self._store.owner_of(key) == self._queue_id

    def __iter__(self) -> Iterator[ChunkKey]:
        """The keys, oldest first, lazily. Any change invalidates the iterator."""
        index = self._head
        while index >= 0:
            yield from self._segments[index]
            index = self._store.next[index]

    def runs(self, stride: int = 1) -> Iterator[Iterator[ChunkKey]]:
        """The keys in runs of at most `SEGMENT_KEYS`, as lazily; every `stride`-th run."""
        index, after = self._head, self._store.next
        while index >= 0:
            yield iter(self._segments[index])
            for _ in range(stride):
                index = after[index]
                if index < 0:
                    return

    def _open(self) -> dict[ChunkKey, int]:
        """Append a segment, having joined a few old ones."""
        for _ in range(VISITS_PER_SEGMENT):
            self._visit_pair()
        index = self._store.open(self._queue_id, self._tail_index)
        self._tail_index = index
        self._tail = self._segments[index]
        return self._tail

    def _close(self, index: int) -> None:
        """Unlink the empty segment `index`, unless it is the newest."""
        if index == self._tail_index:
            return
        store = self._store
        before, after = store.prev[index], store.next[index]
        if before >= 0:
            store.next[before] = after
        else:
            self._head = after
        store.prev[after] = before
        if self._cursor == index:
            self._cursor = after
        store.keys[index] = {}
        store.free.append(index)

    def _visit_pair(self) -> None:
        """Join the cursor's segment with the next if both fit into one, else step on."""
        index = self._cursor
        after = self._store.next[index]
        if after < 0 or after == self._tail_index:
            self._cursor = self._head
            return
        keys, more = self._segments[index], self._segments[after]
        if len(keys) + len(more) > SEGMENT_KEYS:
            self._cursor = after
            return
        for key in more:
            self._shards[hash(key) >> SHARD_SHIFT][key] = index
        self._segments[index] = {**keys, **more}
        self._close(after)
