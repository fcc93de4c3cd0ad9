"""A checksum round any tier: what comes back is what went in, or a dropped chunk."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import islice

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

    A chunk that fails the check is deleted from the inner tier. If even that fails, its key is
    remembered as bad: nobody is told of the chunk any more, so nobody else would ever delete it.
    Every write and every delete tries one of them again.

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
        self._deleting = threading.Lock()  # a bad chunk: never what was written in its place
        self._num_tries = 0
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
        self._delete_a_suspect()
        if key in self.suspects:
            with self._deleting:
                self.inner.delete(key)
                self._forgive(key)
        return self.pass_on(key, record, epoch)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self.inner.delete(key)
        self._forgive(key)
        self._delete_a_suspect()

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
            self.inner.delete(key)
            self._forgive(key)

    def _delete_a_suspect(self) -> None:
        """One of those whose deletion failed, each in its turn; whether it works or not."""
        if not self.suspects or not self._deleting.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._num_tries += 1
                turn = self._num_tries % max(1, len(self.suspects))
                key = next(islice(self.suspects, turn, None), None)
            if key is not None:
                self.inner.delete(key)
                self._forgive(key)
        except Exception:  # noqa: BLE001, S110 - whatever the tier raises, it is tried again
            pass
        finally:
            self._deleting.release()

    def _forgive(self, key: ChunkKey) -> None:
        if self.suspects:
            with self._lock:
                self.suspects.pop(key, None)
