from __future__ import annotations

import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import xxhash

from undercroft.errors import (
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    KvError,
    TierFull,
    TierUnavailable,
)
from undercroft.keys import ChunkKey, Namespace
from undercroft.testing.faults import (
    Effect,
    FaultyTier,
    Injector,
    on_index,
    on_key,
    on_verb,
    sweep,
)
from undercroft.testing.tier_suite import (
    BoundedSuite,
    EpochalSuite,
    IndexedSuite,
    TierSuite,
    VerifiedSuite,
    chunk_of,
    key_of,
)
from undercroft.tiers.base import Bounded, Epochal, Following, Indexed, Tier
from undercroft.tiers.checked import Checked
from undercroft.tiers.frame import HEADER_BYTES
from undercroft.tiers.memory import MemoryTier

N = 4096


class RawHooks(VerifiedSuite):
    def raw_get(self, tier: Tier, key: ChunkKey) -> bytes | None:
        return self.inner_of(tier)._chunks.get(key)

    def raw_set(self, tier: Tier, key: ChunkKey, data: bytes) -> None:
        inner = self.inner_of(tier)
        inner._used_bytes += len(data) - len(inner._chunks[key])
        inner._chunks[key] = data

    def inner_of(self, tier: Tier) -> MemoryTier:
        assert isinstance(tier, Checked)
        inner = tier.inner
        assert isinstance(inner, MemoryTier)
        return inner


class TestChecked(RawHooks, IndexedSuite, BoundedSuite, EpochalSuite, TierSuite):
    num_fitting_chunks = 3  # the header takes room too

    def make(self, _path: Path, capacity_bytes: int, /) -> Checked:
        return Checked(MemoryTier(capacity_bytes))

    def small(self, path: Path) -> Tier:
        return self.make(
            path, (self.num_fitting_chunks + 1) * (self.chunk_bytes + HEADER_BYTES) - 1
        )


class TestUnchecked(RawHooks):
    """The negative control: without the wrapper, the suite finds wrong bytes."""

    def make(self, _path: Path, capacity_bytes: int, /) -> MemoryTier:
        return MemoryTier(capacity_bytes)

    def inner_of(self, tier: Tier) -> MemoryTier:
        assert isinstance(tier, MemoryTier)
        return tier

    def test_is_a_tier_and_runs_the_suites_of_its_abilities(self, tier: Tier) -> None:
        """A test class that leaves out the suites of its tier's abilities fails."""
        with pytest.raises(AssertionError, match="IndexedSuite"):
            super().test_is_a_tier_and_runs_the_suites_of_its_abilities(tier)

    def test_changed_bytes_are_never_served(self, tier: Tier) -> None:
        """The suite bites."""
        with pytest.raises(AssertionError, match="wrong bytes"):
            super().test_changed_bytes_are_never_served(tier)

    def test_swapped_chunks_are_never_served(self, tier: Tier) -> None:
        """The suite bites."""
        with pytest.raises(AssertionError, match="wrong bytes"):
            super().test_swapped_chunks_are_never_served(tier)


class Bare:
    """A tier without any ability."""

    name = "bare"

    def __init__(self) -> None:
        self._inner = MemoryTier(1 << 20)
        self.contains = self._inner.contains
        self.read_into = self._inner.read_into
        self.write_from = self._inner.write_from
        self.delete = self._inner.delete
        self.close = self._inner.close


def test_the_wrapper_has_the_abilities_of_the_inner_tier_and_no_others() -> None:
    """`isinstance` sees through the wrapper, however deep."""
    abilities = (Indexed, Bounded, Epochal)
    able, bare = Checked(Checked(MemoryTier(1 << 20))), Checked(Checked(Bare()))
    assert all(isinstance(able, ability) for ability in abilities)
    assert not any(isinstance(bare, ability) for ability in abilities)
    assert isinstance(bare, Tier)
    assert isinstance(bare, Checked)
    key = key_of("bare")
    bare.write_from(key, chunk_of(key, N))
    out = bytearray(N)
    assert bare.read_into(key, memoryview(out))
    assert out == chunk_of(key, N)


class Shared(MemoryTier):
    """A tier that took over one chunk of another process."""

    num_refreshed = 0

    def refresh(self) -> None:
        self.num_refreshed += 1

    def take_lost(self) -> list[tuple[ChunkKey, str]]:
        return [(key_of("lost"), "vanished")]

    def take_adopted(self) -> list[tuple[ChunkKey, int]]:
        return [(key_of("adopted"), N + HEADER_BYTES)]


