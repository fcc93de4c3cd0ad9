"""A tier that goes wrong on purpose, and says how often it did.

::

    lost = Injector(Effect.LOST_WRITE, both(on_verb("write_from"), randomly(0.01, seed=7)))
    tier = FaultyTier(MemoryTier(1 << 20), lost)
    ...
    assert lost.num_fired > 0
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from undercroft.clock import Clock, SystemClock
from undercroft.errors import TierFull, TierUnavailable
from undercroft.keys import ChunkKey
from undercroft.tiers.base import Tier
from undercroft.tiers.wrapping import WrappingTier

__all__ = [
    "Call",
    "Effect",
    "FaultyTier",
    "Injector",
    "When",
    "always",
    "both",
    "on_index",
    "on_key",
    "on_verb",
    "randomly",
    "sweep",
]


class Effect(Enum):
    """What goes wrong. Writes that go wrong silently say that they worked."""

    ERROR = "error"  # TierUnavailable, nothing done
    FOREIGN = "foreign error"  # OSError, nothing done
    SLOW = "slow"  # sleeps, then works
    HANG = "hang"  # waits for `FaultyTier.release`, then works
    FULL = "full"  # write: TierFull
    SHORT_READ = "short read"  # read: only the first half is filled in, reported as whole
    FLIPPED_BIT = "flipped bit"  # read or write: one bit, somewhere, silently
    TORN_WRITE = "torn write"  # write: the second half is zeros, silently
    LOST_WRITE = "lost write"  # write: nothing, silently
    MISDIRECTED_WRITE = "misdirected write"  # write: over the chunk of another key, silently
    MISDIRECTED_READ = "misdirected read"  # read: the bytes of another key, silently


_READ, _WRITE = "read_into", "write_from"
_VERBS = {
    Effect.FULL: (_WRITE,),
    Effect.SHORT_READ: (_READ,),
    Effect.FLIPPED_BIT: (_READ, _WRITE),
    Effect.TORN_WRITE: (_WRITE,),
    Effect.LOST_WRITE: (_WRITE,),
    Effect.MISDIRECTED_WRITE: (_WRITE,),
    Effect.MISDIRECTED_READ: (_READ,),
}
_ANY_VERB = ("contains", _READ, _WRITE, "delete")


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


def both(one: When, other: When) -> When:
    """Calls that both choose; `other` is asked only if `one` says yes."""
    return lambda call: one(call) and other(call)


class Injector:
    """An effect, when it happens, and how often it has.

    Args:
        effect: What goes wrong.
        when: Which calls go wrong, among those whose verb the effect can hit.
        seconds: How long `Effect.SLOW` takes.

    Set `active` to False to end the fault.
    """

    def __init__(self, effect: Effect, when: When = always, *, seconds: float = 1.0) -> None:
        self.effect = effect
        self.seconds = seconds
        self.num_calls = 0
        self.active = True
        self.num_fired = 0
        self._when = when
        self._verbs = _VERBS.get(effect, _ANY_VERB)

    def chooses(self, verb: str, key: ChunkKey) -> bool:
        """Whether this call goes wrong. The tier serialises."""
        if not self.active or verb not in self._verbs:
            return False
        call = Call(verb, key, self.num_calls)
        self.num_calls += 1
        return self._when(call)


class FaultyTier(WrappingTier):
    """Passes calls on to a tier, wrongly when an injector says so: the first one that does.

    Args:
        inner: A tier that works.
        injectors: What goes wrong.
        clock: For `Effect.SLOW`.
        seed: Chooses bits and other keys.

    Threads: any.
    """

    def __init__(
        self, inner: Tier, *injectors: Injector, clock: Clock | None = None, seed: int = 0
    ) -> None:
        super().__init__(inner)
        self.injectors = injectors
        self.num_hung = 0
        self._clock = clock or SystemClock()
        self._random = Random(seed)  # noqa: S311 - a test that can be repeated
        self._changed = threading.Condition()
        self._released = False
        self._keys: dict[ChunkKey, None] = {}  # written so far: whom a misdirected call hits

    def contains(self, key: ChunkKey) -> bool:
        """See `Tier.contains`."""
        self._before("contains", key)
        return bool(self.inner.contains(key))

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        """See `Tier.read_into`; not always true here."""
        effect = self._before(_READ, key)
        if effect is Effect.MISDIRECTED_READ:
            return bool(self.inner.read_into(self._other(key), out))
        if effect is Effect.SHORT_READ:
            whole = bytearray(out.nbytes)
            found = bool(self.inner.read_into(key, memoryview(whole)))
            half = out.nbytes // 2
            out[:half] = memoryview(whole)[:half]
            return found
        found = bool(self.inner.read_into(key, out))
        if found and effect is Effect.FLIPPED_BIT:
            self._flip(out)
        return found

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        """See `Tier.write_from`; not always true here."""
        self.write(key, data, None)

    def write(self, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
        """As `write_from`; for `epoch` if one is given."""
        effect = self._before(_WRITE, key)
        if effect is Effect.LOST_WRITE:
            return True
        target = key
        if effect in {Effect.TORN_WRITE, Effect.FLIPPED_BIT}:
            data = memoryview(bytearray(data))
            if effect is Effect.TORN_WRITE:
                half = data.nbytes // 2
                data[half:] = bytes(data.nbytes - half)
            else:
                self._flip(data)
        elif effect is Effect.MISDIRECTED_WRITE:
            target = self._other(key)
            self.inner.delete(target)
        written = self.pass_on(target, data, epoch)
        with self._changed:
            self._keys[key] = None
        return written

    def delete(self, key: ChunkKey) -> None:
        """See `Tier.delete`."""
        self._before("delete", key)
        self.inner.delete(key)

    def close(self) -> None:
        """See `Tier.close`. Never goes wrong; hung calls stay hung."""
        self.inner.close()

    def release(self) -> None:
        """Let the hung calls go on, and hang no more."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def await_hung(self, num_hung: int, timeout_s: float = 30.0) -> None:
        """Wait (in real time) until that many calls hang."""
        with self._changed:
            there = self._changed.wait_for(lambda: self.num_hung >= num_hung, timeout=timeout_s)
        assert there, f"{self.num_hung} of {num_hung} calls hang"

    def _before(self, verb: str, key: ChunkKey) -> Effect | None:
        """Choose the effect; carry out those that are the same for every verb."""
        with self._changed:
            injector = next((each for each in self.injectors if each.chooses(verb, key)), None)
            if injector is None:
                return None
            injector.num_fired += 1
        effect, name = injector.effect, self.name
        if effect is Effect.ERROR:
            raise TierUnavailable(f"tier {name!r}: injected error", tier=name, key=key)
        if effect is Effect.FOREIGN:
            raise OSError(5, f"injected into {verb}")
        if effect is Effect.FULL:
            raise TierFull(f"tier {name!r}: injected: full", tier=name, key=key)
        if effect is Effect.SLOW:
            self._clock.sleep(injector.seconds)
        if effect is Effect.HANG:
            with self._changed:
                self.num_hung += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._released)
                self.num_hung -= 1
        return effect

    def _other(self, key: ChunkKey) -> ChunkKey:
        with self._changed:
            others = [other for other in self._keys if other != key]
            return self._random.choice(others) if others else ChunkKey(b"\xff" + key[1:])

    def _flip(self, data: memoryview) -> None:
        with self._changed:
            bit = self._random.randrange(8 * data.nbytes)
        data[bit // 8] ^= 1 << bit % 8


def sweep(run: Callable[[Injector], None], effect: Effect, *, max_points: int = 10_000) -> int:
    """Run with `effect` at call 0, then at call 1, ... until a run meets no fault.

    Args:
        run: A whole test that puts the injector into a fresh tier and asserts what must hold.
        effect: What goes wrong.
        max_points: Bound on the runs.

    Returns:
        How many runs met the fault.
    """
    for index in range(max_points):
        injector = Injector(effect, on_index(index))
        run(injector)
        if not injector.num_fired:
            return index
    raise AssertionError(f"{effect} still fires at call {max_points}")
