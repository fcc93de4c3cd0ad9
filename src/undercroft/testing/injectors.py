"""What goes wrong on purpose, when, and how often it did: the part that every seam shares."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from undercroft.clock import Clock, SystemClock
from undercroft.keys import ChunkKey

__all__ = [
    "ANY_VERB",
    "READ",
    "TIER_VERBS",
    "WRITE",
    "Call",
    "Effect",
    "Faults",
    "Injector",
    "When",
    "always",
    "both",
    "every",
    "on_index",
    "on_key",
    "on_verb",
    "randomly",
    "while_between",
]


class Effect(Enum):
    """What goes wrong. Writes that go wrong silently say that they worked."""

    ERROR = "error"  # TierUnavailable (files: EIO), nothing done
    FOREIGN = "foreign error"  # OSError with the injector's `errno`, nothing done
    SLOW = "slow"  # sleeps, then works
    HANG = "hang"  # waits until it is released or the fault ends, then works
    FULL = "full"  # write: TierFull (files: ENOSPC, and no free bytes)
    READ_ONLY = "read only"  # whatever would change something: EROFS
    PERMISSION = "permission"  # tier: EACCES; files: EACCES for whatever takes a path
    SHORT_READ = "short read"  # read: only the first half (tier: reported as whole)
    FLIPPED_BIT = "flipped bit"  # read or write: one bit, somewhere, silently
    TORN_WRITE = "torn write"  # write: the second half is zeros (files: what was there), silently
    LOST_WRITE = "lost write"  # write: nothing, silently
    MISDIRECTED_WRITE = "misdirected write"  # write: over another chunk (files: place), silently
    MISDIRECTED_READ = "misdirected read"  # read: the bytes of another key (files: place), silently
    VANISHED = "vanished directory"  # the tier's directory is removed, then works
    KILLED = "killed"  # the process ends itself by SIGKILL


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb. `index` counts those that the injector's effect could hit, from 0."""

    verb: str
    key: ChunkKey
    index: int


When = Callable[[Call], bool]


def always(_call: Call) -> bool:
    """Every call."""
    return True


def on_index(index: int) -> When:
    """The one call with that index."""
    return lambda call: call.index == index


def every(number: int) -> When:
    """Each `number`-th call, the first one that is hit being the `number`-th."""
    return lambda call: call.index % number == number - 1


def on_verb(*verbs: str) -> When:
    """Calls of these verbs."""
    return lambda call: call.verb in verbs


def on_key(*keys: ChunkKey) -> When:
    """Calls for these keys."""
    return lambda call: call.key in keys


def randomly(ratio: float, *, seed: int) -> When:
    """A share of the calls."""
    random = Random(seed)  # noqa: S311 - a test that can be repeated
    return lambda _call: random.random() < ratio


def while_between(clock: Clock, after_s: float, until_s: float = float("inf")) -> When:
    """Calls from `after_s` to `until_s` from now."""
    began_s = clock.now_s()
    return lambda _call: after_s <= clock.now_s() - began_s < until_s


def both(one: When, other: When) -> When:
    """Calls that both choose; `other` is asked only if `one` says yes."""
    return lambda call: one(call) and other(call)


READ, WRITE = "read_into", "write_from"
TIER_VERBS = {
    Effect.FULL: (WRITE,),
    Effect.READ_ONLY: (WRITE, "delete"),
    Effect.SHORT_READ: (READ,),
    Effect.FLIPPED_BIT: (READ, WRITE),
    Effect.TORN_WRITE: (WRITE,),
    Effect.LOST_WRITE: (WRITE,),
    Effect.MISDIRECTED_WRITE: (WRITE,),
    Effect.MISDIRECTED_READ: (READ,),
}
"""The verbs of a tier that an effect can hit; of the others any of `ANY_VERB`."""
ANY_VERB = ("contains", READ, WRITE, "delete")


