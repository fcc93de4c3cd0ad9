"""What the scheduler thread asks of a tier itself: guarded, so that no answer can hurt a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from undercroft.clock import Clock
from undercroft.keys import ChunkKey
from undercroft.log import SparingLog
from undercroft.tiers.base import Tier
from undercroft.tiers.wrapping import WrappingTier

__all__ = ["Asked"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_STRIDE = 16
_SLOW_S = 0.001
_STEP_S = 0.25
_MIN_SLOW = 3
_MIN_FAILED = 3
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


class Asked(WrappingTier):
    """A tier whose questions neither raise nor make every step long.

    `has`, `free_chunks`, `used_bytes`, `epoch`, `owe_reset`, `take_adopted` and `take_lost` are
    asked on the scheduler thread, and are to answer from memory. One that raises is answered for,
    with what is harmless: absent, no room, nothing new, as before. After a few failures, or when
    its answers took a quarter of a second of one step, it is not asked for a while, a little
    longer each time. A question that never comes back cannot be ended here: see
    docs/explanation/design/0010-movers-threads-or-process.md.

    All else, the five verbs included, goes straight through.

    Args:
        inner: The tier; need not be of ours.
        clock: Measures answers and pauses.

    Threads: questions are the scheduler thread's. Cost: 0.1 us a question.
    """

    def __init__(self, inner: Tier, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._until_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._num_failed = self._num_slow = 0
        self._spent_s = 0.0
        self._stride = self._countdown = _STRIDE
        mine: Any = self  # each question is there only if the inner tier has it
        if hasattr(self, "has"):
            mine.has = self._guarded_has(self.inner.has)
        for name, harmless, keeps_last in (
            ("free_chunks", 0, False),
            ("used_bytes", 0, True),
            ("epoch", 0, True),
            ("owe_reset", False, False),
        ):
            if hasattr(self, name):
                ask = getattr(self.inner, name)
                setattr(mine, name, self._guarded(name, ask, harmless, keeps_last=keeps_last))
        for name in ("take_adopted", "take_lost"):
            if hasattr(self, name):
                setattr(mine, name, self._guarded(name, _listed(getattr(self.inner, name)), []))

    # --- verbs, not for the scheduler thread --------------------------------------------------

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        return bool(self.inner.contains(key))

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`."""
        return bool(self.inner.read_into(key, out))

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`."""
        self.inner.write_from(key, data)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        """As `write_from`; for `epoch` if one is given."""
        return self.pass_on(key, data, epoch)

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self.inner.delete(key)

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()

    # --- questions ----------------------------------------------------------------------------

    @property
    def is_answering(self) -> bool:
        """Whether it may be asked; once a pause is over, it may again."""
        until_s = self._until_s
        if until_s is None:
            return True
        if self._clock.now_s() < until_s:
            return False
        self._until_s = None
        self._num_failed = _MIN_FAILED - 1  # the next failure is one too many
        self._begin()
        return True

    def begin_step(self) -> None:
        """Time is counted anew for each step."""
        if self._until_s is None and not self._num_failed and not self._num_slow:
            self._pause_s = _FIRST_PAUSE_S
        self._begin()

    def _begin(self) -> None:
        self._spent_s, self._num_slow = 0.0, 0
        self._stride = _STRIDE

    def _guarded_has(self, ask: Callable[[ChunkKey], bool]) -> Callable[[ChunkKey], bool]:
        timed = self._guarded("has", ask, instead=False)

        def has(key: ChunkKey) -> bool:
            self._countdown -= 1
            if self._countdown <= 0 or self._until_s is not None:
                self._countdown = self._stride
                return timed(key)
            try:
                return ask(key)
            except Exception as error:  # noqa: BLE001 - a stranger's tier may raise anything
                self._failed("has", error)
                return False

        return has

    def _guarded(
        self, name: str, ask: Callable[..., _T], instead: _T, *, keeps_last: bool = False
    ) -> Callable[..., _T]:
        last = instead

        def asked(*arguments: Any) -> _T:  # noqa: ANN401 - passed on
            nonlocal last
            if not self.is_answering:
                return last
            begun_s = self._clock.now_s()
            try:
                answer = ask(*arguments)
            except Exception as error:  # noqa: BLE001 - a stranger's tier may raise anything
                self._failed(name, error)
                return last
            self._num_failed = 0
            took_s = self._clock.now_s() - begun_s
            if took_s > _SLOW_S:
                self._was_slow(name, took_s)
            if keeps_last:
                last = answer
            return answer

        return asked

    def _failed(self, name: str, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed >= _MIN_FAILED:
            self._leave_alone(name, f"failed with {type(error).__name__}: {error}")

    def _was_slow(self, name: str, took_s: float) -> None:
        self._spent_s += took_s
        self._num_slow += 1
        self._stride = self._countdown = 1
        if self._num_slow >= _MIN_SLOW and self._spent_s > _STEP_S:
            self._leave_alone(name, f"held up the scheduler for {self._spent_s * 1e3:.0f} ms")

    def _leave_alone(self, name: str, why: str) -> None:
        self._until_s = self._clock.now_s() + self._pause_s
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        self._log.warning(
            "tier %s is not asked for %g s: its %s, which has to answer from memory, %s",
            self.name,
            pause_s,
            name,
            why,
        )


def _listed(ask: Callable[[], Any]) -> Callable[[], list[Any]]:
    """`ask`, whose answer may be lazy, and fail late."""
    return lambda: list(ask())
