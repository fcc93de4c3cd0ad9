"""A checksum round any tier: what comes back is what went in, or a dropped chunk."""

from __future__ import annotations

import struct
import threading
from contextlib import suppress

import xxhash

from undercroft.errors import ConfigError, CorruptChunk, FormatTooNew, KvError
from undercroft.keys import MAX_KEY_BYTES, ChunkKey, Namespace
from undercroft.tiers.base import Tier
from undercroft.tiers.wrapping import WrappingTier

__all__ = ["Checked"]

_MAGIC = b"UcCk"
_FORMAT = 1
_PREFIX = struct.Struct("<4sHH")  # magic, format, ~format: readable in every format
_BODY = struct.Struct(f"<B7xQ16s{MAX_KEY_BYTES}s")  # key length, payload length, namespace, key
_DIGEST_BYTES = 16  # xxh3-128 over prefix, body and payload
_HEADER_BYTES = 128
_DIGEST_AT = _PREFIX.size + _BODY.size
_PADDING = bytes(_HEADER_BYTES - _DIGEST_AT - _DIGEST_BYTES)
_MAX_BAD_KEYS = 4096


class Checked(WrappingTier):
    """Stores a header (format, key, namespace, length, xxh3-128) before each chunk's bytes.

    A chunk that fails the check is deleted from the inner tier; if even that fails, its key is
    remembered as bad until a write replaces it.

    Args:
        inner: The tier to be trusted no further than its bytes.
        namespace: Whose chunks these are, if several namespaces may meet in `inner`.

    Cost: a copy of the chunk each way, and one xxh3 pass. `out` stays as it was on any failure.
    """

    overhead_bytes = _HEADER_BYTES

    def __init__(self, inner: Tier, *, namespace: Namespace | None = None) -> None:
        super().__init__(inner)
        self._namespace = namespace.digest[:16] if namespace else bytes(16)
        self._lock = threading.Lock()
        self._bad: dict[ChunkKey, None] = {}
        self.suspects = self._bad

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        return key not in self._bad and bool(self.inner.contains(key))

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`; a later format raises `FormatTooNew` and is left in place."""
        if key in self._bad:
            return False
        frame = bytearray(_HEADER_BYTES + out.nbytes)
        if not self.inner.read_into(key, memoryview(frame)):
            return False
        why = self._fault(key, frame)
        if why is not None:
            self._drop(key)
            raise CorruptChunk(
                f"tier {self.name!r} gave back a chunk with {why}: dropped",
                tier=self.name,
                key=key,
            )
        out[:] = memoryview(frame)[_HEADER_BYTES:]
        return True

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        frame = bytearray(_HEADER_BYTES + data.nbytes)
        frame[_HEADER_BYTES:] = data
        head = self._head(key, data.nbytes)
        frame[:_DIGEST_AT] = head
        frame[_DIGEST_AT:_HEADER_BYTES] = (
            _digest(head, memoryview(frame)[_HEADER_BYTES:]) + _PADDING
        )
        if key in self._bad:
            self.inner.delete(key)
        self.inner.write_from(key, memoryview(frame))
        self._forgive(key)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self.inner.delete(key)
        self._forgive(key)

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()

    def _head(self, key: ChunkKey, num_bytes: int) -> bytes:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are possible", tier=self.name
            )
        return _PREFIX.pack(_MAGIC, _FORMAT, _FORMAT ^ 0xFFFF) + _BODY.pack(
            len(key), num_bytes, self._namespace, key
        )

    def _fault(self, key: ChunkKey, frame: bytearray) -> str | None:
        """What is wrong with `frame`, or None."""
        magic, version, inverse = _PREFIX.unpack_from(frame)
        if magic != _MAGIC or version ^ 0xFFFF != inverse:
            return "no header of ours"
        if version > _FORMAT:
            raise FormatTooNew(
                f"tier {self.name!r} holds a chunk of format {version}; this version reads up to "
                f"{_FORMAT}: update, or use another place",
                tier=self.name,
                key=key,
            )
        payload = memoryview(frame)[_HEADER_BYTES:]
        head = self._head(key, payload.nbytes)
        if frame[:_DIGEST_AT] != head:
            return "the key, namespace or length of another"
        if frame[_DIGEST_AT:_HEADER_BYTES] != _digest(head, payload) + _PADDING:
            return "a wrong checksum"
        return None

    def _drop(self, key: ChunkKey) -> None:
        with self._lock:
            self._bad[key] = None
            if len(self._bad) > _MAX_BAD_KEYS:
                del self._bad[next(iter(self._bad))]
        with suppress(KvError, OSError):
            self.delete(key)

    def _forgive(self, key: ChunkKey) -> None:
        if self._bad:
            with self._lock:
                self._bad.pop(key, None)


def _digest(head: bytes, payload: memoryview) -> bytes:
    return xxhash.xxh3_128(head + xxhash.xxh3_128_digest(payload)).digest()