def test_a_wrapped_tier_still_follows_others() -> None:
    """What was adopted comes through, with the chunk's own length."""
    inner = Shared(1 << 20)
    tier = Checked(inner)
    assert isinstance(tier, Following)
    tier.refresh()
    assert inner.num_refreshed == 1
    assert list(tier.take_adopted()) == [(key_of("adopted"), N)]
    assert list(tier.take_lost()) == [(key_of("lost"), "vanished")]
    assert not isinstance(Checked(MemoryTier(1)), Following)


def test_room_and_lengths_are_those_of_the_chunk() -> None:
    """`free_chunks` counts the header in, `evictable` counts it out."""
    tier = Checked(MemoryTier(2 * (N + HEADER_BYTES) - 1))
    assert isinstance(tier, Bounded)
    assert isinstance(tier, Indexed)
    assert tier.free_chunks(N) == 1
    key = key_of("room")
    tier.write_from(key, chunk_of(key, N))
    assert tier.used_bytes() == N + HEADER_BYTES
    assert list(tier.evictable()) == [(key, N)]
    with pytest.raises(TierFull):
        tier.write_from(key_of("more"), chunk_of(key, N))


def test_another_namespace_is_not_served() -> None:
    """Two models that meet in one place do not get each other's chunks."""
    inner = MemoryTier(1 << 20)
    mine = Checked(inner, namespace=Namespace({"model": "a"}))
    theirs = Checked(inner, namespace=Namespace({"model": "b"}))
    key = key_of("shared")
    theirs.write_from(key, chunk_of(key, N))
    out = bytearray(N)
    with pytest.raises(CorruptChunk, match="another chunk"):
        mine.read_into(key, memoryview(out))
    assert out == bytes(N), "a refused chunk must not reach the buffer"


def test_a_later_format_is_refused_and_kept() -> None:
    """What a later version wrote is neither guessed at nor destroyed."""
    inner = MemoryTier(1 << 20)
    tier = Checked(inner)
    key = key_of("later")
    tier.write_from(key, chunk_of(key, N))
    later = bytearray(inner._chunks[key])
    later[8:10] = struct.pack("<H", 2)
    later[4088:4096] = struct.pack("<Q", xxhash.xxh3_64_intdigest(later[:4088]))
    inner._chunks[key] = bytes(later)
    with pytest.raises(FormatTooNew, match="format version 2; this release reads up to 1"):
        tier.read_into(key, memoryview(bytearray(N)))
    assert tier.contains(key)


def test_a_key_too_long_is_refused() -> None:
    """A key that the header cannot hold is refused before anything is stored."""
    with pytest.raises(ConfigError, match="a key of 65 bytes"):
        Checked(MemoryTier(1 << 20)).write_from(ChunkKey(bytes(65)), chunk_of(key_of(1), N))


def test_a_bad_chunk_that_cannot_be_deleted_is_still_gone() -> None:
    """Even if the drop fails, the chunk is a miss until it was written anew."""
    stuck = Injector(Effect.ERROR, on_verb("delete"))
    inner = MemoryTier(1 << 20)
    tier = Checked(FaultyTier(inner, Injector(Effect.FLIPPED_BIT, on_index(0)), stuck))
    assert isinstance(tier, Indexed)
    key = key_of("stuck")
    tier.write_from(key, chunk_of(key, N))
    with pytest.raises(CorruptChunk):
        tier.read_into(key, memoryview(bytearray(N)))
    assert stuck.num_fired == 1
    assert inner.has(key)
    assert not tier.contains(key)
    assert not tier.has(key)
    assert not tier.read_into(key, memoryview(bytearray(N)))
    with pytest.raises(TierUnavailable):
        tier.write_from(key, chunk_of(key, N))
    stuck.active = False
    tier.write_from(key, chunk_of(key, N))
    out = bytearray(N)
    assert tier.has(key)
    assert tier.read_into(key, memoryview(out))
    assert out == chunk_of(key, N)


def tier_of_bad_chunks(num: int, delete: Injector) -> tuple[Checked, MemoryTier]:
    """Full of chunks that read back wrong, none of which could be deleted then."""
    flipped = Injector(Effect.FLIPPED_BIT, verbs=("read_into",))
    inner = MemoryTier(num * (N + HEADER_BYTES))
    tier = Checked(FaultyTier(inner, flipped, delete))
    for number in range(num):
        tier.write_from(key_of(number), chunk_of(key_of(number), N))
        with pytest.raises(CorruptChunk):
            tier.read_into(key_of(number), memoryview(bytearray(N)))
    assert len(inner._chunks) == len(tier.suspects) == num
    flipped.active = False
    return tier, inner


