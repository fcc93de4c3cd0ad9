"""Whatever happens, every ticket ends once and nobody touches a buffer that was reported free."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfers_rig import FOREVER_S, N, Rig, our_threads, until

from undercroft.hierarchy.outcome import Op
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_verb, randomly
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

EFFECTS = st.sampled_from([Effect.ERROR, Effect.FOREIGN, Effect.HANG, Effect.FULL, Effect.SLOW])
SILENT = st.sampled_from(
    [Effect.FLIPPED_BIT, Effect.TORN_WRITE, Effect.LOST_WRITE, Effect.MISDIRECTED_WRITE]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(list(Op)), st.integers(0, 4), st.sampled_from([0.0, 0.5, 50.0])),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.1, 1.0])),
    ),
    max_size=60,
)


class History:
    """Submits, lets time pass, polls, and checks what must hold for tickets and buffers.

    A buffer that is reported free is overwritten at once, as level 0 would; nobody may touch it
    again. `trusting` is the negative control: it takes every report for a free buffer.
    """

    def __init__(self, it: Rig, *, trusting: bool = False) -> None:
        self.it = it
        self.trusting = trusting
        self.keys = [key_of(i) for i in range(5)]
        self.reads: dict[int, tuple[bytearray, Any]] = {}
        self.open_tickets: set[int] = set()
        self.unreleased: set[int] = set()
        self.reused: list[bytearray] = []

    def run(self, steps: list[Any]) -> None:
        for step in steps:
            if step[0] == "pass":
                self.it.clock.advance(step[1])
                self.poll()
            else:
                self.submit(*step)
        self.it.faulty.release()
        self.it.clock.advance(10.0)
        self.poll()
        ended = threading.Event()
        ticking = threading.Thread(target=keep_time_going, args=(self.it.clock, ended))
        ticking.start()
        assert self.it.transfers.drain(self.it.clock.now_s() + FOREVER_S)
        ended.set()
        ticking.join()
        self.poll()
        assert not self.open_tickets, "every ticket ends"
        assert not self.unreleased, "every buffer comes back"
        free = b"\xee" * N
        assert all(each == free for each in self.reused), "a thread wrote into a free buffer"

    def submit(self, op: Op, index: int, seconds: float) -> None:
        key = self.keys[index]
        if op is Op.READ:
            buffer = bytearray(N)
            ticket = self.it.read(key, seconds, out=buffer)
            self.reads[ticket] = (buffer, key)
        elif op is Op.WRITE:
            written = self.it.write(key, seconds)
            assert written is not None
            ticket = written
        else:
            ticket = self.it.transfers.delete(key)
        self.open_tickets.add(ticket)

    def poll(self) -> None:
        for done in self.it.transfers.poll():
            assert done.ticket in self.open_tickets, "reported twice, or never given out"
            self.open_tickets.remove(done.ticket)
            if done.outcome.found:
                buffer, key = self.reads[done.ticket]
                assert buffer == chunk_of(key, N), "wrong bytes"
            if done.buffer_free or self.trusting:
                self.reuse(done.ticket)
            if not done.buffer_free:
                self.unreleased.add(done.ticket)
        for ticket in self.it.transfers.take_released():
            self.unreleased.remove(ticket)
            if not self.trusting:
                self.reuse(ticket)

    def reuse(self, ticket: int) -> None:
        if ticket in self.reads:
            buffer = self.reads[ticket][0]
            buffer[:] = b"\xee" * N
            self.reused.append(buffer)


def keep_time_going(clock: ManualClock, ended: threading.Event) -> None:
    while not ended.wait(0.001):
        clock.advance(1.0)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    faults=st.lists(st.tuples(EFFECTS, st.sampled_from([0.05, 0.3])), max_size=3),
    silent=st.lists(st.tuples(SILENT, st.sampled_from([0.05, 0.3])), max_size=2),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_ticket_ends_once_and_every_buffer_comes_back(
    steps: list[Any], faults: Any, silent: Any, num_threads: int, seed: int
) -> None:
    """Random work, deadlines and faults: one report each, right bytes, no touched free buffer."""
    loud = [
        Injector(effect, randomly(ratio, seed=seed + i)) for i, (effect, ratio) in enumerate(faults)
    ]
    quiet = [
        Injector(effect, randomly(ratio, seed=seed - i)) for i, (effect, ratio) in enumerate(silent)
    ]
    it = Rig(*loud, num_threads=num_threads, retries=1, tier=checked_over(*quiet))
    try:
        History(it).run(steps)
    finally:
        it.close()
    until(lambda: our_threads() == [])


def checked_over(*injectors: Injector) -> Checked:
    return Checked(FaultyTier(MemoryTier(1 << 14), *injectors))


HANGING = [(Op.WRITE, 0, 50.0), ("pass", 0.0), (Op.READ, 0, 0.5), ("pass", 0.0), ("pass", 1.0)]


def hanging_rig() -> Rig:
    """A tier whose every read hangs until released, and then fills its buffer."""
    it = Rig(Injector(Effect.HANG, on_verb("read_into")))
    it.store(key_of(0))
    return it


@pytest.mark.parametrize("trusting", [False, True], ids=["as reported", "negative control"])
def test_a_buffer_is_not_free_while_a_thread_may_write_into_it(trusting: bool) -> None:
    """Heeding `buffer_free` is safe; a scheduler that does not gets its memory overwritten."""
    it = hanging_rig()
    real_advance = it.clock.advance

    def advance(seconds: float) -> None:
        if seconds == 1.0 and it.faulty.num_hung == 0 and not it.faulty.faults.released:
            it.faulty.await_hung(1)  # the read is in the tier before its deadline passes
        real_advance(seconds)

    it.clock.advance = advance  # type: ignore[method-assign]
    try:
        if trusting:
            with pytest.raises(AssertionError, match="a thread wrote into a free buffer"):
                History(it, trusting=True).run(HANGING)
        else:
            History(it).run(HANGING)
    finally:
        it.clock.advance = real_advance  # type: ignore[method-assign]
        it.close()
