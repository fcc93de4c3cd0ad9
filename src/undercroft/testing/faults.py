"""A tier that goes wrong on purpose, and says how often it did.

::

    lost = Injector(Effect.LOST_WRITE, both(on_verb("write_from"), randomly(0.01, seed=7)))
    tier = FaultyTier(MemoryTier(1 << 20), lost)
    ...
    assert lost.num_fired > 0
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

from undercroft.clock import Clock
from undercroft.errors import TierFull, TierUnavailable
from undercroft.keys import ChunkKey
from undercroft.testing.chunkwise import Act, Chunkwise
from undercroft.testing.injectors import (
    READ,
    WRITE,
    Call,
    Effect,
    Faults,
    Injector,
    When,
    always,
    both,
    every,
    on_index,
    on_key,
    on_verb,
    randomly,
    while_between,
)
from undercroft.tiers.base import Tier

__all__ = [
    "Call",
    "Effect",
    "FaultyTier",
    "Injector",
    "When",
    "always",
    "both",
    "every",
    "on_index",
    "on_key",
    "on_verb",
    "randomly",
    "sweep",
    "while_between",
]

_ERRNOS = {Effect.READ_ONLY: errno.EROFS, Effect.PERMISSION: errno.EACCES}


class FaultyTier(Chunkwise):
    """Passes calls on to a tier, wrongly when an injector says so: the first one that does.

    Each chunk of a batch is a call of its own. Closing never goes wrong; hung calls stay hung. What
    goes wrong silently here does so above the checksums of the tier inside, if it has any: who
    reads gets wrong bytes. Below them there is `undercroft.testing.faulty_files`.

    Args:
        inner: A tier that works.
        injectors: What goes wrong.
        clock: For `Effect.SLOW`.
        seed: Chooses bits and other keys.
        faults: Instead of all that.

    Threads: any.
    """

    def __init__(
        self,
        inner: Tier,
        *injectors: Injector,
        clock: Clock | None = None,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(inner, self._choose_wrong)
        self.faults = faults or Faults(*injectors, clock=clock, seed=seed)
        self._keys: dict[ChunkKey, None] = {}  # written so far: whom a misdirected call hits

    @property
    def injectors(self) -> tuple[Injector, ...]:
        """What goes wrong; may be replaced at any time."""
        return self.faults.injectors

    @injectors.setter
    def injectors(self, injectors: tuple[Injector, ...]) -> None:
        self.faults.injectors = injectors

    @property
    def num_hung(self) -> int:
        """Calls that hang now."""
        return self.faults.num_hung

    def _choose_wrong(self, verb: str, key: ChunkKey) -> Act | None:
        injector = self.faults.choose(verb, key)
        if injector is not None:
            return partial(self._go_wrong, injector, verb, key)
        if verb == WRITE:
            self._keys[key] = None
        return None

    def _go_wrong(
        self,
        injector: Injector,
        verb: str,
        key: ChunkKey,
        data: memoryview | None,
        epoch: int | None,
    ) -> bool:
        self.faults.carry_out(injector)
        self._refuse(injector, verb, key)
        if verb == READ and data is not None:
            return self._read(injector.effect, key, data)
        if verb == WRITE and data is not None:
            return self._write(injector.effect, key, data, epoch)
        return self.straight(verb, key, data, epoch)

    def _read(self, effect: Effect, key: ChunkKey, out: memoryview) -> bool:
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

    def _write(self, effect: Effect, key: ChunkKey, data: memoryview, epoch: int | None) -> bool:
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
        self._keys[key] = None
        return written

    def release(self) -> None:
        """Let the hung calls go on, and hang no more."""
        self.faults.release()

    def await_hung(self, num_hung: int, timeout_s: float = 30.0) -> None:
        """Wait (in real time) until that many calls hang."""
        self.faults.await_hung(num_hung, timeout_s)

    def _refuse(self, injector: Injector, verb: str, key: ChunkKey) -> None:
        effect, name = injector.effect, self.name
        if effect is Effect.ERROR:
            raise TierUnavailable(f"tier {name!r}: injected error", tier=name, key=key)
        if effect is Effect.FULL:
            raise TierFull(f"tier {name!r}: injected: full", tier=name, key=key)
        number = injector.number if effect is Effect.FOREIGN else _ERRNOS.get(effect)
        if number is not None:
            raise OSError(number, f"{os.strerror(number)}, injected into {verb}")

    def _other(self, key: ChunkKey) -> ChunkKey:
        others = [other for other in list(self._keys) if other != key]
        with self.faults.changed:
            return self.faults.random.choice(others) if others else ChunkKey(b"\xff" + key[1:])

    def _flip(self, data: memoryview) -> None:
        byte, mask = self.faults.bit_of(data.nbytes)
        data[byte] ^= mask


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
