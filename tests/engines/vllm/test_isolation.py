"""A tier in trouble beside one that works, under the real manager."""

import threading
import time

import pytest
from managers import CHUNK, get, put
from rig import running
from shapes import Group

from undercroft.tiers.disk import DiskTier

QUESTIONS = ("has", "free_chunks", "used_bytes", "epoch", "take_adopted", "take_lost")
VERBS = ("read_into", "write_in_epoch", "delete", "refresh", "raise_epoch", "close")
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(24)]


def settings(folder):
    tiers = [
        {"type": "disk", "name": name, "path": str(folder / name), "capacity": "64MiB"}
        for name in ("bad", "good")
    ]
    deadlines = {"promote_deadline_s": 0.5, "drain_deadline_s": 0.5, "shutdown_deadline_s": 2}
    return {"host": 48 * CHUNK, "tiers": [{**t, "free_space_floor": 0} for t in tiers], **deadlines}


@pytest.fixture
def trouble(monkeypatch):
    """Makes methods of the tier called `bad` do something else, from when it is switched on."""
    on = threading.Event()

    def make(names, rude):
        def wrapped(good):
            def call(self, *arguments):
                if self.name == "bad" and on.is_set():
                    rude()
                return good(self, *arguments)

            return call

        for name in names:
            monkeypatch.setattr(DiskTier, name, wrapped(getattr(DiskTier, name)))
        return on

    return make


def check(folder, on):
    """Stored in both while all is well; found by an engine in which one tier is in trouble."""
    groups = (Group(num_layers=1),)
    with running(settings(folder), groups=groups) as rig:
        assert put(rig.manager, KEYS[:8], "p1") == 8
        assert put(rig.manager, KEYS[8:16], "p2") == 8
    with running(settings(folder), groups=groups) as rig:
        manager = rig.manager
        on.set()
        hits, right = get(manager, KEYS[:8], "g0")  # those of the bad tier may be in time or not
        assert hits == right
        for number in range(3):
            ends = time.monotonic() + 60
            while get(manager, KEYS[8:16], f"g{number}")[0] != 8:
                assert time.monotonic() < ends, "the good tier is not asked"
            put(manager, KEYS[16:20], f"p{number}")
        assert not manager.is_off
        assert manager.hierarchy.counters.broken_invariants == 0
        manager.get_stats()
        began = time.monotonic()
        manager.reset_cache()
        assert time.monotonic() - began < 0.5 + 1.0
        assert get(manager, KEYS[8:16], "after") == (0, 0)
        assert not manager.is_off
        began = time.monotonic()
        manager.shutdown()
        assert time.monotonic() - began < 2.0 + 1.0
        on.clear()
    with running(settings(folder), groups=groups) as rig:  # takes the reset that is owed
        assert get(rig.manager, KEYS[:8], "restarted") == (0, 0)


@pytest.mark.parametrize("name", [*QUESTIONS, "all"])
def test_an_index_that_fails_switches_nothing_off(name, tmp_path, trouble):
    """Not the cache, not the tier beside it."""

    def fail():
        raise OSError(5, "injected")

    check(tmp_path, trouble(QUESTIONS if name == "all" else [name], fail))


def test_verbs_that_hang_hold_up_nothing(tmp_path, trouble):
    """All of them, for good: the other tier serves, reset and shutdown come back."""
    gate = threading.Event()
    try:
        check(tmp_path, trouble(VERBS, lambda: gate.wait(120)))
    finally:
        gate.set()


@pytest.mark.parametrize("error", [MemoryError("injected"), SystemExit(1)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_verbs_that_raise_anything_hold_up_nothing(error, tmp_path, trouble):
    """What no tier should ever raise ends as a miss, too."""

    def fail():
        raise error

    check(tmp_path, trouble(VERBS[:-1], fail))
