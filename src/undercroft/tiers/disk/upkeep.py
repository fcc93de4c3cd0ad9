"""What a disk tier does now and then: attach, follow others, watch its files, flush, mind epochs.

No thread of its own: whichever mover comes by when something is due does it.
"""

from __future__ import annotations

import logging

from undercroft.clock import Clock
from undercroft.errors import KvError, TierClosed, TierFull, TierUnavailable
from undercroft.log import SparingLog
from undercroft.tiers.disk.files import translate
from undercroft.tiers.disk.holdings import Holdings
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.watch import Watch

__all__ = ["EPOCH_AGE_S", "Upkeep"]

EPOCH_AGE_S = 0.02
_EPOCH_SYNC_S = 0.001
_EPOCH_WAIT_S = 0.05
_FOLLOW_AGE_S = 0.1
_MEND_RETRY_S = 1.0

_LOG = logging.getLogger(__name__)


class Upkeep:
    """One tier's upkeep. Threads: any, but for methods that say they hold `shape`."""

    def __init__(
        self, name: str, keeper: Keeper, holdings: Holdings, clock: Clock, interval_s: float
    ) -> None:
        self.name = name
        self.keeper = keeper
        self.closed = False
        self.owed = keeper.ground.owed
        """True while a reset is owed: nothing is served until the epoch has been raised."""
        self.seen_epoch = -1
        self.epoch_read_s = float("-inf")
        self._holdings = holdings
        self._clock = clock
        self.watch = Watch(self._read_epoch, f"undercroft-{name}-watch")
        self._log = SparingLog(_LOG, clock)
        self._flush_interval_s = interval_s
        self._tended_s = self._attached_s = float("-inf")
        self._followed_s = self._checked_s = self._flushed_s = float("-inf")
        self._attach_failed: tuple[float, TierUnavailable | TierFull] | None = None
        self._mended_s = float("-inf")

    def distrust(self) -> None:
        """Something failed: see at the next occasion whether our files are still there."""
        self._checked_s = float("-inf")

    @property
    def read_only(self) -> bool:
        """Whether the directory could be opened for reading only."""
        return bool(self.keeper.ground.root.read_only)

    def check_open(self) -> None:
        """Raise `TierClosed` once closed."""
        if self.closed:
            raise TierClosed(f"disk tier {self.name!r} is closed", tier=self.name)

    def _unavailable(self, why: str) -> TierUnavailable:
        return TierUnavailable(f"disk tier {self.name!r}: {why}", tier=self.name)

    def _translate(self, exc: OSError, what: str) -> KvError:
        return translate(exc, what, tier=self.name)

    def tend(self, *, writing: bool = False) -> bool:
        """`run` and `sync_epoch`, unless both were done a moment ago; False: serve nothing."""
        if (
            self._clock.now_s() - self._tended_s < _EPOCH_SYNC_S
            and not (self.owed or self.closed)
            and not (writing and (not self.keeper.attached or self.read_only))
        ):
            return True
        self.run(writing=writing)
        return self.sync_epoch()

    def run(self, *, writing: bool = False, force: bool = False) -> None:
        """What has to be done now and then, by whichever thread comes by when it is due."""
        self.check_open()
        now = self._clock.now_s()
        must = writing and (not self.keeper.attached or self.read_only)
        if not (must or force or now - self._followed_s >= _FOLLOW_AGE_S):
            return
        if not self.keeper.shape.acquire(blocking=must or force):
            return
        try:
            self.check_open()
            if must:
                self.ensure_writable()
            self._followed_s = now
            if self.keeper.attached:
                self._look_after(now, writing=writing)
                if writing:
                    self.ensure_writable()
        except OSError as exc:
            self.distrust()
            if writing:
                raise self._translate(exc, "look after the directory") from exc
        except TierUnavailable as exc:
            if writing:
                raise
            self._log.warning("disk tier %r is behind with its upkeep: %s", self.name, str(exc))
        finally:
            self.keeper.shape.release()

    def _look_after(self, now: float, *, writing: bool) -> None:
        keeper = self.keeper
        if now - self._checked_s >= self._flush_interval_s:
            if not keeper.check_links():
                self._log.warning("%s was removed under us", keeper.ground.root.directory)
                keeper.held = self._holdings.own_chunks()
                keeper.detach()
                self._attach_failed = None
                return
            self._checked_s = now
        keeper.follower.follow()
        if self.read_only:
            return
        keeper.tell()
        keeper.room.give_up_excess()
        if writing and now - self._flushed_s >= self._flush_interval_s:
            self.flush()

    def flush(self) -> None:
        """Make what was stored so far durable. Holds `shape`."""
        self._flushed_s = self._clock.now_s()
        try:
            self.keeper.flush()
        except OSError as exc:
            raise self._translate(exc, "flush") from exc

    def ensure_writable(self) -> None:
        """Attach, or attach again when read-only, but not more often than once an interval.

        Holds `shape`.
        """
        if self.read_only and self.keeper.attached:
            if self._clock.now_s() - self._attached_s < self._flush_interval_s:
                raise self._unavailable(f"read-only: {self.keeper.ground.root.read_only}")
            self.keeper.detach()
            self._attach_failed = None
        self.ensure_attached()
        if self.read_only:
            raise self._unavailable(f"read-only: {self.keeper.ground.root.read_only}")

    def ensure_attached(self) -> None:
        """Attach unless attached; the last failure stands for one interval. Holds `shape`.

        Asks anew whether the tier is open: it may have been closed while the lock was awaited.
        """
        self.check_open()
        if self.keeper.attached:
            return
        if self._attach_failed:
            since, error = self._attach_failed
            if self._clock.now_s() - since < self._flush_interval_s:
                raise type(error)(str(error), tier=self.name)
        self.attach()

    def attach(self) -> None:
        """Open the directory; `OSError` becomes ours. Holds `shape`."""
        self._attached_s = self._clock.now_s()
        try:
            self.keeper.attach()
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
        self.owed.inherit(self._holdings.epoch)  # read-only: what could not be settled
        self.epoch_read_s = self._tended_s = float("-inf")
        self._followed_s = self._checked_s = self._flushed_s = self._attached_s

    def peek_epoch(self) -> int:
        """The epoch on disk, at most 20 ms old; -1 if it is unknown, so that nothing is served.

        The scheduler thread asks: it is answered from the page cache where the kernel can read
        without waiting; elsewhere by another thread, and a disk that hangs keeps it 50 ms at most,
        and once.
        """
        now = self._clock.now_s()
        if now - self.epoch_read_s >= EPOCH_AGE_S:
            self.epoch_read_s = now
            if self.owed.take_over(self._holdings.epoch):
                # What is here is from before that reset; others have to see the epoch move.
                self._holdings.void(self._holdings.epoch + 1)
            self.seen_epoch = -1 if self.owed else self._quick_epoch()
        return self.seen_epoch

    def _quick_epoch(self) -> int:
        epoch = self.keeper.epoch_file.read_now()
        if epoch is None:
            epoch = self.watch.read(_EPOCH_WAIT_S)
        return -1 if epoch is None else epoch

    def owe_reset(self) -> bool:
        """A reset was asked for; False: it could not be noted for other processes."""
        noted = self.owed.note(self._holdings.epoch)
        self.seen_epoch = -1
        return noted

    def mend_if_owed(self) -> None:
        """Settle what is owed though nobody stores or loads; once a second, while it fails."""
        now = self._clock.now_s()
        if self.owed and not self.closed and now - self._mended_s >= _MEND_RETRY_S:
            self._mended_s = now
            self.sync_epoch()

    def _read_epoch(self) -> int | None:
        try:
            return self.keeper.epoch_file.read()
        except OSError:
            return None

    def sync_epoch(self) -> bool:
        """Void what is of another epoch than the one on disk; False if that is unknown."""
        now = self._clock.now_s()
        epoch = self._read_epoch()
        if epoch is None or epoch < self._holdings.epoch or self.owed:
            epoch = self._mend_epoch()
        if epoch is None:
            return False
        self.seen_epoch = epoch
        self._holdings.void(epoch)
        self._tended_s = now
        return True

    def _mend_epoch(self) -> int | None:
        """Raise an epoch that is damaged, has gone back, or whose raising failed before."""
        with self.keeper.shape:
            if not self.keeper.attached:
                return None
            epoch = self.epoch_if_settled()
            if epoch is not None:
                return epoch
            if self.read_only:
                return None
            try:
                self.raise_epoch()
            except KvError:
                return None
            return self._read_epoch()

    def epoch_if_settled(self) -> int | None:
        """The epoch on disk, if nothing is owed any more and it is none of before. Holds `shape`.

        Others may have raised it for us.
        """
        epoch = self._read_epoch() if self.keeper.attached else None
        if epoch is None or epoch < self._holdings.epoch:
            return None
        return epoch if self.owed.settled_by_others(epoch) else None

    def raise_epoch(self) -> int:
        """Raise the epoch on disk, then here; the new one. Holds `shape`."""
        if self.read_only:
            raise self._unavailable(f"read-only: {self.keeper.ground.root.read_only}")
        try:
            epoch = self.keeper.raise_epoch()
        except OSError as exc:
            raise self._translate(exc, "raise the epoch") from exc
        self._holdings.void(epoch)
        self.seen_epoch = -1 if self.owed else epoch
        return epoch
