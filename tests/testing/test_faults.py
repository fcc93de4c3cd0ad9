from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from undercroft.errors import TierFull, TierUnavailable
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import (
    Effect,
    FaultyTier,
    Injector,
    both,
    on_index,
    on_key,
    on_verb,
    randomly,
    sweep,
)
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.base import Bounded, Epochal, Indexed, Tier
from undercroft.tiers.memory import MemoryTier

N = 256
A, B = key_of("a"), key_of("b")


def read(tier: Tier, key: bytes) -> bytes | None:
    out = bytearray(b"\x5a" * N)
    return bytes(out) if tier.read_into(key, memoryview(out)) else None  # type: ignore[arg-type]


def faulty(effect: Effect, index: int = 0) -> tuple[MemoryTier, FaultyTier, Injector]:
    """A tier with A stored, one of whose next calls goes wrong."""
    inner = MemoryTier(1 << 16)
    injector = Injector(effect, on_index(index))
    tier = FaultyTier(inner, injector)
    inner.write_from(A, chunk_of(A, N))
    tier._keys[A] = None
    return inner, tier, injector


def differing_bits(one: bytes | None, two: memoryview) -> int:
    assert one is not None
    return sum((x ^ y).bit_count() for x, y in zip(one, two, strict=True))


def test_without_injectors_it_is_the_inner_tier() -> None:
    """All verbs and abilities pass through."""
    inner = MemoryTier(1 << 16)
    tier = FaultyTier(inner)
    assert isinstance(tier, Indexed)
    assert isinstance(tier, Bounded)
    assert isinstance(tier, Epochal)
    tier.write_from(A, chunk_of(A, N))
    assert tier.contains(A)
    assert read(tier, A) == chunk_of(A, N)
    assert tier.used_bytes() == inner.used_bytes() == N
    tier.delete(A)
    assert not inner.has(A)
    tier.close()


def test_errors_are_raised_and_nothing_is_done() -> None:
    """ERROR, FOREIGN and FULL refuse the call once, and count it."""
    for effect, error in (
        (Effect.ERROR, TierUnavailable),
        (Effect.FOREIGN, OSError),
        (Effect.FULL, TierFull),
    ):
        inner, tier, injector = faulty(effect)
        with pytest.raises(error):
            tier.write_from(B, chunk_of(B, N))
        assert not inner.has(B)
        assert injector.num_fired == 1
        tier.write_from(B, chunk_of(B, N))
        assert read(tier, B) == chunk_of(B, N)
        assert injector.num_fired == 1


def test_full_hits_writes_only() -> None:
    """An effect fires only on verbs that it can hit."""
    _, tier, injector = faulty(Effect.FULL)
    assert tier.contains(A)
    assert read(tier, A) == chunk_of(A, N)
    assert injector.num_calls == 0


def test_silent_writes() -> None:
    """Lost, torn, flipped and misdirected writes say nothing and do what they are called."""
    inner, tier, injector = faulty(Effect.LOST_WRITE)
    tier.write_from(B, chunk_of(B, N))
    assert not inner.has(B)
    assert injector.num_fired == 1

    inner, tier, _ = faulty(Effect.TORN_WRITE)
    tier.write_from(B, chunk_of(B, N))
    assert read(inner, B) == bytes(chunk_of(B, N)[: N // 2]) + bytes(N // 2)

    inner, tier, _ = faulty(Effect.FLIPPED_BIT)
    data = chunk_of(B, N)
    tier.write_from(B, data)
    assert data == chunk_of(B, N), "the caller's buffer is not touched"
    assert differing_bits(read(inner, B), data) == 1

    inner, tier, _ = faulty(Effect.MISDIRECTED_WRITE)
    tier.write_from(B, chunk_of(B, N))
    assert not inner.has(B)
    assert read(inner, A) == chunk_of(B, N)


def test_silent_reads() -> None:
    """Short, flipped and misdirected reads report success."""
    inner, tier, _ = faulty(Effect.SHORT_READ)
    assert read(tier, A) == bytes(chunk_of(A, N)[: N // 2]) + b"\x5a" * (N // 2)

    inner, tier, _ = faulty(Effect.FLIPPED_BIT)
    assert differing_bits(read(tier, A), chunk_of(A, N)) == 1
    assert read(inner, A) == chunk_of(A, N)

    _, tier, _ = faulty(Effect.MISDIRECTED_READ, index=1)
    tier.write_from(B, chunk_of(B, N))
    assert read(tier, B) == chunk_of(B, N)
    assert read(tier, B) == chunk_of(A, N)


def test_slow_takes_its_time_and_then_works() -> None:
    """SLOW waits on the clock it was given."""
    clock = ManualClock()
    inner = MemoryTier(1 << 16)
    tier = FaultyTier(inner, Injector(Effect.SLOW, on_index(0), seconds=7.0), clock=clock)
    thread = threading.Thread(target=tier.write_from, args=(A, chunk_of(A, N)))
    thread.start()
    clock.await_sleepers(1)
    assert not inner.has(A)
    clock.advance(7.0)
    thread.join(timeout=30)
    assert inner.has(A)


def test_a_hung_call_waits_for_release_and_then_works() -> None:
    """HANG keeps the call until `release`; afterwards nothing hangs."""
    inner = MemoryTier(1 << 16)
    tier = FaultyTier(inner, Injector(Effect.HANG, on_key(A)))
    thread = threading.Thread(target=tier.write_from, args=(A, chunk_of(A, N)))
    thread.start()
    tier.await_hung(1)
    assert not inner.has(A)
    tier.write_from(B, chunk_of(B, N))
    tier.release()
    thread.join(timeout=30)
    assert inner.has(A)
    assert tier.num_hung == 0
    assert read(tier, A) == chunk_of(A, N)


def test_predicates_choose_by_verb_key_index_and_chance() -> None:
    """Chosen calls are exactly those described; the same seed chooses the same ones."""
    injector = Injector(Effect.ERROR, both(on_verb("contains", "delete"), on_key(A)))
    chosen = [
        (verb, key)
        for verb in ("contains", "read_into", "write_from", "delete")
        for key in (A, B)
        if injector.chooses(verb, key)
    ]
    assert chosen == [("contains", A), ("delete", A)]

    def draw(seed: int) -> list[bool]:
        by_chance = Injector(Effect.ERROR, randomly(0.3, seed=seed))
        return [by_chance.chooses("delete", A) for _ in range(500)]

    assert draw(1) == draw(1) != draw(2)
    assert 100 < sum(draw(1)) < 200


def test_a_sweep_visits_every_call_and_ends() -> None:
    """The fault fires once per run, at a later call each time, until none is left."""
    fired: list[int] = []

    def run(injector: Injector) -> None:
        tier = FaultyTier(MemoryTier(1 << 16), injector)
        for key in (A, B):
            with suppress(TierUnavailable):
                tier.write_from(key, chunk_of(key, N))
        fired.append(injector.num_fired)

    assert sweep(run, Effect.ERROR) == 2
    assert fired == [1, 1, 0]


def test_a_sweep_without_end_is_a_failure() -> None:
    """A run whose fault always fires would go on for ever."""

    def run(injector: Injector) -> None:
        injector.num_fired = 1

    with pytest.raises(AssertionError, match="still fires at call 3"):
        sweep(run, Effect.ERROR, max_points=3)
