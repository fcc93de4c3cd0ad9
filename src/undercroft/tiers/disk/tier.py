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
    TierFull,
    TierUnavailable,
)
from undercroft.keys import MAX_KEY_BYTES, ChunkKey, Namespace
from undercroft.log import SparingLog
from undercroft.tiers.base import Allowance
from undercroft.tiers.disk.accounts import Accounts
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.files import Files, translate
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.ground import Ground, Limits
from undercroft.tiers.disk.holdings import Holdings, Reservation
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.owed import OwedResets
from undercroft.tiers.disk.records import RecordIo, record_bytes
from undercroft.tiers.disk.root import Root
from undercroft.tiers.disk.segment import OpenSegment, OwnSegment
from undercroft.tiers.disk.table import pack_entry
from undercroft.tiers.disk.upkeep import EPOCH_AGE_S, Upkeep

__all__ = ["MIN_CAPACITY_BYTES", "DiskTier"]

MIN_CAPACITY_BYTES = 12 * PAGE_BYTES
_FULL_AGE_S = 0.1
_MAX_SUSPECTS = 1024
_MAX_GROWTHS = 8

_LOG = logging.getLogger(__name__)


class DiskTier:
    """Chunks of one namespace on a local disk. Implements every protocol of `tiers.base`.

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
        write_budget_bytes: What all processes together should write here in a day, restarts
            included; None: as much as they like. See `Budgeted`. Give every process the same.
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
        write_budget_bytes: int | None = None,
        files: Files | None = None,
    ) -> None:
        for setting, value, least in (
            ("capacity_bytes", capacity_bytes, MIN_CAPACITY_BYTES),
            ("free_space_floor_bytes", free_space_floor_bytes, 0),
            ("num_replicas", num_replicas, 1),
            ("flush_interval_s", flush_interval_s, 0),
            ("write_budget_bytes", write_budget_bytes or MIN_CAPACITY_BYTES, MIN_CAPACITY_BYTES),
        ):
            if value < least:
                raise ConfigError(
                    f"{setting} of tier {name} is {value}, but must be at least {least}", tier=name
                )
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.namespace = namespace
        self._clock = clock
        files = files or Files()
        self._files = files
        self._holdings = Holdings()
        self._records = RecordIo(files, namespace.digest, AlignedPool())
        limits = Limits(capacity_bytes, free_space_floor_bytes, num_replicas, direct)
        root = Root(files, str(path), namespace, clock)
        self._log = SparingLog(_LOG, clock)
        owed = OwedResets(str(path), namespace.id, clock)
        self._keeper = Keeper(
            Ground(files, root, self._records, self._holdings, limits, clock, self._log, owed)
        )
        self._counts = {"corrupt_dropped": 0, "stale_reads": 0}
        self._suspects: set[bytes] = set()
        self._full: dict[int, tuple[float, int]] = {}
        self._upkeep = Upkeep(name, self._keeper, self._holdings, clock, flush_interval_s)
        with self._keeper.shape:
            try:
                self._upkeep.attach()
            except (TierUnavailable, TierFull) as exc:
                _LOG.warning("disk tier %r starts without its disk: %s", name, exc)
        self._accounts = Accounts(name, self._keeper, clock, write_budget_bytes)
        self._accounts.sync()

    # Tier

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        self._upkeep.run()
        return self.has(key)

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        view = _flat(out)
        if not self._upkeep.tend():
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
        self._store(key, data, None)

    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        """See `Epochal.write_in_epoch`."""
        return self._store(key, data, epoch)

    def _store(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} fit the stored format",
                tier=self.name,
            )
        view = _flat(data)
        if not self._upkeep.tend(writing=True):
            raise TierUnavailable("the epoch cannot be read; it is tried again", tier=self.name)
        if epoch not in {None, self._holdings.epoch}:
            return False
        size = record_bytes(len(view))
        is_ours, taken = self._holdings.claim(key, size)
        if not is_ours:
            return True
        taken = taken or self._reserve(size, key)
        if epoch not in {None, taken.epoch}:  # raised since: the record would be of the new one
            if not self._holdings.abandon(taken, key):
                self._finish(taken.segment)
            return False
        self._write(taken, key, view)
        return True

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`. A chunk that another process owns is forgotten here only."""
        self._upkeep.check_open()
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
            if self._upkeep.closed:
                return
            self._upkeep.closed = True
            self._upkeep.watch.close()
            try:
                if self._keeper.attached and not self._upkeep.read_only:
                    self._keeper.flush()
            except OSError as exc:
                _LOG.warning("disk tier %r closed unflushed: %s", self.name, exc)
            finally:
                self._accounts.close()
                self._detach()

    def _detach(self) -> None:
        try:
            self._keeper.detach()
        except OSError as exc:
            _LOG.warning("disk tier %r: a file could not be closed: %s", self.name, exc)

    # Described, Indexed, Bounded, Epochal, Owing, Following, Budgeted

    def describe(self) -> str:
        """See `Described.describe`."""
        if not self._keeper.attached:
            return "not there yet"
        return "O_DIRECT" if self._records.direct else "through the page cache"

    def has(self, key: ChunkKey) -> bool:
        """See `Indexed.has`."""
        upkeep = self._upkeep
        if upkeep.closed:
            upkeep.check_open()
        if self._clock.now_s() - upkeep.epoch_read_s >= EPOCH_AGE_S:
            upkeep.peek_epoch()
        return upkeep.seen_epoch == self._holdings.epoch and key in self._holdings

    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        """See `Indexed.evictable`: our own chunks by the time of writing."""
        self._upkeep.check_open()
        return ((ChunkKey(key), size) for key, size in self._holdings.coldest_first())

    def take_adopted(self) -> Iterable[tuple[ChunkKey, int]]:
        """See `Following.take_adopted`."""
        return [(ChunkKey(key), size) for key, size in self._holdings.take_adopted()]

    def take_lost(self) -> Iterable[tuple[ChunkKey, str]]:
        """See `Following.take_lost`."""
        return [(ChunkKey(key), why) for key, why in self._holdings.take_lost()]

    def used_bytes(self) -> int:
        """See `Bounded.used_bytes`: our segments, and what all share (manifests, epochs)."""
        own = self._holdings.own.values()
        return self._keeper.ground.usage.fixed_bytes + sum(s.charged_bytes for s in own)

    def free_chunks(self, num_bytes: int) -> int:
        """See `Bounded.free_chunks`."""
        if not self._keeper.attached or self._upkeep.read_only:
            return 0
        size = record_bytes(num_bytes)
        free, idle_bytes = 0, 0
        for segment in self._holdings.own.values():
            if segment.header.record_bytes == size:
                free += segment.num_free
            elif segment.is_idle:
                idle_bytes += segment.charged_bytes
        return free + self._keeper.room.creatable_slots(size, idle_bytes)

    def epoch(self) -> int:
        """See `Epochal.epoch`. At most 20 ms old; 1 ms in stores and loads."""
        seen = self._upkeep.peek_epoch()
        if seen > self._holdings.epoch:
            self._holdings.void(seen)  # it only rises, also if it cannot be read the next time
        return self._holdings.epoch

    def raise_epoch(self) -> int:
        """See `Epochal.raise_epoch`.

        Raises:
            TierUnavailable: Not durable yet. Until it is, and it is tried again at every store and
                load, this tier serves nothing.
        """
        self._upkeep.check_open()
        if not self._upkeep.owed:
            self._upkeep.owe_reset()
        with self._keeper.shape:
            try:
                self._upkeep.ensure_writable()
                return self._upkeep.raise_epoch()
            except (TierUnavailable, TierFull):
                # Read-only for us, perhaps, and somebody else has done it.
                epoch = self._upkeep.epoch_if_settled()
                if epoch is None:
                    raise
                return epoch

    def owe_reset(self) -> bool:
        """See `Owing.owe_reset`."""
        return self._upkeep.owe_reset()

    def owed_at(self) -> str:
        """See `Owing.owed_at`."""
        return self._keeper.ground.root.directory

    def written_bytes(self) -> int:
        """See `Budgeted.written_bytes`: in whole pages, everything that this tier writes."""
        return self._files.written_bytes

    def write_cost_bytes(self, num_bytes: int) -> int:
        """See `Budgeted.write_cost_bytes`: the record, and the pages of its index that change."""
        return self._accounts.cost_bytes(num_bytes)

    def allowance(self) -> Allowance | None:
        """See `Budgeted.allowance`."""
        return self._accounts.allowance()

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
            "read_only": int(self._upkeep.read_only),
            "direct": int(self._records.direct),
        }

    def refresh(self) -> None:
        """See `Following.refresh`."""
        try:
            self._upkeep.run(force=True)
            self._accounts.sync()
        finally:
            self._upkeep.mend_if_owed()

    def flush(self) -> None:
        """Make everything stored so far survive a loss of power. Blocks for the device."""
        self._upkeep.check_open()
        with self._keeper.shape:
            self._upkeep.ensure_attached()
            self._upkeep.flush()

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
            self._log.warning(
                "disk tier %r cannot free the entry of a bad chunk: %s", self.name, exc
            )

    def _suspect(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """A chunk that fails to read twice in a row is given up, so that it can be rewritten."""
        self._upkeep.distrust()
        if key in self._suspects:
            self._suspects.discard(key)
            self._drop_bad(segment, slot, key)
        elif len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(key)

    def _forget(self, segment: OpenSegment, slot: int, key: bytes) -> None:
        """Take a pinned chunk out of the table, then out of the index on disk."""
        if self._holdings.forget(key, segment, slot) and isinstance(segment, OwnSegment):
            segment.disk_invalidate(self._files, slot)
            if segment.must_tell():
                self._tell(segment)

    def _tell(self, segment: OwnSegment) -> None:
        """Tell other processes what changed; not vital, and tried again with the next change."""
        try:
            segment.disk_tell(self._files)
        except OSError as exc:
            self._upkeep.distrust()
            self._log.warning("disk tier %r cannot tell others: %s", self.name, exc)

    def _leave(self, segment: OpenSegment, slot: int) -> None:
        if self._holdings.unpin(segment, slot):
            segment.disk_close(self._files)

    def _translate(self, exc: OSError, what: str, key: bytes) -> KvError:
        return translate(exc, what, tier=self.name, key=key)

    def _reserve(self, size: int, key: bytes) -> Reservation:
        """Make room for `key`, which is claimed: until it is written, or this fails."""
        taken = None
        try:
            with self._keeper.shape:
                self._upkeep.check_open()
                # Others take slots without this lock: even a grown tier may have none left.
                for _ in range(_MAX_GROWTHS):
                    taken = self._holdings.reserve(size)
                    if taken:
                        return taken
                    self._grow(size, key)
        finally:
            if not taken:
                self._holdings.unclaim(key)
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
        segment, slot, epoch, sequence = taken.segment, taken.slot, taken.epoch, taken.sequence
        try:
            segment.disk_invalidate(self._files, slot)
            offset = segment.slab_offset(slot)
            self._records.write(segment.slab_fd, offset, key, (epoch, sequence), data)
            entry = pack_entry(slot, key, epoch, sequence, len(data), self._records.namespace)
            segment.disk_publish(self._files, slot, entry, sequence)
        except BaseException as exc:
            if not self._holdings.abandon(taken, key):
                self._finish(segment)
            if not isinstance(exc, OSError):
                raise
            self._upkeep.distrust()
            raise self._translate(exc, "write a chunk", key) from exc
        if not self._holdings.settle(taken, key, len(data)):
            self._finish(segment)

    def _finish(self, segment: OwnSegment) -> None:
        """What `OwnSegment.end_write` left to be done."""
        try:
            self._tell(segment)
        finally:
            if self._holdings.leave(segment):
                segment.disk_close(self._files)


def _flat(buffer: memoryview) -> memoryview:
    """`buffer` as plain bytes."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
