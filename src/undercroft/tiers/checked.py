"""A checksum round any tier: what comes back is what went in, or a dropped chunk."""

from __future__ import annotations

import threading
from contextlib import suppress

from undercroft.errors import ConfigError, CorruptChunk, FormatTooNew, KvError
from undercroft.keys import MAX_KEY_BYTES, ChunkKey, Namespace
from undercroft.tiers import frame
from undercroft.tiers.base import Tier
from undercroft.tiers.wrapping import WrappingTier

__all__ = ["Checked"]

_MAX_SUSPECTS = 4096
_EPOCH = 0
"""Epochs are the inner tier's business, if it has them: what it serves is of the right one."""


class Checked(WrappingTier):
    """Stores the header of `undercroft.tiers.frame` before each chunk's bytes, and verifies both.

    A chunk that fails the check is deleted from the inner tier; if even that fails, its key is
    remembered as bad until a write replaces it.

    Args:
        inner: The tier to be trusted no further than its bytes.
        namespace: Whose chunks these are, if several namespaces may meet in `inner`.

    Threads: any. Cost: a copy of the chunk each way, and one xxh3 pass. `out` stays as it was on
    any failure.
    """

    overhead_bytes = frame.HEADER_BYTES

    def __init__(self, inner: Tier, *, namespace: Namespace | None = None) -> None:
        super().__init__(inner)
        self._namespace = namespace.digest if namespace else bytes(32)
        self._lock = threading.Lock()
        self.suspects: dict[ChunkKey, None] = {}

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        return key not in self.suspects and bool(self.inner.contains(key))

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`; a later format raises `FormatTooNew` and is left in place."""
        if key in self.suspects:
            return False
        record = memoryview(bytearray(frame.HEADER_BYTES + out.nbytes))
        if not self.inner.read_into(key, record):
            return False
        payload = record[frame.HEADER_BYTES :]
        try:
            self._verify(key, record[: frame.HEADER_BYTES], payload)
        except CorruptChunk as exc:
            self._drop(key)
            raise CorruptChunk(
                f"tier {self.name!r} gave back a chunk that was dropped: {exc}",
                tier=self.name,
                key=key,
            ) from exc
        except FormatTooNew as exc:
            exc.tier, exc.key = self.name, key
            raise
        out[:] = payload
        return True

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        self.write(key, data, None)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        """As `write_from`; for `epoch` if one is given."""
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} fit the stored format",
                tier=self.name,
            )
        record = memoryview(bytearray(frame.HEADER_BYTES + data.nbytes))
        payload = record[frame.HEADER_BYTES :]
        payload[:] = data
        head = frame.Frame(key, self._namespace, _EPOCH, 0, len(payload), frame.checksum(payload))
        frame.pack(head, record[: frame.HEADER_BYTES])
        if key in self.suspects:
            self.inner.delete(key)
        written = self.pass_on(key, record, epoch)
        self._forgive(key)
        return written

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self.inner.delete(key)
        self._forgive(key)

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()

    def _verify(self, key: ChunkKey, block: memoryview, payload: memoryview) -> None:
        frame.verify(block, payload, key=key, namespace=self._namespace, epoch=_EPOCH)

    def _drop(self, key: ChunkKey) -> None:
        with self._lock:
            self.suspects[key] = None
            if len(self.suspects) > _MAX_SUSPECTS:
                del self.suspects[next(iter(self.suspects))]
        with suppress(KvError, OSError):
            self.delete(key)

    def _forgive(self, key: ChunkKey) -> None:
        if self.suspects:
            with self._lock:
                self.suspects.pop(key, None)
