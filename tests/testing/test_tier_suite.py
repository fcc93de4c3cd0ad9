"""The shipped suites pass on a right tier and fail on each wrong one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from undercroft.errors import CorruptChunk, TierClosed
from undercroft.keys import ChunkKey
from undercroft.testing.durable_suite import DurableSuite
from undercroft.testing.tier_suite import (
    BoundedSuite,
    EpochalSuite,
    IndexedSuite,
    TierSuite,
    key_of,
)
from undercroft.tiers.base import Tier
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier


class FileTier:
    """The least durable tier there is: a file per chunk, one lock."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._closed = False

    def _at(self, key: ChunkKey) -> Path:
        if self._closed:
            raise TierClosed("closed", tier=self.name)
        return self._path / key.hex()

    def contains(self, key: ChunkKey) -> bool:
        return self._at(key).exists()

    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        at = self._at(key)
        with self._lock:
            if not at.exists():
                return False
            data = at.read_bytes()
            if len(data) != out.nbytes:
                at.unlink()
                raise CorruptChunk("length", tier=self.name, key=key)
        out[:] = data
        return True

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        at = self._at(key)
        with self._lock:
            at.write_bytes(data)

    def delete(self, key: ChunkKey) -> None:
        at = self._at(key)
        with self._lock:
            at.unlink(missing_ok=True)

    def close(self) -> None:
        self._closed = True


class TestFileTier(DurableSuite, TierSuite):
    def make(self, path: Path, _capacity_bytes: int, /) -> FileTier:
        return FileTier(path)


class TestCheckedFileTier(DurableSuite, TierSuite):
    def make(self, path: Path, _capacity_bytes: int, /) -> Checked:
        return Checked(FileTier(path))


class TouchesOut(MemoryTier):
    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        if not self.has(key):
            out[0] = 0
        return super().read_into(key, out)


class CutsKeys(MemoryTier):
    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        return super().read_into(ChunkKey(key[:12]), out)

    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        super().write_from(ChunkKey(key[:12]), data)

    def contains(self, key: ChunkKey) -> bool:
        return super().contains(ChunkKey(key[:12]))


class KeepsNoCopy(MemoryTier):
    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        self._chunks[key] = data  # type: ignore[assignment]


class NeverDeletes(MemoryTier):
    def delete(self, key: ChunkKey) -> None:
        pass


class Pads(MemoryTier):
    def read_into(self, key: ChunkKey, out: memoryview) -> bool:
        stored = self._chunks.get(key)
        if stored is None:
            return False
        out[:] = (stored + bytes(out.nbytes))[: out.nbytes]
        return True


class StaysOpen(MemoryTier):
    def close(self) -> None:
        pass


class Unbounded(MemoryTier):
    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        self.capacity_bytes += data.nbytes
        super().write_from(key, data)


class ChargesTwice(MemoryTier):
    def write_from(self, key: ChunkKey, data: memoryview) -> None:
        if self.has(key):
            self._used_bytes += data.nbytes
        super().write_from(key, data)


class LeaksRoom(MemoryTier):
    def delete(self, key: ChunkKey) -> None:
        self._chunks.pop(key, None)


class StaleIndex(MemoryTier):
    def has(self, key: ChunkKey) -> bool:
        return not super().has(key)


class ForgetsSome(MemoryTier):
    def evictable(self) -> Iterable[tuple[ChunkKey, int]]:
        return list(super().evictable())[1:]


class KeepsOldEpochs(MemoryTier):
    def raise_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


class IgnoresEpochs(MemoryTier):
    def write_in_epoch(self, key: ChunkKey, data: memoryview, _epoch: int) -> bool:
        self.write_from(key, data)
        return True


class LooksTooEarly(MemoryTier):
    def write_in_epoch(self, key: ChunkKey, data: memoryview, epoch: int) -> bool:
        if epoch != self.epoch():
            return False
        time.sleep(0.001)
        self.write_from(key, data)
        return True


class MemorySuite(IndexedSuite, BoundedSuite, EpochalSuite, TierSuite):
    def __init__(self, made: Callable[[int], Tier]) -> None:
        self.made = made

    def make(self, _path: Path, capacity_bytes: int, /) -> Tier:
        return self.made(capacity_bytes)


@pytest.mark.parametrize(
    ("wrong", "test", "takes_path"),
    [
        (TouchesOut, "test_an_absent_chunk_is_a_miss", False),
        (CutsKeys, "test_many_chunks_do_not_mix", False),
        (KeepsNoCopy, "test_the_tier_keeps_a_copy", False),
        (NeverDeletes, "test_deleting_forgets", False),
        (StaysOpen, "test_closed_is_closed", True),
        (Unbounded, "test_the_bound_holds_and_the_rest_still_reads", True),
        (Unbounded, "test_the_bound_holds_against_many_threads", True),
        (LeaksRoom, "test_deleting_makes_room", True),
        (ChargesTwice, "test_rewriting_and_missing_deletes_charge_nothing", False),
        (StaleIndex, "test_the_index_agrees_with_the_tier", False),
        (ForgetsSome, "test_evictable_names_every_chunk_once", False),
        (KeepsOldEpochs, "test_a_new_epoch_voids_everything", False),
        (IgnoresEpochs, "test_a_write_for_an_older_epoch_is_refused", False),
        (LooksTooEarly, "test_late_writes_do_not_reach_the_next_epoch", False),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_wrong_tier_is_found_out(
    wrong: Callable[[int], Tier], test: str, takes_path: bool, tmp_path: Path
) -> None:
    """Each way to be wrong fails the test that is there for it, which a right tier passes."""
    for made, right in ((MemoryTier, True), (wrong, False)):
        suite = MemorySuite(made)
        argument = tmp_path if takes_path else suite.make(tmp_path, suite.capacity_bytes)
        if right:
            getattr(suite, test)(argument)
        else:
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                getattr(suite, test)(argument)


def test_padding_is_found_out(tmp_path: Path) -> None:
    """A tier that makes chunks fit is refused for both lengths."""
    suite = MemorySuite(Pads)
    for wrong_bytes in (4096, -2048):
        with pytest.raises(pytest.fail.Exception):
            suite.test_another_length_is_corrupt_and_dropped(
                suite.make(tmp_path, suite.capacity_bytes), wrong_bytes
            )


def test_keys_look_like_real_ones() -> None:
    """The same label gives the same key, of the length that was asked for."""
    assert key_of("a") == key_of("a") != key_of("b")
    assert [len(key_of("a", num_bytes=n)) for n in (5, 36, 64)] == [5, 36, 64]
