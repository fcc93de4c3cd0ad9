"""What the scheduler thread asks of a tier neither raises nor makes every step long."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.hierarchy.worlds import CHUNK_BYTES, World, keys_of, made_worlds, make_world

from undercroft.hierarchy.asked import Asked
from undercroft.keys import ChunkKey
from undercroft.testing.clock import ManualClock
from undercroft.testing.mini_engine import content_of
from undercroft.tiers.base import Bounded, Epochal, Following, Indexed
from undercroft.tiers.memory import MemoryTier

worlds = pytest.fixture(made_worlds)

(A,) = keys_of("a", 1)
QUESTIONS: dict[str, tuple[Any, ...]] = {
    "has": (A,),
    "free_chunks": (CHUNK_BYTES,),
    "used_bytes": (),
    "epoch": (),
    "take_adopted": (),
    "take_lost": (),
}


class Troubled(MemoryTier):
    """Its questions, or `only` one of them, fail with `error`, or take `seconds` each."""

    def __init__(self, clock: ManualClock, name: str = "troubled") -> None:
        super().__init__(256 * CHUNK_BYTES, name=name)
        self.clock = clock
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.only: str | None = None
        self.num_asked = 0

    def _question(self, name: str) -> None:
        if self.only not in {None, name}:
            return
        self.num_asked += 1
        self.clock.advance(self.seconds)
        if self.error is not None:
            raise self.error

    def has(self, key: ChunkKey) -> bool:
        self._question("has")
        return super().has(key)

    def free_chunks(self, num_bytes: int) -> int:
        self._question("free_chunks")
        return super().free_chunks(num_bytes)

    def used_bytes(self) -> int:
        self._question("used_bytes")
        return super().used_bytes()

    def epoch(self) -> int:
        self._question("epoch")
        return super().epoch()

    def refresh(self) -> None: ...

    def take_adopted(self) -> Iterator[tuple[ChunkKey, int]]:
        self._question("take_adopted")
        yield from ()

    def take_lost(self) -> Iterable[tuple[ChunkKey, str]]:
        self._question("take_lost")
        return ()


def put(tier: MemoryTier, keys: list[ChunkKey]) -> None:
    for key in keys:
        tier.write_from(key, memoryview(content_of(key, CHUNK_BYTES)))


def test_it_has_the_abilities_of_the_tier_inside() -> None:
    """No more and no fewer."""
    asked = Asked(MemoryTier(1 << 20), ManualClock())
    assert isinstance(asked, Indexed)
    assert isinstance(asked, Bounded)
    assert isinstance(asked, Epochal)
    assert not isinstance(asked, Following)
    assert isinstance(Asked(Troubled(ManualClock()), ManualClock()), Following)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("error", [OSError(5, "injected"), MemoryError(), AssertionError("bug")])
def test_a_question_that_raises_gets_a_harmless_answer_and_is_then_not_asked(
    question: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Three times in a row is enough; after a pause it is asked again, and works again at once."""
    clock = ManualClock()
    tier = Troubled(clock)
    put(tier, [A])
    tier.raise_epoch()
    put(tier, [A])
    asked: Any = Asked(tier, clock)
    ask, arguments = getattr(asked, question), QUESTIONS[question]
    sound = ask(*arguments)
    harmless = {"has": False, "free_chunks": 0, "take_adopted": [], "take_lost": []}
    tier.error = error
    for _ in range(3):
        assert asked.is_answering
        assert ask(*arguments) == harmless.get(question, sound)
    assert not asked.is_answering
    num_asked = tier.num_asked
    tier.error = None
    assert ask(*arguments) == harmless.get(question, sound)
    assert tier.num_asked == num_asked
    clock.advance(1.0)
    assert asked.is_answering
    assert ask(*arguments) == sound
    (line,) = caplog.messages
    assert line.startswith(f"tier troubled is not asked for 1 s: its {question}, which has to")


def test_pauses_grow_while_it_fails_and_begin_anew_when_it_works() -> None:
    """1, 2, 4 ... 60 s, one question each."""
    clock = ManualClock()
    tier = Troubled(clock)
    tier.error = OSError(5, "injected")
    asked: Any = Asked(tier, clock)

    def pause_s() -> float:
        while asked.is_answering:
            asked.free_chunks(1)
        waited_s = 0.0
        while not asked.is_answering:
            clock.advance(0.5)
            waited_s += 0.5
        return waited_s

    assert [pause_s() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    tier.error = None
    asked.free_chunks(1)
    asked.begin_step()
    tier.error = OSError(5, "injected")
    assert pause_s() == 1


def test_an_index_that_reads_a_disk_costs_a_bounded_part_of_a_step() -> None:
    """Ten milliseconds a key, a thousand keys: half a second once, and then nothing."""
    clock = ManualClock()
    tier = Troubled(clock)
    tier.only = "has"
    asked: Any = Asked(tier, clock)
    keys = keys_of("k", 1000)
    tier.seconds = 0.01
    for pause_s in (1.0, 2.0):
        asked.begin_step()
        began_s = clock.now_s()
        assert not any(asked.has(key) for key in keys)
        assert clock.now_s() - began_s <= 0.5
        assert not asked.is_answering
        clock.advance(pause_s)
        assert asked.is_answering


def test_a_hiccup_is_none() -> None:
    """One question that took long, on a busy machine, and many quick ones, are no reason."""
    clock = ManualClock()
    tier = Troubled(clock)
    put(tier, [A])
    asked: Any = Asked(tier, clock)
    for _ in range(50):
        asked.begin_step()
        tier.seconds = 0.4
        asked.free_chunks(1)
        tier.seconds = 0.0
        assert all(asked.has(A) for _ in range(100))
    assert asked.is_answering


def test_a_bug_of_the_caller_is_not_hidden() -> None:
    """What is no `Exception`, such as an interrupt from the keyboard, goes through."""
    clock = ManualClock()
    tier = Troubled(clock)
    tier.error = KeyboardInterrupt()
    asked: Any = Asked(tier, clock)
    with pytest.raises(KeyboardInterrupt):
        asked.has(A)


@pytest.mark.parametrize("question", [None, *QUESTIONS])
def test_the_levels_beside_it_serve_as_ever(
    question: str | None, worlds: list[World], caplog: pytest.LogCaptureFixture
) -> None:
    """Host memory and another tier give their hits while the questions of one tier all fail."""
    clock = ManualClock()
    bad, good = Troubled(clock, "bad"), MemoryTier(256 * CHUNK_BYTES, name="good")
    keys = keys_of("k", 8)
    put(good, keys)
    world = make_world(64, [bad, good], clock=clock)
    worlds.append(world)
    bad.error, bad.only = OSError(5, "injected"), question
    caplog.set_level(logging.ERROR)
    for n in range(6):
        assert world.engine.run(keys).num_hits == 8
        assert world.engine.run(keys_of(f"new{n}-", 4)).num_hits == 0
    assert world.counters.promoted_chunks["good"] == 8
    assert world.counters.cascaded_chunks["good"] >= 16
    assert world.hierarchy.reset()
    world.engine.version += 1
    assert world.engine.run(keys).num_hits == 0
    bad.error = None
    clock.advance(60.0)
    for n in range(3):
        assert world.engine.run(keys_of(f"after{n}-", 4)).num_hits == 0
    world.engine.settle()
    assert world.counters.cascaded_chunks["bad"] >= 4, "it works again"
    assert not caplog.messages