class Injector:
    """An effect, when it happens, and how often it has.

    Args:
        effect: What goes wrong.
        when: Which calls go wrong, among those whose verb the effect can hit.
        seconds: How long `Effect.SLOW` takes.
        number: The `errno` of `Effect.FOREIGN`.
        verbs: What the effect can hit; None: those verbs of a tier that it makes sense for.
        at_most: So often, and then no more.

    Set `active` to False to end the fault; what hangs by it goes on then.
    """

    def __init__(
        self,
        effect: Effect,
        when: When = always,
        *,
        seconds: float = 1.0,
        number: int = errno.EIO,
        verbs: tuple[str, ...] | None = None,
        at_most: int | None = None,
    ) -> None:
        self.effect = effect
        self.seconds = seconds
        self.number = number
        self.num_calls = 0
        self.num_fired = 0
        self._when = when
        self._verbs = TIER_VERBS.get(effect, ANY_VERB) if verbs is None else verbs
        self._at_most = float("inf") if at_most is None else at_most
        self._active = True
        self._go_on = threading.Event()

    @property
    def active(self) -> bool:
        """Whether calls go wrong at all."""
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active = active
        if not active:
            self._go_on.set()
        else:
            self._go_on.clear()

    def chooses(self, verb: str, key: ChunkKey) -> bool:
        """Whether this call goes wrong. The tier serialises."""
        if not self._active or verb not in self._verbs or self.num_fired >= self._at_most:
            return False
        call = Call(verb, key, self.num_calls)
        self.num_calls += 1
        return self._when(call)

    def hang(self) -> None:
        """Wait until `let_go`, or the end of the fault."""
        self._go_on.wait()

    def let_go(self) -> None:
        """What hangs goes on, and what would hang does not."""
        self._go_on.set()


class Faults:
    """The injectors of one seam: chooses one for each call, the first that wants it.

    Args:
        injectors: What goes wrong; may be replaced at any time.
        clock: For `Effect.SLOW`.
        seed: Chooses bits and other places.
        vanish: Removes the directory, for `Effect.VANISHED`.
        before_kill: Called before the process ends itself.

    Threads: any. Cost without injectors: one attribute.
    """

    def __init__(
        self,
        *injectors: Injector,
        clock: Clock | None = None,
        seed: int = 0,
        vanish: Callable[[], None] | None = None,
        before_kill: Callable[[], None] | None = None,
    ) -> None:
        self.injectors = injectors
        self.num_hung = 0
        self.random = Random(seed)  # noqa: S311 - a test that can be repeated
        self.changed = threading.Condition()
        self.released = False
        self._clock = clock or SystemClock()
        self._vanish = vanish
        self._before_kill = before_kill

    def strike(self, verb: str, key: ChunkKey) -> Injector | None:
        """Choose; carry out those effects that are the same everywhere. What is left is yours."""
        injector = self.choose(verb, key)
        if injector is not None:
            self.carry_out(injector)
        return injector

    def choose(self, verb: str, key: ChunkKey) -> Injector | None:
        """Who makes this call go wrong, if anybody does."""
        if not self.injectors:
            return None
        with self.changed:
            injector = next((each for each in self.injectors if each.chooses(verb, key)), None)
            if injector is not None:
                injector.num_fired += 1
        return injector

    def carry_out(self, injector: Injector) -> None:
        """What is the same everywhere of its effect. May wait."""
        effect = injector.effect
        if effect is Effect.SLOW:
            self._clock.sleep(injector.seconds)
        elif effect is Effect.HANG:
            self._hang(injector)
        elif effect is Effect.VANISHED and self._vanish is not None:
            self._vanish()
        elif effect is Effect.KILLED:
            if self._before_kill is not None:
                self._before_kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self, injector: Injector) -> None:
        with self.changed:
            self.num_hung += 1
            self.changed.notify_all()
        if not self.released:
            injector.hang()
        with self.changed:
            self.num_hung -= 1

    def release(self) -> None:
        """Let the hung calls go on, and hang no more."""
        self.released = True
        for injector in self.injectors:
            injector.let_go()

    def await_hung(self, num_hung: int, timeout_s: float) -> None:
        """Wait (in real time) until that many calls hang."""
        with self.changed:
            there = self.changed.wait_for(lambda: self.num_hung >= num_hung, timeout=timeout_s)
        assert there, f"{self.num_hung} of {num_hung} calls hang"

    def bit_of(self, num_bytes: int) -> tuple[int, int]:
        """Some byte of so many, and a mask with one bit."""
        with self.changed:
            bit = self.random.randrange(8 * num_bytes)
        return bit // 8, 1 << bit % 8
