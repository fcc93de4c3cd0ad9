"""A map from chunk keys to small integers that never stalls its thread.

One plain dict of a million keys is rehashed in one go when it grows, which takes a tenth of a
second on the thread that inserts. Here the keys are spread over `NUM_SHARDS` dicts, so that the
largest single rehash is that of one shard. A dict from `bytes` to `int` is invisible to Python's
garbage collector (up to CPython 3.13), so a full collection costs the same with a million keys as
with none.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["NUM_SHARDS", "SHARD_SHIFT", "KeyTable"]

NUM_SHARDS = 1024
SHARD_SHIFT = 54
"""`hash(key) >> SHARD_SHIFT` is the key's shard: -512..511, a valid index, negative or not.

The *high* bits, because a dict finds its slots by the low ones: a shard whose keys agreed in them
would be one long chain of collisions. Hashed rather than a byte of the key, because keys are
opaque and may all start alike.
"""


class KeyTable:
    """Bytes keys to non-negative integers, in no promised order.

    Memory: 38-75 bytes a key beyond the key itself, the integer (32 bytes unless shared) aside,
    and 120 kB when empty. Threads: one. Cost: each call one dict lookup in a shard, unless said
    otherwise; at a million keys the longest single insert rehashes about 1,400 of them.

    Hot loops may spare themselves the call: `table.shards[hash(key) >> SHARD_SHIFT]` is an
    ordinary dict that may be read and written.
    """

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]

    def shard(self, key: bytes) -> dict[bytes, int]:
        """The dict that `key` is in, or would be."""
        return self.shards[hash(key) >> SHARD_SHIFT]

    def get(self, key: bytes, default: int = -1) -> int:
        """The value of `key`, or `default`."""
        return self.shards[hash(key) >> SHARD_SHIFT].get(key, default)

    def set(self, key: bytes, value: int) -> None:
        """Give `key` a value, new or not."""
        self.shards[hash(key) >> SHARD_SHIFT][key] = value

    def pop(self, key: bytes, default: int = -1) -> int:
        """Remove `key`; its value, or `default` where it was absent."""
        return self.shards[hash(key) >> SHARD_SHIFT].pop(key, default)

    def __contains__(self, key: bytes) -> bool:
        return key in self.shards[hash(key) >> SHARD_SHIFT]

    def __len__(self) -> int:
        """Number of keys. Cost: `NUM_SHARDS` additions, some 20 us."""
        return sum(map(len, self.shards))

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every pair once, lazily. Changing the table invalidates the iterator."""
        for shard in self.shards:
            yield from shard.items()

    def clear(self) -> None:
        """Forget every key. Cost: O(number of keys), some 50 ms a million."""
        for shard in self.shards:
            shard.clear()
