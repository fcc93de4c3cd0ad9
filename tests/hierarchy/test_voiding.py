"""Resets that a level cannot take: bounded waits, one thread, one line, a last try at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from invariants import check_quiet
from worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.clock import SystemClock
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.history import History
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.disk.history import HistoryFile
from undercroft.tiers.memory import MemoryTier

DRAIN_S = 0.2


class Stubborn(MemoryTier):
    """Its epoch cannot be raised, or hangs, while told so; and it keeps notes."""

    def __init__(self, *, can_note: bool = True) -> None:
        super().__init__(64 * CHUNK_BYTES, name="below")
        self.fails = False
        self.gate = threading.Event()
        self.gate.set()
        self.can_note = can_note
        self.num_tries = self.num_raised = self.num_notes = 0

    def raise_epoch(self) -> int:
        self.num_tries += 1
        self.gate.wait()
        if self.fails:
            raise OSError(30, "Read-only file system")
        self.num_raised += 1
        return super().raise_epoch()

    def owe_reset(self) -> bool:
        self.num_notes += 1
        return self.can_note

    def owed_at(self) -> str:
        return "/nvme/kv/place"


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    yield from made_worlds()


def started(worlds: list[World], tier: Stubborn, shutdown_s: float = 4.0) -> World:
    limits = Limits(drain_deadline_s=DRAIN_S, shutdown_deadline_s=shutdown_s)
    world = make_world(16, [tier], limits=limits)
    worlds.append(world)
    world.engine.run(keys_of("a", 4))
    return world


def raisers() -> int:
    return sum(thread.name.endswith("-epoch") for thread in threading.enumerate())


def test_the_note_comes_before_everything_else(worlds: list[World]) -> None:
    """Also where forgetting level 0 goes wrong."""
    tier = Stubborn()
    world = started(worlds, tier)
    world.hierarchy.pool.void = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        world.hierarchy.reset()
    assert tier.num_notes == 1
    del world.hierarchy.pool.void


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_many_resets_of_a_tier_that_cannot_take_them(worlds: list[World], how: str) -> None:
    """One of them waits, the others do not; one thread; and in the end one raise takes them all."""
    tier = Stubborn()
    world = started(worlds, tier)
    before = raisers()
    tier.fails = how == "fails"
    if how == "hangs":
        tier.gate.clear()
    began = time.monotonic()
    for _ in range(200):
        assert not world.hierarchy.reset()
        assert not world.hierarchy.levels[0].usable
    assert time.monotonic() - began < (40 * DRAIN_S if how == "hangs" else 60)
    assert raisers() == before + 1
    assert tier.num_notes == 200
    world.engine.version += 1
    assert world.engine.run(keys_of("a", 4)).num_hits == 0
    tier.fails = False
    tier.gate.set()
    assert world.hierarchy.levels[0].wait_void(60)
    assert tier.num_raised <= 2
    assert world.engine.run(keys_of("b", 4)).num_hits == 0
    assert world.hierarchy.levels[0].usable
    assert raisers() <= before + 1
    check_quiet(world.hierarchy)


def test_a_try_that_fails_keeps_nobody_waiting(worlds: list[World]) -> None:
    """The scheduler's thread is kept until it was tried, not until the deadline."""
    tier = Stubborn()
    limits = Limits(drain_deadline_s=60.0)
    world = make_world(16, [tier], limits=limits)
    worlds.append(world)
    tier.fails = True
    began = time.monotonic()
    assert not world.hierarchy.reset()
    assert time.monotonic() - began < 30
    tier.fails = False


def test_one_line_says_what_to_do_and_one_that_it_is_over(
    worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written, what that means, and what to remove; once."""
    tier = Stubborn()
    world = started(worlds, tier)
    tier.fails = True
    for _ in range(20):
        world.hierarchy.reset()
    tier.fails = False
    assert world.hierarchy.levels[0].wait_void(60)
    end = time.monotonic() + 30
    while "has taken" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    lines = [r.getMessage() for r in caplog.records if "reset" in r.getMessage()]
    assert lines == [
        "tier below has not taken the reset of its chunks yet ([Errno 30] Read-only file system). "
        "It serves none of them, nor does any engine on this machine; it is tried again, also at "
        "the next start. If this machine is to restart before it works, remove /nvme/kv/place",
        "tier below has taken the reset, and is used again",
    ]


def test_a_note_that_could_not_be_made_is_said(
    worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """Then only a person can keep the next start from what was reset."""
    tier = Stubborn(can_note=False)
    world = started(worlds, tier)
    tier.fails = True
    world.hierarchy.reset()
    assert "could not be noted for other engines" in caplog.text
    assert "remove /nvme/kv/place before one starts" in caplog.text
    tier.fails = False


@pytest.mark.parametrize("works", [True, False])
def test_the_end_tries_once_more(
    worlds: list[World], caplog: pytest.LogCaptureFixture, works: bool
) -> None:
    """At once, not when the next try would be due; what is owed even then is said as an error."""
    tier = Stubborn()
    world = started(worlds, tier)
    tier.fails = True
    world.hierarchy.reset()
    before, tier.fails = tier.num_tries, not works
    world.hierarchy.close()
    assert tier.num_tries > before
    assert tier.num_raised == int(works)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == (not works)
    assert works or errors[0].startswith("the engine ends, and tier below has not taken the reset")


def test_the_end_of_a_tier_that_hangs_in_a_reset_is_bounded(worlds: list[World]) -> None:
    """The last try takes a part of the shutdown deadline, and no more."""
    tier = Stubborn()
    world = started(worlds, tier, shutdown_s=1.0)
    tier.gate.clear()
    world.hierarchy.reset()
    began = time.monotonic()
    world.hierarchy.close()
    assert time.monotonic() - began < 1.0 + 2.0  # the machine is shared
    tier.gate.set()


class HungFile(HistoryFile):
    """Opens never, until told so."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def is_there(self) -> bool:
        self.gate.wait()
        return False

    def open(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_a_history_that_hangs_is_left_behind_in_time(worlds: list[World]) -> None:
    """It gets what is left of the shutdown deadline, after the levels, and not a second more."""
    clock = SystemClock()
    world = make_world(4, limits=Limits(shutdown_deadline_s=0.5))
    worlds.append(world)
    file = HungFile()
    history = History(file, clock)
    world.hierarchy.on_close.append(history.close)
    history.start()
    began = clock.now_s()
    deadlines: list[float] = []
    world.hierarchy.on_close.append(deadlines.append)
    world.hierarchy.close()
    assert clock.now_s() - began < 0.5 + 0.4
    assert deadlines == [pytest.approx(began + 0.5, abs=0.3)]
    file.gate.set()


def test_a_raise_that_another_reset_overtakes_is_repeated(worlds: list[World]) -> None:
    """What was stored between two resets is void after the second, though the first one's raise
    was still under way when it came."""
    tier = Stubborn()
    world = started(worlds, tier)
    tier.gate.clear()
    assert not world.hierarchy.reset()
    key = keys_of("between", 1)[0]
    MemoryTier.write_from(tier, key, memoryview(content_of(key, CHUNK_BYTES)))
    assert not world.hierarchy.reset()
    tier.gate.set()
    assert world.hierarchy.levels[0].wait_void(60)
    assert tier.num_raised == 2
    assert not tier.has(key)
