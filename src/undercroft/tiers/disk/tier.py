"""The disk tier: bounded, checksummed, indexed, safe against crashes and other processes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from undercroft.clock import Clock
from undercroft.errors import (
    ConfigError,
    TierFull,
    TierUnavailable,
)
from undercroft.keys import ChunkKey, Namespace
from undercroft.log import SparingLog
from undercroft.tiers.base import Allowance, Ends, SharedMemory
from undercroft.tiers.disk.accounts import Accounts
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.chunks import Chunks
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.ground import Ground, Limits
from undercroft.tiers.disk.holdings import Holdings
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.mover import OUR_PROGRAM, MoverProcess
from undercroft.tiers.disk.owed import OwedResets
from undercroft.tiers.disk.records import RecordIo, record_bytes
from undercroft.tiers.disk.root import Root
from undercroft.tiers.disk.upkeep import EPOCH_AGE_S, Upkeep

__all__ = ["MIN_CAPACITY_BYTES", "DiskTier"]

MIN_CAPACITY_BYTES = 12 * PAGE_BYTES
_BATCH_BYTES = 4 << 20
"""For the mover process: a few messages a second for each GB, and a few ms for each message."""

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
        mover_process: Whether a process of the tier's own moves the bytes, if `memory` is given;
            see `undercroft.tiers.disk.mover`.
        memory: Level 0, if it lies in a file.
        num_threads: Of that process.
        files: The system calls; tests replace them. There is a process then only if there is one
            that makes the same: see `Files.mover`.

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
        mover_process: bool = False,
        memory: SharedMemory | None = None,
        num_threads: int = 4,
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
        self._files = files or Files()
        self._holdings = Holdings()
        self._records = RecordIo(self._files, namespace.digest, AlignedPool())
        limits = Limits(capacity_bytes, free_space_floor_bytes, num_replicas, direct)
        root = Root(self._files, str(path), namespace, clock)
        self._log = SparingLog(_LOG, clock)
        owed = OwedResets(str(path), namespace.id, clock)
        self._keeper = Keeper(
            Ground(self._files, root, self._records, self._holdings, limits, clock, self._log, owed)
        )
        self._upkeep = Upkeep(name, self._keeper, self._holdings, clock, flush_interval_s)
        with self._keeper.shape:
            try:
                self._upkeep.attach()
            except (TierUnavailable, TierFull) as exc:
                _LOG.warning("disk tier %r starts without its disk: %s", name, exc)
        self._mover: MoverProcess | None = None
        program = OUR_PROGRAM if files is None else files.mover
        if mover_process and memory is not None and program is not None:
            self._mover = self._start_mover(memory, num_threads, program)
        self._chunks = Chunks(name, self._keeper, self._upkeep, clock, self._mover)
        self._accounts = Accounts(name, self._keeper, clock, write_budget_bytes)
        self._accounts.sync()

    # Tier

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        self._upkeep.run()
        return self.has(key)

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        return _only(self._chunks.read([(key, out)]))

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        _only(self._chunks.write([(key, data, None)]))

    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        """See `Epochal.write_in_epoch`."""
        return _only(self._chunks.write([(key, data, epoch)]))

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`. A chunk that another process owns is forgotten here only."""
        self._upkeep.check_open()
        _only(self._chunks.delete([key]))

    def close(self) -> None:
        """See `Tier.close`. Flushes first."""
        with self._keeper.shape:
            if self._upkeep.closed:
                return
            self._upkeep.closed = True
            self._upkeep.watch.close()
            if self._mover is not None:  # what hangs in it comes back when it ends
                self._mover.close()
            try:
                if self._keeper.attached and not self._upkeep.read_only:
                    self._keeper.flush()
            except OSError as exc:
                _LOG.warning("disk tier %r closed unflushed: %s", self.name, exc)
            finally:
                self._accounts.close()
                self._detach()

    def _start_mover(
        self, memory: SharedMemory, num_threads: int, program: Sequence[str]
    ) -> MoverProcess | None:
        digest, clock = self.namespace.digest, self._clock
        try:
            return MoverProcess(self.name, memory, digest, clock, num_threads, program)
        except OSError as exc:
            _LOG.warning("disk tier %r: threads move its chunks: %s", self.name, exc)
            return None

    def _detach(self) -> None:
        try:
            self._keeper.detach()
        except OSError as exc:
            _LOG.warning("disk tier %r: a file could not be closed: %s", self.name, exc)

    # Batched, MovedElsewhere, Described, Indexed, Bounded, Epochal, Owing, Following, Budgeted

    @property
    def batch_bytes(self) -> int:
        """See `Batched.batch_bytes`: threads gain nothing by it."""
        return 0 if self._mover is None else _BATCH_BYTES

    def read_many(self, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> Iterator[Ends]:
        """See `Batched.read_many`."""
        return self._chunks.read(wanted)

    def write_many(
        self, given: Sequence[tuple[ChunkKey, memoryview, int | None]]
    ) -> Iterator[Ends]:
        """See `Batched.write_many`."""
        return self._chunks.write(given)

    def delete_many(self, keys: Sequence[ChunkKey]) -> Iterator[Ends]:
        """See `Batched.delete_many`."""
        self._upkeep.check_open()
        return self._chunks.delete(keys)

    def mover_deaths(self) -> int:
        """See `MovedElsewhere.mover_deaths`."""
        return 0 if self._mover is None else self._mover.num_deaths

    def is_moved_elsewhere(self) -> bool:
        """See `MovedElsewhere.is_moved_elsewhere`."""
        return self._mover is not None and self._mover.pid is not None

    def await_mover(self, seconds: float) -> bool:
        """Wait, in real time, for a process that is starting; whether one moves the bytes now."""
        return self._mover is not None and self._mover.await_ready(seconds)

    def describe(self) -> str:
        """See `Described.describe`."""
        if not self._keeper.attached:
            return "not there yet"
        how = "O_DIRECT" if self._records.direct else "through the page cache"
        moved_by = self.moved_by()
        return f"{moved_by}, {how}" if moved_by else how

    def moved_by(self) -> str:
        """What becomes of the process that is to move the bytes; empty if none is."""
        return "" if self._mover is None else self._mover.describe()

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
            **self._chunks.counts,
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
            "mover_deaths": self.mover_deaths(),
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


def _only(ends: Iterator[Ends]) -> bool:
    """Of a single chunk."""
    ((_, end),) = [end for some in ends for end in some]
    if isinstance(end, Exception):
        raise end
    return end
