"""What happens to chunks is written down by another thread, and a failing disk changes nothing."""

import time
from collections import Counter
from pathlib import Path

import pytest
from tests.hierarchy.worlds import CHUNK_BYTES, make_world

from undercroft.clock import SystemClock
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.history import History
from undercroft.keys import Namespace
from undercroft.testing.faults import Effect, FaultyTier, Injector, both, on_verb, randomly
from undercroft.testing.mini_engine import chunk_key
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.history import HistoryFile, Incident, key_part, read_history
from undercroft.tiers.memory import MemoryTier

NAMESPACE = Namespace({"model": "m"})


class Wall(SystemClock):
    def unix_s(self) -> float:
        return 1234.9


def kept(path: Path) -> list[Incident]:
    return [i for f in path.glob("undercroft-v1/*/history-*") for i in read_history(f.read_bytes())]


def opened(path: Path) -> History:
    DiskTier(
        str(path),
        name="disk",
        namespace=NAMESPACE,
        capacity_bytes=1 << 20,
        clock=SystemClock(),
        free_space_floor_bytes=0,
    ).close()
    file = HistoryFile(
        str(path),
        namespace=NAMESPACE,
        levels=["host", "disk"],
        num_bytes=8192,
        capacity_bytes=1 << 20,
        free_space_floor_bytes=0,
        clock=SystemClock(),
    )
    return History(file, Wall())


def test_notes_are_written_at_close_and_in_between(tmp_path: Path) -> None:
    """A note is in the file within some seconds, and all of them are after `close`."""
    history = opened(tmp_path)
    history.start()
    history.note("disk", "evicted", "capacity", b"k" * 36)
    until = time.monotonic() + 60
    while len(kept(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert kept(tmp_path) == [
        Incident(1234, "opened", "other", "host"),
        Incident(1234, "evicted", "capacity", "disk", key_part(b"k" * 36)),
    ]
    keys = [b"%036d" % number for number in range(100)]
    history.note("disk", "declined", "full", *keys)
    history.close(SystemClock().now_s() + 60)
    assert [i.key_part for i in kept(tmp_path)[2:]] == [key_part(key) for key in keys]
    assert len(kept(tmp_path)) == 102
    history.close(SystemClock().now_s() + 60)


def test_a_disk_that_fails_costs_notes_and_nothing_else(tmp_path: Path) -> None:
    """Without a directory, or with it removed, notes are lost silently; memory stays bounded."""
    import shutil

    history = opened(tmp_path)
    shutil.rmtree(tmp_path / "undercroft-v1")
    history.start()
    for number in range(70_000):
        history.note("disk", "evicted", "capacity", b"%036d" % number)
    assert len(history._waiting) <= 65536
    history.close(SystemClock().now_s() + 60)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("call", ["positional"])
def test_without_a_history_notes_go_nowhere(call: str) -> None:
    """Counters of a hierarchy without one take every note."""
    Counters().note("disk", "evicted", "capacity", b"k")
    assert Counters() == Counters()


def test_every_counted_loss_is_noted_with_its_key() -> None:
    """Whatever is evicted from a lower level, declined or dropped, or late, is noted once, by key.

    And nothing else is: notes and counters agree for each level and reason.
    """
    tier = FaultyTier(
        MemoryTier(capacity_bytes=20 * CHUNK_BYTES, name="below"),
        Injector(Effect.ERROR, both(on_verb("read_into", "write_from"), randomly(0.1, seed=3))),
    )
    world = make_world(24, [tier])
    notes: list[tuple[str, str, str, bytes]] = []
    world.counters.note = lambda *note: notes.extend((*note[:3], key) for key in note[3:] or (b"",))
    for name in "abcabacc":
        world.engine.run([chunk_key(f"{name}{number}") for number in range(12)])
    world.hierarchy.reset()
    world.close()
    told = Counter((event, level, why) for level, event, why, key in notes if key)
    counters = world.counters
    expected = Counter({("evicted", "below", "capacity"): counters.evicted_chunks["below"]})
    for event, counted in (
        ("declined", counters.declined_chunks),
        ("dropped", counters.dropped_chunks),
    ):
        expected.update({(event, *place): number for place, number in counted.items()})
    expected.update(
        {
            ("missed", level, why): number
            for (level, why), number in counters.lookup_misses.items()
            if why != "absent"
        }
    )
    assert told == +expected
    assert told["evicted", "below", "capacity"] > 5
    assert sum(number for (event, *_), number in told.items() if event == "dropped") >= 1
    assert ("below", "reset", "other", b"") in notes
