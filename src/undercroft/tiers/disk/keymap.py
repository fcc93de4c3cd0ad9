"""Keys to places: one integer a key, nothing the garbage collector tracks."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["KeyTable"]

_SHIFT = 56


class KeyTable:
    """Bytes keys to non-negative integers, spread over 256 dicts so that none is large to grow."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(256)]

    def get(self, key: bytes, default: int = -1) -> int:
        """The value of `key`, or `default`."""
        return self._shards[hash(key) >> _SHIFT].get(key, default)

    def set(self, key: bytes, value: int) -> None:
        """Give `key` a value, new or not."""
        self._shards[hash(key) >> _SHIFT][key] = value

    def pop(self, key: bytes, default: int = -1) -> int:
        """Remove `key`; its value, or `default`."""
        return self._shards[hash(key) >> _SHIFT].pop(key, default)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shards[hash(key) >> _SHIFT]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every pair once; changing the table meanwhile is not allowed."""
        for shard in self._shards:
            yield from shard.items()
