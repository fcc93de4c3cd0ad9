"""What every tier must do.

A tier's test is a subclass::

    class TestMemory(IndexedSuite, BoundedSuite, EpochalSuite, TierSuite):
        def make(self, path, capacity_bytes):
            return MemoryTier(capacity_bytes)

`TierSuite` is for all; the others are for tiers with that ability, and a test fails if one that
applies is left out. `VerifiedSuite` is for tiers that find out when their bytes were changed;
it needs the raw hooks, which reach the stored bytes past the tier. For tiers whose chunks outlive
the process there is `undercroft.testing.durable_suite`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from undercroft.errors import CorruptChunk, KvError, TierClosed, TierFull
from undercroft.keys import MAX_KEY_BYTES, ChunkKey
from undercroft.tiers.base import Bounded, Epochal, Indexed, Tier

__all__ = [
    "BoundedSuite",
    "EpochalSuite",
    "IndexedSuite",
    "TierSuite",
    "VerifiedSuite",
    "chunk_of",
    "key_of",
]

_MANY_CHUNKS = 24


def key_of(label: object, *, num_bytes: int = 36) -> ChunkKey:
    """A key that looks like vLLM's: a hash and a group id; the same label, the same key."""
    return ChunkKey((sha256(repr(label).encode()).digest() * 2)[: num_bytes - 4] + bytes(4))


def chunk_of(key: ChunkKey, num_bytes: int) -> memoryview:
    """The bytes that `key` always has in these tests; no two keys share a 16-byte piece."""
    return memoryview(bytearray(Random(key).randbytes(num_bytes)))  # noqa: S311 - to be repeated


