"""The disk tier: bounded, checksummed, indexed, safe against crashes and other processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from undercroft.clock import Clock
from undercroft.errors import (
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    KvError,
    TierClosed,
    TierFull,
    TierUnavailable,
)
from undercroft.keys import MAX_KEY_BYTES, ChunkKey, Namespace
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.files import Files, translate
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.ground import Ground, Limits
from undercroft.tiers.disk.holdings import Holdings, Reservation
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.records import RecordIo, record_bytes
from undercroft.tiers.disk.root import Root
from undercroft.tiers.disk.segment import OpenSegment, OwnSegment
from undercroft.tiers.disk.table import pack_entry

__all__ = ["DiskTier"]

MIN_CAPACITY_BYTES = 12 * PAGE_BYTES
_EPOCH_AGE_S = 0.02
_EPOCH_SYNC_S = 0.001
_FOLLOW_AGE_S = 0.1
_FULL_AGE_S = 0.1
_MAX_SUSPECTS = 1024
_MAX_GROWTHS = 8

logger = logging.getLogger(__name__)


class DiskTier:
    """Chunks of one namespace on a local disk. Implements `Tier`, `Indexed`, `Bounded`, `Epochal`.

    Args:
        path: A directory; ours is `undercroft-v1` in it, shared by all processes of one user.
        name: What errors and logs call this tier.
        namespace: Whose chunks.
        capacity_bytes: All files under the root together never exceed this, of all namespaces and
            processes, earlier runs included. Every process must be given the same.
        clock: Time.
        free_space_floor_bytes: The file system is never filled beyond leaving this much free.
        num_replicas: Processes of this namespace that share the root; each gets an equal part.
        direct: Whether to bypass the page cache; None finds out what the file system takes.
        flush_interval_s: At most this much of the latest stores is lost when the power fails.
        files: The system calls; tests replace them.

    Raises:
        ConfigError: Settings that can never work. A disk that does not work *now* is no error
            here: the tier opens empty, or for reading only, and tries again as it is written to.

    Threads: any, for every method; `has`, `epoch`, `used_bytes`, `free_chunks` never wait for I/O
    of others. Source: docs/reference/format.md, v1.
    """

    def __init__(  # noqa: PLR0913 - one setting each
        self,
        path: str,
        *,
        name: str,
        namespace: Namespace,
        capacity_bytes: int,
        clock: Clock,
        free_space_floor_bytes: int = 1 << 30,
        num_replicas: int = 1,
        direct: bool | None = None,
        flush_interval_s: float = 1.0,
        files: Files | None = None,
    ) -> None:
        for setting, value, least in (
            ("capacity_bytes", capacity_bytes, MIN_CAPACITY_BYTES),
            ("free_space_floor_bytes", free_space_floor_bytes, 0),
            ("num_replicas", num_replicas, 1),
            ("flush_interval_s", flush_interval_s, 0),
        ):
            if value < least:
                raise ConfigError(f"{setting} is {value}: it must be at least {least}", tier=name)
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        files = files or Files()
        self._files = files
        self._namespace = namespace
        self._holdings = Holdings()
        self._records = RecordIo(files, namespace.digest, AlignedPool())
        limits = Limits(capacity_bytes, free_space_floor_bytes, num_replicas, direct)
        root = Root(files, str(path), namespace, clock)
        self._keeper = Keeper(Ground(files, root, self._records, self._holdings, limits))
        self._counts = {"corrupt_dropped": 0, "stale_reads": 0}
        self._suspects: set[bytes] = set()
        self._full: dict[int, tuple[float, int]] = {}
        self._closed = False
        self._must_raise = False
        self._seen_epoch = -1
        self._epoch_read_s = self._synced_s = float("-inf")
        self._followed_s = self._checked_s = self._flushed_s = float("-inf")
        self._attach_failed: tuple[float, TierUnavailable | TierFull] | None = None
        with self._keeper.shape:
            try:
                self._attach()
            except (TierUnavailable, TierFull) as exc:
                logger.warning("disk tier %r starts without its disk: %s", name, exc)

    # Tier

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        self._upkeep()
        return self.has(key)

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        self._upkeep()
        view = _flat(out)
        if not self._sync_epoch():
            return False
        found = self._holdings.pin(key)
        if found is None:
            return False
        segment, slot, epoch = found
        try:
            return self._read(segment, slot, epoch, key, view)
        finally:
            self._leave(segment, slot)

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} fit the stored format",
                tier=self.name,
            )
        view = _flat(data)
        self._upkeep(writing=True)
        if not self._sync_epoch():
            raise self._unavailable("the epoch cannot be read")
        if not self._holdings.claim(key):
            return
        try:
            self._write(self._reserve(record_bytes(len(view)), key), key, view)
        finally:
            self._holdings.unclaim(key)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`. A chunk that another process owns is forgotten here only."""
        self._check_open()
        for _ in range(2):
            found = self._holdings.pin(key)
            if found is None:
                return
            segment, slot, _ = found
            try:
                self._forget(segment, slot, key)
            except OSError as exc:
                raise self._translate(exc, "delete a chunk", key) from exc
            finally:
                self._leave(segment, slot)

    def close(self) -> None:
        """See `Tier.close`. Flushes first."""
        with self._keeper.shape:
            if self._closed:
                return
            self._closed = True
            try:
                if self._keeper.attached and not self._read_only:
                    self._keeper.flush()
            except OSError as exc:
                logger.warning("disk tier %r closed unflushed: %s", self.name, exc)
            finally:
                self._keeper.detach()

    # Indexed, Bounded, Epochal

    def has(self, key: ChunkKey) -> bool:
        """See `Indexed.has`."""
        if self._closed:
            self._check_open()
        if self._clock.now_s() - self._epoch_read_s >= _EPOCH_AGE_S:
            self._peek_epoch()
        return self._seen_epoch == self._holdings.epoch and key in self._holdings

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        """See `Indexed.evictable`: our own chunks by the time of writing."""
        self._check_open()
        return ((ChunkKey(key), size) for key, size in self._holdings.coldest_first())

    def used_bytes(self) -> int:
        """See `Bounded.used_bytes`: our segments, and what all share (manifests, epochs)."""
        own = list(self._holdings.own.values())
        return self._keeper.ground.usage.fixed_bytes + sum(s.charged_bytes for s in own)

    def free_chunks(self, num_bytes: int) -> int:
        """See `Bounded.free_chunks`."""
        if not self._keeper.attached or self._read_only:
            return 0
        size = record_bytes(num_bytes)
        free, idle_bytes = 0, 0
        for segment in list(self._holdings.own.values()):
            if segment.header.record_bytes == size:
                free += segment.num_free
            elif segment.is_idle:
                idle_bytes += segment.charged_bytes
        return free + self._keeper.room.creatable_slots(size, idle_bytes)

    def epoch(self) -> int:
        """See `Epochal.epoch`. At most 20 ms old; 1 ms in stores and loads."""
        return max(self._peek_epoch(), self._holdings.epoch)

    def raise_epoch(self) -> int:
        """See `Epochal.raise_epoch`.

        Raises:
            TierUnavailable: Not durable yet. Until it is, and it is tried again at every store and
                load, this tier serves nothing.
        """
        self._check_open()
        self._must_raise = True
        self._seen_epoch = -1
        with self._keeper.shape:
            self._ensure_attached()
            self._raise_epoch()
        return self._holdings.epoch

    # More

    def stats(self) -> dict[str, int]:
        """Counters since construction, and sizes now. No I/O."""
        ground = self._keeper.ground
        return {
            **self._counts,
            "chunks": len(self._holdings),
            "segments": len(self._holdings.own),
            "foreign_segments": len(self._holdings.foreign),
            "adopted": ground.num_adopted,
            "damaged_entries": ground.num_damaged,
            "too_new_segments": ground.num_too_new,
            "swept_files": ground.root.num_swept,
            "foreign_files": len(ground.usage.foreign_names),
            "root_bytes": ground.usage.charged_bytes,
            "read_only": int(self._read_only),
            "direct": int(self._records.direct),
        }

    def refresh(self) -> None:
        """Learn what other processes did. For a mover thread, every 100 ms or so while idle."""
        self._upkeep(force=True)

    def flush(self) -> None:
        """Make everything stored so far survive a loss of power. Blocks for the device."""
        self._check_open()
        with self._keeper.shape:
            self._ensure_attached()
            self._flush()

    # Reading and writing one chunk

    def _read(
        self, segment: OpenSegment, slot: int, epoch: int, key: bytes, out: memoryview
    ) -> bool:
        try:
            if isinstance(segment, ForeignSegment) and not segment.disk_holds(
                self._files, slot, key
            ):
                self._counts["stale_reads"] += 1
                self._forget(segment, slot, key)
                return False
            segment.check_length(record_bytes(len(out)))
            self._records.read(segment.slab_fd, segment.slab_offset(slot), key, epoch, out)
        except (CorruptChunk, FormatTooNew) as exc:
            self._drop_bad(segment, slot, key)
            exc.tier, exc.key = self.name, key
            raise
        except OSError as exc:
            self._suspect(segment, slot, key)
            raise self._translate(exc, "read a chunk", key) from exc
        self._suspects.discard(key)
        return True

    def _drop_bad(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        own = isinstance(segment, OwnSegment)
        self._counts["corrupt_dropped" if own else "stale_reads"] += 1
        try:
            self._forget(segment, slot, key)
        except OSError as exc:
            logger.warning("cannot free the entry of a bad chunk: %s", exc)

    def _suspect(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """A chunk that fails to read twice in a row is given up, so that it can be rewritten."""
        self._checked_s = float("-inf")
        if key in self._suspects:
            self._suspects.discard(key)
            self._drop_bad(segment, slot, key)
        elif len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(key)

    def _forget(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """Take a pinned chunk out of the table, then out of the index on disk."""
        if self._holdings.forget(key, segment, slot) and isinstance(segment, OwnSegment):
            segment.disk_invalidate(self._files, slot)

    def _leave(self, segment: OpenSegment, slot: int) -> None:
        if self._holdings.unpin(segment, slot):
            segment.disk_close(self._files)

    def _reserve(self, size: int, key: bytes) -> Reservation:
        taken = self._holdings.reserve(size)
        if taken:
            return taken
        with self._keeper.shape:
            self._check_open()
            # Others take slots without this lock, so that even a grown tier may have none left.
            for _ in range(_MAX_GROWTHS):
                taken = self._holdings.reserve(size)
                if taken:
                    return taken
                self._grow(size, key)
        raise TierFull("others took the last free slots", tier=self.name, key=key)

    def _grow(self, size: int, key: bytes) -> None:
        self._refuse_if_full(size, key)
        try:
            self._keeper.room.grow(size)
        except TierFull as exc:
            exc.tier, exc.key = self.name, key
            self._full[size] = (self._clock.now_s(), self._holdings.num_deletes)
            raise
        except OSError as exc:
            raise self._translate(exc, "make room", key) from exc

    def _refuse_if_full(self, size: int, key: bytes) -> None:
        """Do not look at the disk again for every chunk that a full tier is offered."""
        since, num_deletes = self._full.get(size, (float("-inf"), 0))
        if self._clock.now_s() - since < _FULL_AGE_S and num_deletes == self._holdings.num_deletes:
            raise TierFull(f"{self.name} is full, as it was a moment ago", tier=self.name, key=key)

    def _write(self, taken: Reservation, key: bytes, data: memoryview) -> None:
        """Free the slot's entry, write the record, then the entry that speaks of it."""
        segment, slot = taken.segment, taken.slot
        stamp = (taken.epoch, taken.sequence)
        try:
            segment.disk_invalidate(self._files, slot)
            self._records.write(segment.slab_fd, segment.slab_offset(slot), key, stamp, data)
            entry = pack_entry(slot, key, *stamp, len(data), self._namespace.digest)
            segment.disk_publish(self._files, slot, entry, taken.sequence)
        except OSError as exc:
            self._holdings.abandon(taken)
            self._checked_s = float("-inf")
            raise self._translate(exc, "write a chunk", key) from exc
        except BaseException:
            self._holdings.abandon(taken)
            raise
        else:
            self._holdings.settle(taken, key, len(data))
        finally:
            self._leave(segment, slot)

    # Upkeep

    @property
    def _read_only(self) -> bool:
        return bool(self._keeper.ground.root.read_only)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"disk tier {self.name!r} is closed", tier=self.name)

    def _unavailable(self, why: str) -> TierUnavailable:
        return TierUnavailable(f"disk tier {self.name!r}: {why}", tier=self.name)

    def _translate(self, exc: OSError, what: str, key: bytes | None = None) -> KvError:
        return translate(exc, what, tier=self.name, key=key)

    def _upkeep(self, *, writing: bool = False, force: bool = False) -> None:
        """What has to be done now and then, by whichever thread comes by when it is due."""
        self._check_open()
        now = self._clock.now_s()
        must = writing and (not self._keeper.attached or self._read_only)
        if not (must or force or now - self._followed_s >= _FOLLOW_AGE_S):
            return
        if not self._keeper.shape.acquire(blocking=must or force):
            return
        try:
            self._check_open()
            if must:
                self._ensure_writable()
            self._followed_s = now
            if self._keeper.attached:
                self._look_after(now, writing=writing)
                if writing:
                    self._ensure_writable()
        except OSError as exc:
            self._checked_s = float("-inf")
            if writing:
                raise self._translate(exc, "look after the directory") from exc
        finally:
            self._keeper.shape.release()

    def _look_after(self, now: float, *, writing: bool) -> None:
        keeper = self._keeper
        if now - self._checked_s >= self._flush_interval_s:
            if not keeper.check_links():
                logger.warning("%s was removed under us", keeper.ground.root.directory)
                keeper.detach()
                self._attach_failed = None
                return
            self._checked_s = now
        keeper.follower.follow()
        if self._read_only:
            return
        keeper.room.give_up_excess()
        if writing and now - self._flushed_s >= self._flush_interval_s:
            self._flush()

    def _flush(self) -> None:
        self._flushed_s = self._clock.now_s()
        try:
            self._keeper.flush()
        except OSError as exc:
            raise self._translate(exc, "flush") from exc

    def _ensure_writable(self) -> None:
        """Attach, or attach again when read-only, but not more often than once an interval."""
        if self._read_only and self._keeper.attached:
            if self._clock.now_s() - self._attached_s < self._flush_interval_s:
                raise self._unavailable(f"read-only: {self._keeper.ground.root.read_only}")
            self._keeper.detach()
            self._attach_failed = None
        self._ensure_attached()
        if self._read_only:
            raise self._unavailable(f"read-only: {self._keeper.ground.root.read_only}")

    def _ensure_attached(self) -> None:
        if self._keeper.attached:
            return
        if self._attach_failed:
            since, error = self._attach_failed
            if self._clock.now_s() - since < self._flush_interval_s:
                raise type(error)(str(error), tier=self.name)
        self._attach()

    def _attach(self) -> None:
        self._attached_s = self._clock.now_s()
        try:
            self._keeper.attach()
        except OSError as exc:
            error = translate(exc, "open the directory", tier=self.name)
            if not isinstance(error, TierFull | TierUnavailable):
                raise
            self._attach_failed = (self._attached_s, error)
            raise error from exc
        except (TierUnavailable, TierFull) as exc:
            exc.tier = self.name
            self._attach_failed = (self._attached_s, exc)
            raise
        self._attach_failed = None
        self._epoch_read_s = self._synced_s = float("-inf")
        self._followed_s = self._checked_s = self._flushed_s = self._attached_s

    # The epoch

    def _peek_epoch(self) -> int:
        """The epoch on disk, at most 20 ms old; -1 if it is unknown, so that nothing is served."""
        now = self._clock.now_s()
        if now - self._epoch_read_s >= _EPOCH_AGE_S:
            self._epoch_read_s = now
            self._seen_epoch = -1 if self._must_raise else self._read_epoch() or -1
        return self._seen_epoch

    def _read_epoch(self) -> int | None:
        try:
            return self._keeper.epoch_file.read()
        except OSError:
            return None

    def _sync_epoch(self) -> bool:
        """Void what is of another epoch than the one on disk; False if that is unknown."""
        now = self._clock.now_s()
        if now - self._synced_s < _EPOCH_SYNC_S and not self._must_raise:
            return True
        epoch = self._read_epoch()
        if epoch is None or self._must_raise:
            epoch = self._mend_epoch()
        if epoch is None:
            return False
        self._seen_epoch = epoch
        if epoch != self._holdings.epoch:
            self._holdings.void(epoch)
        self._synced_s = now
        return True

    def _mend_epoch(self) -> int | None:
        """Raise an epoch that is damaged, or whose raising failed before."""
        with self._keeper.shape:
            if not self._keeper.attached or self._read_only:
                return None
            try:
                if self._must_raise or self._read_epoch() is None:
                    self._raise_epoch()
            except KvError:
                return None
            return self._read_epoch()

    def _raise_epoch(self) -> None:
        try:
            epoch = self._keeper.raise_epoch()
        except OSError as exc:
            raise self._translate(exc, "raise the epoch") from exc
        self._holdings.void(epoch)
        self._seen_epoch = epoch
        self._must_raise = False


def _flat(buffer: memoryview) -> memoryview:
    """`buffer` as plain bytes."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
