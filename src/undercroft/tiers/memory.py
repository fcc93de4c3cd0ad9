"""Chunks in this process's own memory: real bytes, a hard bound; the reference for other tiers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from undercroft.errors import ConfigError, CorruptChunk, TierClosed, TierFull
from undercroft.keys import ChunkKey

__all__ = ["MemoryTier"]


class MemoryTier:
    """Keeps a copy of every chunk; gone with the process.

    Args:
        capacity_bytes: The bound. Only payload is charged.
        name: What errors and counters call it.

    Raises:
        ConfigError: `capacity_bytes` < 1.

    Threads: any; copies are made outside the lock. Cost: one memcpy.
    """

    def __init__(self, capacity_bytes: int, *, name: str = "memory") -> None:
        if capacity_bytes < 1:
            raise ConfigError(
                f"capacity_bytes of tier {name!r} is {capacity_bytes}: give at least 1", tier=name
            )
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, bytes] = OrderedDict()  # coldest first
        self._used_bytes = 0
        self._epoch = 0
        self._closed = False

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        self._check_open()
        return key in self._chunks

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        with self._lock:
            self._check_open()
            chunk = self._chunks.get(key)
            if chunk is None:
                return False
            if len(chunk) != out.nbytes:
                del self._chunks[key]
                self._used_bytes -= len(chunk)
                raise CorruptChunk(
                    f"tier {self.name!r} holds {len(chunk)} bytes where {out.nbytes} were asked "
                    "for: dropped",
                    tier=self.name,
                    key=key,
                )
            self._chunks.move_to_end(key)  # never out of it: `has` takes no lock
        out[:] = chunk
        return True

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        self._write(key, data, None)

    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        """See `Epochal.write_in_epoch`."""
        return self._write(key, data, epoch)

    def _write(self, key: ChunkKey, data: memoryview, wanted_epoch: int | None) -> bool:
        num_bytes = data.nbytes
        with self._lock:
            self._check_open()
            if wanted_epoch not in {None, self._epoch}:
                return False
            if key in self._chunks:
                return True
            if self._used_bytes + num_bytes > self.capacity_bytes:
                raise TierFull(
                    f"tier {self.name!r} holds {self._used_bytes} of {self.capacity_bytes} bytes: "
                    f"no room for {num_bytes}",
                    tier=self.name,
                    key=key,
                )
            self._used_bytes += num_bytes  # reserved before the copy: never above the bound
            epoch = self._epoch
        chunk: bytes | None = None
        try:
            chunk = bytes(data)
        finally:
            with self._lock:
                void = self._closed or epoch != self._epoch
                if not void and (chunk is None or key in self._chunks):
                    self._used_bytes -= num_bytes
                elif not void and chunk is not None:
                    self._chunks[key] = chunk
        return not void

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        with self._lock:
            self._check_open()
            self._used_bytes -= len(self._chunks.pop(key, b""))

    def close(self) -> None:
        """See `Tier.close`."""
        with self._lock:
            self._closed = True
            self._empty()

    def has(self, key: ChunkKey) -> bool:
        """See `Indexed.has`."""
        return key in self._chunks

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        """See `Indexed.evictable`."""
        with self._lock:
            return [(key, len(chunk)) for key, chunk in self._chunks.items()]

    def used_bytes(self) -> int:
        """See `Bounded.used_bytes`."""
        return self._used_bytes

    def free_chunks(self, num_bytes: int) -> int:
        """See `Bounded.free_chunks`."""
        return (self.capacity_bytes - self._used_bytes) // num_bytes

    def epoch(self) -> int:
        """See `Epochal.epoch`."""
        return self._epoch

    def raise_epoch(self) -> int:
        """See `Epochal.raise_epoch`."""
        with self._lock:
            self._check_open()
            self._epoch += 1
            self._empty()
            return self._epoch

    def _empty(self) -> None:
        """A write under way sees that the epoch moved on, and that its bytes are uncharged."""
        self._chunks.clear()
        self._used_bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"tier {self.name!r} is closed", tier=self.name)