class TierSuite:
    """Hooks to override, and what holds for every tier."""

    chunk_bytes = 4096
    capacity_bytes = 4 << 20

    def make(self, path: Path, capacity_bytes: int, /) -> Tier:
        """A tier, empty if `path` is. `capacity_bytes` is for tiers with a bound."""
        raise NotImplementedError

    def raw_get(self, tier: Tier, key: ChunkKey) -> bytes | None:
        """The stored bytes of `key`, header and all, past the tier; None if there are none."""
        raise NotImplementedError

    def raw_set(self, tier: Tier, key: ChunkKey, data: bytes) -> None:
        """Replace the stored bytes of `key`, past the tier; `data` may have another length."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier."""
        made = self.make(tmp_path, self.capacity_bytes)
        yield made
        made.close()

    def chunk(self, key: ChunkKey) -> memoryview:
        """What `key` holds, `(chunk_bytes,)` uint8."""
        return chunk_of(key, self.chunk_bytes)

    def read(self, tier: Tier, key: ChunkKey) -> memoryview | None:
        """The chunk as the tier gives it; None if absent, with `out` proven untouched."""
        out = bytearray(b"\xa5" * self.chunk_bytes)
        if tier.read_into(key, memoryview(out)):
            return memoryview(out)
        assert out == b"\xa5" * self.chunk_bytes, "a miss must leave `out` untouched"
        return None

    def is_right(self, tier: Tier, key: ChunkKey) -> bool:
        """True: the right bytes; False: absent or refused. Fails on wrong bytes."""
        try:
            data = self.read(tier, key)
        except CorruptChunk:
            return False
        assert data is None or data == self.chunk(key), "wrong bytes"
        return data is not None

    def test_is_a_tier_and_runs_the_suites_of_its_abilities(self, tier: Tier) -> None:
        """A tier has a name, and no ability of it goes untested."""
        assert isinstance(tier, Tier)
        assert tier.name
        for ability, suite in (
            (Indexed, IndexedSuite),
            (Bounded, BoundedSuite),
            (Epochal, EpochalSuite),
        ):
            assert isinstance(tier, ability) == isinstance(self, suite), suite.__name__

    def test_an_absent_chunk_is_a_miss(self, tier: Tier) -> None:
        """Nothing is there before it is written; deleting it is fine."""
        key = key_of("absent")
        assert not tier.contains(key)
        assert self.read(tier, key) is None
        tier.delete(key)

    @pytest.mark.parametrize("num_key_bytes", [5, 12, 36, MAX_KEY_BYTES])
    def test_what_was_written_reads_back(self, tier: Tier, num_key_bytes: int) -> None:
        """The same bytes come back, again and again, for keys of any length."""
        key = key_of("round", num_bytes=num_key_bytes)
        tier.write_from(key, self.chunk(key))
        assert tier.contains(key)
        assert self.read(tier, key) == self.chunk(key)
        assert self.read(tier, key) == self.chunk(key)

    def test_the_tier_keeps_a_copy(self, tier: Tier) -> None:
        """The buffer may be reused as soon as `write_from` is back."""
        key = key_of("copy")
        data = self.chunk(key)
        tier.write_from(key, data)
        data[:] = bytes(len(data))
        assert self.read(tier, key) == self.chunk(key)

    def test_buffers_may_be_parts_of_larger_ones(self, tier: Tier) -> None:
        """Reading fills exactly the view it was given."""
        key = key_of("part")
        n = self.chunk_bytes
        region = bytearray(3 * n)
        region[n : 2 * n] = self.chunk(key)
        tier.write_from(key, memoryview(region)[n : 2 * n])
        region[:] = bytes(3 * n)
        assert tier.read_into(key, memoryview(region)[n : 2 * n])
        assert region == bytes(n) + self.chunk(key) + bytes(n)

    def test_many_chunks_do_not_mix(self, tier: Tier) -> None:
        """Every key has its own bytes, also where keys share a beginning or an end."""
        keys = [ChunkKey(bytes(30) + bytes([i, 0, 0, 0, 0, 1])) for i in range(_MANY_CHUNKS)]
        keys += [ChunkKey(bytes([i]) + bytes(35)) for i in range(1, _MANY_CHUNKS)]
        for key in keys:
            tier.write_from(key, self.chunk(key))
        for key in reversed(keys):
            assert self.read(tier, key) == self.chunk(key)

    def test_writing_what_is_there_changes_nothing(self, tier: Tier) -> None:
        """A second write of a key is fine."""
        key = key_of("twice")
        tier.write_from(key, self.chunk(key))
        tier.write_from(key, self.chunk(key))
        assert self.read(tier, key) == self.chunk(key)
        tier.delete(key)
        assert self.read(tier, key) is None

    def test_deleting_forgets(self, tier: Tier) -> None:
        """A deleted chunk is a miss, its neighbour is not, and it can be written again."""
        key, neighbour = key_of("deleted"), key_of("kept")
        for each in (key, neighbour):
            tier.write_from(each, self.chunk(each))
        tier.delete(key)
        tier.delete(key)
        assert not tier.contains(key)
        assert self.read(tier, key) is None
        assert self.read(tier, neighbour) == self.chunk(neighbour)
        tier.write_from(key, self.chunk(key))
        assert self.read(tier, key) == self.chunk(key)

    @pytest.mark.parametrize("wrong_bytes", [4096, -2048])
    def test_another_length_is_corrupt_and_dropped(self, tier: Tier, wrong_bytes: int) -> None:
        """A chunk is never cut or padded; after the error it is a miss and can be written."""
        key = key_of("length")
        tier.write_from(key, self.chunk(key))
        out = memoryview(bytearray(self.chunk_bytes + wrong_bytes))
        with pytest.raises(CorruptChunk):
            tier.read_into(key, out)
        assert not tier.contains(key)
        assert self.read(tier, key) is None
        tier.write_from(key, self.chunk(key))
        assert self.read(tier, key) == self.chunk(key)

    def test_closed_is_closed(self, tmp_path: Path) -> None:
        """`close` may be called twice; every verb then says that the tier is closed."""
        tier = self.make(tmp_path, self.capacity_bytes)
        key = key_of("closed")
        tier.write_from(key, self.chunk(key))
        tier.close()
        tier.close()
        with pytest.raises(TierClosed):
            tier.contains(key)
        with pytest.raises(TierClosed):
            self.read(tier, key)
        with pytest.raises(TierClosed):
            tier.write_from(key, self.chunk(key))
        with pytest.raises(TierClosed):
            tier.delete(key)

    def test_many_threads_at_once(self, tier: Tier) -> None:
        """Threads that write, read and delete the same keys get the right bytes or a miss."""
        keys = [key_of(i) for i in range(4)]
        failures: list[BaseException] = []
        num_right = [0]

        def work(seed: int) -> None:
            random = Random(seed)  # noqa: S311 - to be repeated
            try:
                for _ in range(150):
                    key = random.choice(keys)
                    verb = random.randrange(8)
                    if verb == 0:
                        tier.delete(key)
                    elif verb <= 2:  # noqa: PLR2004 - two in eight
                        tier.write_from(key, self.chunk(key))
                    else:
                        data = self.read(tier, key)
                        assert data is None or data == self.chunk(key), "wrong bytes"
                        num_right[0] += data is not None
            except BaseException as exc:  # noqa: BLE001 - reported by the main thread
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert num_right[0] > 0


