from __future__ import annotations

from pathlib import Path

import pytest

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.testing.tier_suite import (
    BoundedSuite,
    EpochalSuite,
    IndexedSuite,
    TierSuite,
    chunk_of,
    key_of,
)
from undercroft.tiers.base import Tier
from undercroft.tiers.memory import MemoryTier


class TestMemory(IndexedSuite, BoundedSuite, EpochalSuite, TierSuite):
    def make(self, _path: Path, capacity_bytes: int, /) -> MemoryTier:
        return MemoryTier(capacity_bytes)

    def raw_get(self, tier: Tier, key: ChunkKey) -> bytes | None:
        assert isinstance(tier, MemoryTier)
        return tier._chunks.get(key)


def test_no_capacity_is_refused() -> None:
    """A tier without room is a mistake, named with its value."""
    with pytest.raises(ConfigError, match=r"capacity_bytes of tier 'm' is 0: give at least 1"):
        MemoryTier(0, name="m")


def test_real_bytes_are_kept() -> None:
    """The tier holds the chunk's bytes, not a note that it had them."""
    tier = MemoryTier(8192)
    key = key_of("real")
    tier.write_from(key, chunk_of(key, 4096))
    assert tier._chunks[key] == chunk_of(key, 4096)


def test_what_was_read_is_evictable_last() -> None:
    """The coldest chunk comes first."""
    tier = MemoryTier(1 << 20)
    keys = [key_of(i) for i in range(3)]
    for key in keys:
        tier.write_from(key, chunk_of(key, 64))
    assert tier.read_into(keys[0], memoryview(bytearray(64)))
    assert [key for key, _ in tier.evictable()] == [keys[1], keys[2], keys[0]]


@pytest.mark.parametrize("void", ["raise_epoch", "close"])
def test_a_write_under_way_does_not_outlive_its_epoch(void: str) -> None:
    """A chunk whose copy was being made when everything became void is not kept or charged."""
    tier = MemoryTier(8192)
    key = key_of("late")

    class Data:
        nbytes = 64

        def __bytes__(self) -> bytes:
            getattr(tier, void)()
            return bytes(64)

    tier.write_from(key, Data())  # type: ignore[arg-type]
    assert not tier.has(key)
    assert tier.used_bytes() == 0


def test_a_failed_copy_is_uncharged() -> None:
    """If the copy cannot be made, its room is given back and the error is seen."""
    tier = MemoryTier(8192)

    class Data:
        nbytes = 64

        def __bytes__(self) -> bytes:
            raise MemoryError

    with pytest.raises(MemoryError):
        tier.write_from(key_of("fails"), Data())  # type: ignore[arg-type]
    assert tier.used_bytes() == 0


def test_two_writers_of_one_key_charge_it_once() -> None:
    """The second of two writes under way finds the key there and gives its room back."""
    tier = MemoryTier(8192)
    key = key_of("twice")

    class Data:
        nbytes = 64

        def __bytes__(self) -> bytes:
            tier.write_from(key, chunk_of(key, 64))
            return bytes(64)

    tier.write_from(key, Data())  # type: ignore[arg-type]
    assert tier.used_bytes() == 64
    assert tier._chunks[key] == chunk_of(key, 64)


def test_a_chunk_that_is_being_read_is_there_all_the_while() -> None:
    """`has` takes no lock: a reader must not take the chunk out to make it the hottest."""
    tier = MemoryTier(8192)
    key = key_of("read")
    tier.write_from(key, chunk_of(key, 64))
    seen: list[bool] = []

    class Out:
        @property
        def nbytes(self) -> int:
            seen.append(tier.has(key))
            return 64

        def __setitem__(self, _where: slice, _chunk: bytes) -> None:
            seen.append(tier.has(key))

    assert tier.read_into(key, Out())  # type: ignore[arg-type]
    assert seen == [True, True]