@pytest.mark.parametrize("effect", [Effect.READ_ONLY, Effect.ERROR, Effect.FOREIGN])
def test_bad_chunks_that_could_not_be_deleted_give_their_room_back(effect: Effect) -> None:
    """As soon as the tier can be written to again; nobody above can delete what it never saw."""
    stuck = Injector(effect, verbs=("delete",))
    tier, inner = tier_of_bad_chunks(12, stuck)
    with pytest.raises(TierFull):
        tier.write_from(key_of("early"), chunk_of(key_of("early"), N))
    stuck.active = False
    fresh = [key_of(f"fresh {number}") for number in range(12)]
    for key in fresh:
        tier.write_from(key, chunk_of(key, N))
    assert set(inner._chunks) == set(fresh)
    assert not tier.suspects


def test_deletes_too_get_rid_of_bad_chunks_and_one_that_stays_stuck_bars_no_other() -> None:
    """Each has its turn."""
    stuck = Injector(Effect.ERROR, verbs=("delete",))
    tier, inner = tier_of_bad_chunks(4, stuck)
    stuck.active = False
    worst = key_of(2)
    cast(FaultyTier, tier.inner).injectors = (
        Injector(Effect.ERROR, on_key(worst), verbs=("delete",)),
    )
    for number in range(16):
        tier.delete(key_of(f"absent {number}"))
    assert set(inner._chunks) == set(tier.suspects) == {worst}


def test_what_replaces_a_bad_chunk_is_not_deleted_for_it() -> None:
    """Not even if another thread was just about to delete the bad one, for long."""
    hangs = Injector(Effect.HANG, on_key(key_of(0)), verbs=("delete",))
    stuck = Injector(Effect.ERROR, verbs=("delete",))
    tier, inner = tier_of_bad_chunks(1, stuck)
    faulty = cast(FaultyTier, tier.inner)
    faulty.injectors = (hangs,)
    other, again = key_of("other"), chunk_of(key_of(0), N)
    deleting = threading.Thread(target=tier.delete, args=(other,))
    writing = threading.Thread(target=tier.write_from, args=(key_of(0), again))
    deleting.start()
    faulty.await_hung(1)
    writing.start()
    writing.join(0.1)
    hangs.active = False
    for thread in (deleting, writing):
        thread.join(30)
        assert not thread.is_alive()
    out = bytearray(N)
    assert tier.read_into(key_of(0), memoryview(out))
    assert out == again
    assert not tier.suspects
    assert len(inner._chunks) == 1


def history(tier: Tier) -> int:
    """Write, read, delete and rewrite under any faults; no wrong bytes. Returns the hits."""
    keys = [key_of(i) for i in range(4)]
    num_hits = 0
    for step in range(3):
        for key in keys:
            with suppress(KvError, OSError):
                tier.write_from(key, chunk_of(key, N))
                if step == 1 and key == keys[1]:
                    tier.delete(key)
        for key in keys:
            out = memoryview(bytearray(N))
            try:
                found = tier.read_into(key, out)
            except (KvError, OSError):
                continue
            assert not found or out == chunk_of(key, N), "wrong bytes"
            num_hits += found
    return num_hits


FAULTS = [effect for effect in Effect if effect not in {Effect.SLOW, Effect.HANG, Effect.KILLED}]
SILENT = [
    Effect.SHORT_READ,
    Effect.FLIPPED_BIT,
    Effect.TORN_WRITE,
    Effect.MISDIRECTED_WRITE,
    Effect.MISDIRECTED_READ,
]


@pytest.mark.parametrize("effect", FAULTS, ids=lambda effect: effect.name)
def test_fault_sweep(effect: Effect) -> None:
    """Each fault at each call: never wrong bytes, and the chunks that it did not hit are hits."""

    def run(injector: Injector) -> None:
        num_hits = history(Checked(FaultyTier(MemoryTier(1 << 20), injector)))
        assert num_hits >= 11 - 4, "a fault must cost few chunks"

    assert sweep(run, effect) >= 12


@pytest.mark.parametrize("effect", SILENT, ids=lambda effect: effect.name)
def test_fault_sweep_fails_without_the_wrapper(effect: Effect) -> None:
    """The negative control: the same sweep finds wrong bytes once the wrapper is gone."""

    def run(injector: Injector) -> None:
        history(FaultyTier(MemoryTier(1 << 20), injector))

    with pytest.raises(AssertionError, match="wrong bytes"):
        sweep(run, effect)
