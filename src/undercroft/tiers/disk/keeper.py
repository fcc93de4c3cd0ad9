"""Opens, keeps in order and closes what a tier has on disk.

Everything here does I/O and runs on mover threads under one lock, `shape`; what is found goes to
`Holdings`. Files are created and removed only under the root's lock as well.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from undercroft.errors import ConfigError, TierFull
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.follower import Follower
from undercroft.tiers.disk.ground import Ground
from undercroft.tiers.disk.orphans import Orphan, Orphans
from undercroft.tiers.disk.room import Room
from undercroft.tiers.disk.segment import OwnSegment
from undercroft.tiers.disk.usage import NAMESPACE_BYTES

__all__ = ["Keeper"]


class Keeper:
    """The files of one tier. Threads: callers hold `shape`."""

    def __init__(self, ground: Ground) -> None:
        self.shape = threading.Lock()
        self.attached = False
        self.held: list[tuple[bytes, int]] = []
        """What was here before the directory was removed under us; what comes back is not lost."""
        self.ground = ground
        self.epoch_file = EpochFile(ground.files, f"{ground.root.directory}/epoch")
        self.follower = Follower(ground)
        self.orphans = Orphans(ground, self.follower)
        self.room = Room(ground, self.orphans)

    def attach(self) -> None:
        """Open the root and take in what it holds. On any failure nothing stays open."""
        root, holdings = self.ground.root, self.ground.holdings
        prepared: list[tuple[OwnSegment, int]] = []
        try:
            root.open()
            if root.read_only:
                self.epoch_file.open(read_only=True)
            else:
                prepared = self._enter()
            self.ground.records.direct = self._choose_direct()
            holdings.void(self.epoch_file.read() or 0)
            while prepared:
                self.orphans.adopt(*prepared.pop(0))
            self.follower.restart()
            self.follower.follow()
            self.attached = True
            held, self.held = self.held, []
            holdings.note_lost(held, "vanished")
        except BaseException:
            for segment, _ in prepared:
                segment.disk_close(self.ground.files)
            self.detach()
            raise

    def detach(self) -> None:
        """Let everything go."""
        self.attached = False
        ground = self.ground
        with ExitStack() as rest:  # what cannot be closed well keeps nothing else open
            rest.callback(ground.root.close)
            rest.callback(self.epoch_file.close)
            for segment in ground.holdings.drop_all():
                rest.callback(segment.disk_close, ground.files)

    def _enter(self) -> list[tuple[OwnSegment, int]]:
        """Tidy up, then lock this replica's part of the segments that nobody owns."""
        root, ground = self.ground.root, self.ground
        with root.locked():
            root.sweep()
            ground.look()
            if root.is_new():
                self._make_room_for_namespace()
            root.enter()
            self.epoch_file.open(read_only=False)
            self._enter_epoch()
            ground.records.direct = self._choose_direct()
            ground.look()
            orphans = self.orphans.lock_all()
            share = -(-len(orphans) // ground.limits.num_replicas)
            prepared: list[tuple[OwnSegment, int]] = []
            try:
                self._shrink(orphans)
                self.orphans.let_go(orphans[share:])
                del orphans[share:]
                while orphans:
                    found = self.orphans.prepare(orphans.pop(0))
                    prepared += [found] if found else []
            except BaseException:
                self.orphans.let_go(orphans)
                for segment, _ in prepared:
                    segment.disk_close(ground.files)
                raise
        return prepared

    def _enter_epoch(self) -> None:
        """Raise the epoch if it is missing or damaged, went back, or a reset is owed."""
        owed, holdings = self.ground.owed.debts(), self.ground.holdings
        epoch = self.epoch_file.read() or 0
        if epoch < max(1, holdings.epoch):
            epoch = max(self.orphans.latest_epoch(), holdings.epoch)
        elif not owed:
            return
        self.epoch_file.write(epoch + 1)
        self.ground.owed.settle(owed)

    def _make_room_for_namespace(self) -> None:
        """A namespace costs a directory and two files; not even that may exceed the capacity."""
        ground = self.ground
        while ground.usage.planned_bytes + NAMESPACE_BYTES > ground.limits.capacity_bytes:
            if not self.room.remove_stranger(newcomers=1):
                raise TierFull(
                    f"{ground.root.path} is full, and its other users are alive: raise the "
                    f"capacity of {ground.limits.capacity_bytes} bytes"
                )

    def _choose_direct(self) -> bool:
        wanted = self.ground.limits.direct
        if wanted is False:
            return False
        found = self.ground.root.takes_direct(self.epoch_file.path, self.ground.records.pool)
        if wanted and not found:
            raise ConfigError(
                f"direct I/O is required, but the file system of {self.ground.root.path} refuses "
                "it: leave `direct` out"
            )
        return found

    def _shrink(self, orphans: list[Orphan]) -> None:
        """Remove what exceeds the capacity: it may be smaller than in an earlier run.

        Those removed leave `orphans`.
        """
        ground = self.ground
        while ground.usage.planned_bytes > ground.limits.capacity_bytes:
            if self.room.remove_stranger():
                continue
            if not orphans:
                return
            coldest = orphans.pop()
            self.orphans.note_lost(coldest.index_fd, "given_up")
            self.orphans.let_go([coldest])
            ground.root.remove_segment(coldest.usage.segment_id, coldest.usage.directory)
            ground.look()

    def check_links(self) -> bool:
        """Whether all our files still have their names."""
        if not self.epoch_file.is_linked():
            return False
        own = self.ground.holdings.own.values()
        return all(segment.disk_is_linked(self.ground.files) for segment in own)

    def tell(self) -> None:
        """Tell other processes of every change, though stores that hang are still under way."""
        for segment in self.ground.holdings.own.values():
            if segment.num_untold and self.ground.enter(segment):
                try:
                    segment.disk_tell(self.ground.files)
                finally:
                    self.ground.leave(segment)

    def flush(self) -> None:
        """Make what was written so far survive a loss of power."""
        ground = self.ground
        self.tell()
        for segment in ground.holdings.own.values():
            if segment.dirty and ground.enter(segment):
                try:
                    segment.dirty = False
                    segment.disk_sync(ground.files)
                except OSError:
                    segment.dirty = True
                    raise
                finally:
                    ground.leave(segment)
        if ground.names_changed:
            ground.files.sync_directory(ground.root.directory)
            ground.names_changed = False

    def raise_epoch(self) -> int:
        """Raise the epoch on disk, durably; returns it.

        Raises:
            TierUnavailable: Another process has held the root's lock for two seconds.
        """
        owed = self.ground.owed.debts()  # first: what is noted from now on needs another one
        with self.ground.root.locked():
            epoch = max(self.epoch_file.read() or 0, self.ground.holdings.epoch) + 1
            self.epoch_file.write(epoch)
        self.ground.owed.settle(owed)
        return epoch
