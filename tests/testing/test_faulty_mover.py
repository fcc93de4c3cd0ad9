"""Tier type `faulty` round a disk whose bytes a process of its own moves: faults reach both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.testing.test_faulty import N, Rig, soon
from tests.tiers.disk.test_disk_mover import Level0, all_of, is_alive

from undercroft.errors import CorruptChunk, TierUnavailable
from undercroft.keys import ChunkKey
from undercroft.testing.fault_plan import Fault
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.base import Batched, MovedElsewhere

KEYS = [key_of(letter) for letter in "abcdefgh"]


class Moved(Rig):
    """With its process ready."""

    def __init__(self, folder: Path) -> None:
        disk = {"type": "disk", "path": str(folder / "kv"), "capacity": "32MiB"}
        super().__init__(folder, {**disk, "free_space_floor": 0, "mover_process": True})
        self.level_0 = Level0(len(KEYS), N)
        self.open(self.level_0.memory)
        assert self.tier.inner.await_mover(60)

    @property
    def pid(self) -> int | None:
        pid: int | None = self.tier.inner._mover.pid
        return pid

    def fired(self, name: str) -> dict[int, int]:
        """By process."""
        return {status.pid: status.fired[name] for status in self.control.statuses()}

    def write_all(self) -> list[object]:
        given = []
        for place, key in enumerate(KEYS):
            self.level_0.slot(place)[:] = chunk_of(key, N)
            given.append((key, self.level_0.slot(place), None))
        return all_of(self.tier.write_many(given))

    def read_all(self) -> list[object]:
        """What is said to be there is right."""
        for place in range(len(KEYS)):
            self.level_0.slot(place)[:] = bytes(N)
        wanted = [(key, self.level_0.slot(place)) for place, key in enumerate(KEYS)]
        ends = all_of(self.tier.read_many(wanted))
        for place, (key, end) in enumerate(zip(KEYS, ends, strict=True)):
            assert end is not True or self.level_0.slot(place) == chunk_of(key, N)
        return ends


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Moved]:
    rig = Moved(tmp_path)
    yield rig
    rig.control.clear()
    rig.tier.close()
    rig.level_0.close()


def test_batches_of_the_process_meet_the_faults_of_the_tier(rig: Moved) -> None:
    """One chunk of a batch fails; the others go by the process."""
    assert isinstance(rig.tier, Batched)
    assert isinstance(rig.tier, MovedElsewhere)
    assert rig.tier.is_moved_elsewhere()
    assert rig.write_all() == [True] * len(KEYS)
    rig.control.apply(Fault("error", calls=("read_into",), index=2))
    ends = rig.read_all()
    assert [type(end) for end in ends if end is not True] == [TierUnavailable]
    assert isinstance(ends[2], TierUnavailable)
    assert soon(lambda: rig.fired("error") == {rig.pid: 0, os.getpid(): 1})
    assert "a mover process of 4 threads" in rig.tier.describe()


def test_the_process_meets_the_faults_of_files(rig: Moved) -> None:
    """A read that it makes flips a bit, and what it verifies is dropped; a write of its fails."""
    assert rig.write_all() == [True] * len(KEYS)
    rig.control.apply(Fault("flipped bit", calls=("preadv",), index=0))
    ends = rig.read_all()
    assert [type(end) for end in ends if end is not True] == [CorruptChunk]
    assert soon(lambda: rig.fired("flipped bit") == {rig.pid: 1, os.getpid(): 0})
    rig.control.apply(Fault("error", at="files", calls=("pwritev", "pwrite"), every=1))
    (bad,) = (index for index, end in enumerate(ends) if end is not True)
    rig.level_0.slot(bad)[:] = chunk_of(KEYS[bad], N)
    (end,) = all_of(rig.tier.write_many([(KEYS[bad], rig.level_0.slot(bad), None)]))
    assert isinstance(end, TierUnavailable)
    assert "Input/output error" in str(end)
    rig.control.clear()
    assert rig.write_all() == [True] * len(KEYS)
    assert rig.read_all() == [True] * len(KEYS)


def test_it_hangs_and_dies_there(rig: Moved) -> None:
    """What hangs in the process is seen, and let go; `killed` ends it, and not the engine."""
    assert rig.write_all() == [True] * len(KEYS)
    rig.control.apply(Fault("hang", at="files", calls=("preadv",), at_most=1))
    told = rig.tier.read_many([(key, rig.level_0.slot(n)) for n, key in enumerate(KEYS)])
    first = [end for _ in range(1) for end in next(told)]
    assert first
    assert soon(lambda: rig.control.num_hung() == 1)
    rig.control.clear()
    assert len(first) + sum(map(len, told)) == len(KEYS)
    pid = rig.pid
    assert pid is not None
    rig.control.apply(Fault("killed", at="files", calls=("preadv",)))
    ends = rig.read_all()
    assert {type(end) for end in ends} == {TierUnavailable}
    assert not is_alive(pid)
    assert rig.tier.mover_deaths() == 1
    assert "no mover process (it ended" in rig.tier.describe()
    rig.control.clear()
    assert rig.read_all() == [True] * len(KEYS), "by threads"
    assert rig.control.fired()["killed"] == 1


def test_single_chunks_go_wrong_there_as_well(rig: Moved) -> None:
    """A verb of one chunk takes the process, too."""
    key = ChunkKey(KEYS[0])
    rig.level_0.slot(0)[:] = chunk_of(key, N)
    rig.tier.write_from(key, rig.level_0.slot(0))
    rig.control.apply(Fault("flipped bit", calls=("preadv",)))
    with pytest.raises(CorruptChunk):
        rig.tier.read_into(key, rig.level_0.slot(1))
    assert soon(lambda: rig.fired("flipped bit") == {rig.pid: 1, os.getpid(): 0})