class IndexedSuite(TierSuite):
    """For tiers that know what they hold without I/O."""

    def test_the_index_agrees_with_the_tier(self, tier: Tier) -> None:
        """`has` is `contains`, after a write, a delete, and a drop."""
        assert isinstance(tier, Indexed)
        key = key_of("indexed")
        assert not tier.has(key)
        tier.write_from(key, self.chunk(key))
        assert tier.has(key)
        tier.delete(key)
        assert not tier.has(key)
        tier.write_from(key, self.chunk(key))
        with pytest.raises(CorruptChunk):
            tier.read_into(key, memoryview(bytearray(2 * self.chunk_bytes)))
        assert not tier.has(key)

    def test_evictable_names_every_chunk_once(self, tier: Tier) -> None:
        """Oldest first when nothing was read, each with the length it was written with."""
        assert isinstance(tier, Indexed)
        keys = [key_of(i) for i in range(5)]
        for key in keys:
            tier.write_from(key, self.chunk(key))
        tier.delete(keys[2])
        del keys[2]
        assert list(tier.evictable()) == [(key, self.chunk_bytes) for key in keys]


class BoundedSuite(TierSuite):
    """For tiers with a hard bound."""

    num_fitting_chunks = 4

    def fill(self, tier: Tier, label: object = "fill") -> list[ChunkKey]:
        """Write until the tier is full; the keys that it took."""
        taken: list[ChunkKey] = []
        for i in range(4 * self.capacity_bytes // self.chunk_bytes):
            key = key_of((label, i))
            try:
                tier.write_from(key, self.chunk(key))
            except TierFull:
                return taken
            taken.append(key)
        raise AssertionError("the tier never said TierFull")

    def small(self, path: Path) -> Tier:
        """A tier that a few chunks fill."""
        return self.make(path, (self.num_fitting_chunks + 1) * self.chunk_bytes - 1)

    def test_the_bound_holds_and_the_rest_still_reads(self, tmp_path: Path) -> None:
        """A full tier refuses, is never above its bound, and serves what it holds."""
        tier = self.small(tmp_path)
        assert isinstance(tier, Bounded)
        num_free = tier.free_chunks(self.chunk_bytes)
        taken = self.fill(tier)
        assert 1 <= num_free <= len(taken) <= self.num_fitting_chunks
        assert len(taken) * self.chunk_bytes <= tier.used_bytes() <= tier.capacity_bytes
        assert tier.free_chunks(self.chunk_bytes) == 0
        for key in taken:
            assert self.read(tier, key) == self.chunk(key)
        tier.close()

    def test_deleting_makes_room(self, tmp_path: Path) -> None:
        """Each deleted chunk makes room for one, as often as one likes: nothing leaks."""
        tier = self.small(tmp_path)
        assert isinstance(tier, Bounded)
        taken = self.fill(tier)
        full_bytes = tier.used_bytes()
        for i in range(3 * self.num_fitting_chunks):
            tier.delete(taken.pop(0))
            assert tier.used_bytes() < full_bytes
            key = key_of(("more", i))
            tier.write_from(key, self.chunk(key))
            taken.append(key)
        assert tier.used_bytes() == full_bytes
        tier.close()

    def test_rewriting_and_missing_deletes_charge_nothing(self, tier: Tier) -> None:
        """Only what is held is charged."""
        assert isinstance(tier, Bounded)
        empty_bytes = tier.used_bytes()
        key = key_of("charged")
        tier.write_from(key, self.chunk(key))
        one_bytes = tier.used_bytes()
        assert one_bytes >= empty_bytes + self.chunk_bytes
        tier.write_from(key, self.chunk(key))
        tier.delete(key_of("absent"))
        assert tier.used_bytes() == one_bytes
        tier.delete(key)
        assert tier.used_bytes() == empty_bytes

    def test_a_dropped_chunk_is_uncharged(self, tier: Tier) -> None:
        """A chunk that was dropped as corrupt no longer takes room."""
        assert isinstance(tier, Bounded)
        empty_bytes = tier.used_bytes()
        key = key_of("dropped")
        tier.write_from(key, self.chunk(key))
        with pytest.raises(CorruptChunk):
            tier.read_into(key, memoryview(bytearray(2 * self.chunk_bytes)))
        assert tier.used_bytes() == empty_bytes

    def test_the_bound_holds_against_many_threads(self, tmp_path: Path) -> None:
        """Writers at once never get the tier above its bound, and what it took reads back."""
        tier = self.small(tmp_path)
        assert isinstance(tier, Bounded)
        takens: list[list[ChunkKey]] = []
        threads = [
            threading.Thread(target=lambda i=i: takens.append(self.fill(tier, i))) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(takens) == len(threads)
        taken = [key for each in takens for key in each]
        assert 1 <= len(taken) <= self.num_fitting_chunks
        assert tier.used_bytes() <= tier.capacity_bytes
        for key in taken:
            assert self.read(tier, key) == self.chunk(key)
        tier.close()


class EpochalSuite(TierSuite):
    """For tiers whose contents can be made void at once."""

    def test_a_new_epoch_voids_everything(self, tier: Tier) -> None:
        """After `raise_epoch` nothing stored before is served; later chunks are."""
        assert isinstance(tier, Epochal)
        old, new = key_of("old"), key_of("new")
        tier.write_from(old, self.chunk(old))
        before = tier.epoch()
        raised = tier.raise_epoch()
        assert raised > before
        assert tier.epoch() == raised
        assert not tier.contains(old)
        assert self.read(tier, old) is None
        for key in (new, old):
            tier.write_from(key, self.chunk(key))
            assert self.read(tier, key) == self.chunk(key)

    def test_a_write_for_an_older_epoch_is_refused(self, tier: Tier) -> None:
        """It leaves nothing, takes nothing away, and the same chunk may be written anew."""
        assert isinstance(tier, Epochal)
        old, new = key_of("old"), key_of("new")
        before = tier.epoch()
        assert tier.write_in_epoch(old, self.chunk(old), before)
        assert self.read(tier, old) == self.chunk(old)
        now = tier.raise_epoch()
        assert tier.write_in_epoch(new, self.chunk(new), now)
        for key in (old, new):
            assert not tier.write_in_epoch(key, memoryview(bytes(self.chunk_bytes)), before)
        assert not tier.contains(old)
        assert self.read(tier, old) is None
        assert self.read(tier, new) == self.chunk(new)
        assert tier.write_in_epoch(old, self.chunk(old), now)
        assert self.read(tier, old) == self.chunk(old)

    def test_late_writes_do_not_reach_the_next_epoch(self, tier: Tier) -> None:
        """Threads that write for the old epoch while it is raised leave nothing in the new one."""
        assert isinstance(tier, Epochal)
        stale = memoryview(bytes(self.chunk_bytes))
        for turn in range(3):
            before = tier.epoch()
            keys = [key_of((turn, i)) for i in range(_MANY_CHUNKS)]
            started = threading.Event()

            def write(part: list[ChunkKey], epoch: int, started: threading.Event) -> None:
                for key in part:
                    tier.write_in_epoch(key, stale, epoch)
                    started.set()

            threads = [
                threading.Thread(target=write, args=(keys[i::2], before, started)) for i in (0, 1)
            ]
            for thread in threads:
                thread.start()
            started.wait()
            tier.raise_epoch()
            for thread in threads:
                thread.join()
            for key in keys:
                assert self.read(tier, key) is None, "from before"

    def test_void_chunks_give_their_room_back(self, tier: Tier) -> None:
        """A full tier takes as many chunks again in the next epoch."""
        assert isinstance(tier, Epochal)
        for _ in range(3):
            for i in range(self.capacity_bytes // self.chunk_bytes // 2):
                key = key_of(i)
                tier.write_from(key, self.chunk(key))
            tier.raise_epoch()


class VerifiedSuite(TierSuite):
    """For tiers that notice when the stored bytes are not those that were written."""

    def broken(self, good: bytes) -> Iterator[tuple[str, bytes]]:
        """Ways in which stored bytes go bad."""
        random = Random(5)  # noqa: S311 - to be repeated
        bits = [random.randrange(8 * len(good)) for _ in range(64)]
        bits += range(0, 8 * 128, 7)  # the beginning, where headers are
        for bit in bits:
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} flipped", bytes(bad)
        yield "cut", good[: len(good) // 2]
        yield "empty", b""
        yield "grown", good + bytes(4096)
        yield "zeros", bytes(len(good))
        yield "torn", good[: len(good) // 2] + bytes(len(good) - len(good) // 2)

    def test_changed_bytes_are_never_served(self, tier: Tier) -> None:
        """Whatever happens to the stored bytes: the right chunk or none; then it heals."""
        key, neighbour = key_of("victim"), key_of("neighbour")
        tier.write_from(neighbour, self.chunk(neighbour))
        tier.write_from(key, self.chunk(key))
        good = self.raw_get(tier, key)
        assert good is not None
        assert len(good) >= self.chunk_bytes
        num_refused = 0
        for what, bad in self.broken(good):
            self.raw_set(tier, key, bad)
            try:
                right = self.is_right(tier, key)
            except KvError as exc:
                raise AssertionError(f"{what}: {exc!r}") from exc
            num_refused += not right
            if not right:
                assert not tier.contains(key), what
            tier.write_from(key, self.chunk(key))
            assert self.read(tier, key) == self.chunk(key), what
        assert num_refused > 0
        assert self.read(tier, neighbour) == self.chunk(neighbour)

    def test_swapped_chunks_are_never_served(self, tier: Tier) -> None:
        """Two chunks in each other's place are two misses."""
        one, two = key_of("one"), key_of("two")
        for key in (one, two):
            tier.write_from(key, self.chunk(key))
        raw_one, raw_two = self.raw_get(tier, one), self.raw_get(tier, two)
        assert raw_one is not None
        assert raw_two is not None
        self.raw_set(tier, one, raw_two)
        self.raw_set(tier, two, raw_one)
        for key in (one, two):
            assert not self.is_right(tier, key)
            tier.write_from(key, self.chunk(key))
            assert self.read(tier, key) == self.chunk(key)

    def test_deleted_bytes_are_a_miss(self, tier: Tier) -> None:
        """The raw hooks see what the tier does: nothing is left after a delete."""
        key = key_of("gone")
        tier.write_from(key, self.chunk(key))
        assert self.raw_get(tier, key) is not None
        tier.delete(key)
        assert self.raw_get(tier, key) is None
