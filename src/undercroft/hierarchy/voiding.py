"""Make a lower level void after a reset: on one thread, again until it works, and once at the end.

A tier with epochs is void once its epoch has been raised; one without is emptied. That may hang, or
fail for as long as the disk cannot be written. Until it has worked the level is not asked at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from undercroft.clock import Clock
from undercroft.hierarchy.transfers import Transfers
from undercroft.keys import ChunkKey
from undercroft.log import SparingLog
from undercroft.tiers.base import Epochal, Owing, Tier

__all__ = ["Voider", "wait_for_tries"]

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0


class Voider:
    """The resets of one level that its tier has not taken yet.

    Args:
        tier: Made void.
        transfers: The tier's.
        evictable: What the tier holds; asked of a tier without epochs.
        clock: For deadlines of `transfers`, and for how often a failure is told.

    Threads: public methods are for the scheduler thread; none but `wait` and `close` waits.
    """

    def __init__(
        self,
        tier: Tier,
        transfers: Transfers,
        *,
        evictable: Callable[[], Iterable[tuple[ChunkKey, int]]],
        clock: Clock,
    ) -> None:
        self._tier = tier
        self._transfers = transfers
        self._evictable = evictable
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._epochal = tier if isinstance(tier, Epochal) else None
        self._owing = tier if isinstance(tier, Owing) else None
        self.epoch_seen = self._epochal.epoch() if self._epochal else None
        """What is offered now is for this epoch, and refused once there is another."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Resets are numbered: the last that was asked for, the last that was tried, that is done;
        # and the last that has to raise the epoch, and has.
        self._wanted = self._tried = self._done = 0
        self._owed = self._raised = 0
        self._num_nudges = 0
        self._is_noted = self._is_late = self._is_told = self._is_closed = False
        self._why = "it takes long"

    # --- asking for it ------------------------------------------------------------------------

    def owe(self) -> None:
        """A reset was asked for: note it where it outlives this process, if the tier can."""
        with self._changed:
            self._owed = self._wanted + 1 if self._epochal is not None else 0
        if self._owing is not None and not self._is_closed:
            self._is_noted = self._owing.owe_reset()

    def begin(self) -> None:
        """Make void what was stored so far; after `owe`, for every process."""
        before = self.epoch_seen
        if self._epochal is not None and not self._is_closed:
            self.epoch_seen = self._epochal.epoch()
        with self._changed:
            self._wanted += 1
            if self.epoch_seen != before and not self._must_raise:
                # The tier serves nothing of before, and takes nothing that is for it.
                self._tried = self._done = self._wanted
            else:
                self._nudge()

    @property
    def _must_raise(self) -> bool:
        return self._owed > self._raised

    def _nudge(self) -> bool:
        """Locked. Try now; False: there is no thread for it, and there are no more."""
        self._num_nudges += 1
        self._changed.notify_all()
        return self._start()

    def _start(self) -> bool:
        if self._thread is None and self._done < self._wanted and not self._is_closed:
            name = f"undercroft-{self._tier.name}-epoch"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None or self._done == self._wanted

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do: the level may be used."""
        if self._done == self._wanted:
            return True
        with self._changed:
            self._start()
            return self._done == self._wanted

    def epoch_moved(self) -> bool:
        """Whether another process raised the epoch since the level was last made void."""
        if self._epochal is None or self._is_closed or self._done < self._wanted:
            return False
        return self._epochal.epoch() != self.epoch_seen

    def wait(self, timeout_s: float) -> bool:
        """Wait until the level is void; False if it is not by then, or is closed."""
        with self._changed:
            if self._start():
                self._changed.wait_for(lambda: self._done == self._wanted, timeout_s)
            return self._done == self._wanted and not self._is_closed

    def wait_for_a_try(self, timeout_s: float) -> bool:
        """As `wait`, but no longer than until it was tried; if it is not void, a line says so.

        At once if the thread hangs since an earlier wait: one reset waits for that.
        """
        with self._changed:
            wanted = self._wanted
            if self._start() and not self._is_late:
                self._changed.wait_for(lambda: self._tried >= wanted, timeout_s)
                self._is_late = self._tried < wanted
            is_void = self._done >= wanted and not self._is_closed
        if not is_void and not self._is_closed:
            self._say_owed()
        return is_void

    def close(self, timeout_s: float) -> None:
        """Try what is owed once more, for `timeout_s` at most; then let the thread go."""
        with self._changed:
            if self._is_closed:
                return
            if self._is_owed:
                self._tried = self._done
                if self._nudge():
                    self._changed.wait_for(lambda: self._tried == self._wanted, timeout_s)
            self._is_closed = True
            self._changed.notify_all()
        if self._is_owed:
            _LOG.error("the engine ends, and tier %s %s", self._tier.name, self._owed_text())

    @property
    def _is_owed(self) -> bool:
        return self._must_raise and self._done < self._wanted

    def _say_owed(self) -> None:
        self._is_told = True
        if self._epochal is None:
            self._log.warning(
                "tier %s is still being emptied after a reset; it stays unused until it is",
                self._tier.name,
            )
            return
        self._log.warning("tier %s %s", self._tier.name, self._owed_text())

    def _owed_text(self) -> str:
        """What is the matter, what that means, and what to do about it."""
        text = f"has not taken the reset of its chunks yet ({self._why}). It serves none of them"
        if self._owing is None:
            return f"{text}, and is not used until it has taken it"
        place = self._owing.owed_at()
        if self._is_noted:
            return (
                f"{text}, nor does any engine on this machine; it is tried again, also at the next "
                f"start. If this machine is to restart before it works, remove {place}"
            )
        return (
            f"{text} here, and tries again, but that could not be noted for other engines (/dev/shm"
            f" cannot be written): remove {place} before one starts"
        )

    # --- its thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or self._done == self._wanted:
                    self._thread = None
                    self._changed.notify_all()
                    return
                wanted, seen = self._wanted, self._num_nudges
            is_void = self._try(wanted)
            with self._changed:
                self._tried, self._is_late = max(self._tried, wanted), False
                self._done = wanted if is_void else self._done
                self._changed.notify_all()
                if not is_void:
                    self._await_nudge(seen)
            if is_void and self._is_told:
                self._is_told = False
                self._log.warning("tier %s has taken the reset, and is used again", self._tier.name)

    def _await_nudge(self, seen: int) -> None:
        """Locked. Until somebody asks again, and a second at most."""
        self._changed.wait_for(lambda: self._is_closed or self._num_nudges != seen, _RETRY_S)

    def _try(self, wanted: int) -> bool:
        # A write that is under way is refused if it comes into a new epoch. Without one it has to
        # be waited for. If it hangs, make void at once, and again when it is out.
        is_refused = self._epochal is not None and self._must_raise
        drained = is_refused or self._drain()
        try:
            self._make_void(wanted)
            while not drained and self._wanted == wanted and not self._is_closed:
                drained = self._drain()
                if drained:
                    self._make_void(wanted)
        except BaseException as error:  # noqa: BLE001 - a stranger's tier may raise anything
            self._why = str(error)
            return False
        return drained

    def _drain(self) -> bool:
        return self._transfers.drain(self._clock.now_s() + _RETRY_S)

    def _make_void(self, wanted: int) -> None:
        if self._epochal is not None and self._must_raise:
            raised = self._epochal.raise_epoch()
            with self._changed:
                if self._wanted == wanted:
                    self.epoch_seen, self._raised = raised, wanted
            return
        # No new epoch here, but perhaps in a level beside: what we wrote is from before.
        for key, _ in list(self._evictable()):
            self._tier.delete(key)


def wait_for_tries(voiders: Sequence[Voider], timeout_s: float, clock: Clock) -> bool:
    """`Voider.wait_for_a_try` of each, for `timeout_s` together; whether all are void."""
    deadline_s = clock.now_s() + timeout_s
    are_void = [each.wait_for_a_try(max(0.0, deadline_s - clock.now_s())) for each in voiders]
    return all(are_void)
