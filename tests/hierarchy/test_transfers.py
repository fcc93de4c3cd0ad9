from __future__ import annotations

import threading
from typing import Any

import pytest
from transfers_rig import FOREVER_S, SOON_S, MakeRig, N, kinds, made_rigs

from undercroft.errors import (
    ConfigError,
    CorruptChunk,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from undercroft.hierarchy.breaker import BreakerState
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.transfers import Transfers
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import (
    Effect,
    Injector,
    always,
    both,
    on_key,
    on_verb,
)
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.memory import MemoryTier

A, B, C, D = (key_of(label) for label in "abcd")

rig = pytest.fixture(made_rigs)


def test_a_chunk_goes_down_and_comes_up(rig: MakeRig) -> None:
    """Write, read, delete, read again; each outcome says what happened."""
    it = rig()
    out = bytearray(N)
    wrote, read = it.write(A), it.read(A, out=out)
    outcomes = it.finish()
    assert wrote is not None
    assert (outcomes[wrote].error, outcomes[wrote].num_bytes, outcomes[wrote].found) == (
        None,
        N,
        False,
    )
    assert (outcomes[read].error, outcomes[read].num_bytes, outcomes[read].found) == (None, N, True)
    assert out == chunk_of(A, N)
    deleted, missed = it.transfers.delete(A), it.read(A)
    outcomes = it.finish()
    for ticket in (deleted, missed):
        assert (outcomes[ticket].error, outcomes[ticket].num_bytes) == (None, 0)
        assert not outcomes[ticket].found
    assert not it.memory.has(A)
    assert it.transfers.poll() == []
    assert it.transfers.take_released() == []


def test_a_tier_error_is_the_outcome(rig: MakeRig) -> None:
    """Full and corrupt come out as they are; the next move is not disturbed."""
    it = rig(Injector(Effect.FULL, on_key(A)), failures_to_open=1)
    it.store(B)
    full, corrupt, good = it.write(A), it.read(B, out=bytearray(2 * N)), it.write(C)
    outcomes = it.finish()
    assert full is not None
    assert good is not None
    assert isinstance(outcomes[full].error, TierFull)
    assert isinstance(outcomes[corrupt].error, CorruptChunk)
    assert outcomes[corrupt].num_bytes == 0
    assert outcomes[good].error is None
    assert it.transfers.breaker.state is BreakerState.CLOSED


def test_a_queued_move_is_cancelled_at_its_deadline(rig: MakeRig) -> None:
    """It ends with a timeout and a free buffer, never starts, and gives its bytes back."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    it.read(A)
    it.faulty.await_hung(1)
    it.read(B, SOON_S)
    it.write(C, SOON_S)
    it.write(D, 2 * SOON_S)
    assert it.transfers.queued_write_bytes == 2 * N
    assert it.expired(0.99 * SOON_S) == []
    assert kinds(it.expired(0.01 * SOON_S)) == [
        (Op.READ, "TierTimeout", True),
        (Op.WRITE, "TierTimeout", True),
    ]
    assert it.transfers.queued_write_bytes == N
    assert it.transfers.num_queued_reads == 0
    it.faulty.release()
    it.finish()
    assert [key for _, key in it.recorder.calls] == [A, D]


def test_a_move_past_its_deadline_is_not_started_even_before_the_next_poll(rig: MakeRig) -> None:
    """A mover looks at the deadline itself."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    it.read(A)
    it.faulty.await_hung(1)
    ticket = it.read(B, SOON_S)
    it.clock.advance(SOON_S)
    it.faulty.release()
    outcomes = it.finish()
    assert isinstance(outcomes[ticket].error, TierTimeout)
    assert [key for _, key in it.recorder.calls] == [A]


def test_a_running_move_ends_at_its_deadline_and_its_buffer_later(rig: MakeRig) -> None:
    """The report comes in time; the buffer is free once the thread is back; no second report."""
    it = rig(Injector(Effect.HANG, on_key(A)))
    it.store(A)
    out = bytearray(N)
    ticket = it.read(A, SOON_S, out=out)
    it.faulty.await_hung(1)
    (done,) = it.expired(SOON_S)
    assert (done.ticket, done.buffer_free) == (ticket, False)
    assert isinstance(done.outcome.error, TierTimeout)
    assert done.outcome.seconds == SOON_S
    assert it.transfers.take_released() == []
    assert it.transfers.num_stuck == it.transfers.num_running == 1
    it.faulty.release()
    assert it.transfers.drain(it.clock.now_s() + FOREVER_S)
    assert it.transfers.take_released() == [ticket]
    assert it.transfers.take_released() == []
    assert it.transfers.poll() == []
    assert it.transfers.num_late == 1
    assert it.transfers.num_stuck == it.transfers.num_running == 0
    assert out == chunk_of(A, N), "which is why the buffer was not free"


def test_a_late_delete_has_no_buffer_to_release(rig: MakeRig) -> None:
    """A delete past its deadline is reported once and for all."""
    it = rig(Injector(Effect.HANG, on_verb("delete")), delete_timeout_s=SOON_S)
    it.transfers.delete(A)
    it.faulty.await_hung(1)
    assert kinds(it.expired(SOON_S)) == [(Op.DELETE, "TierTimeout", True)]
    it.faulty.release()
    assert it.transfers.drain(it.clock.now_s() + FOREVER_S)
    assert it.transfers.take_released() == []


def test_reads_pass_writes_and_deletes_make_room_first(rig: MakeRig) -> None:
    """One thread, everything queued behind a hung move: reads, deletes, writes."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    it.read(A)
    it.faulty.await_hung(1)
    it.write(B)
    it.transfers.delete(C)
    it.read(D)
    it.faulty.release()
    it.finish()
    assert it.recorder.calls[1:] == [("read", D), ("delete", C), ("write", B)]


def test_a_full_write_queue_says_so(rig: MakeRig) -> None:
    """Back-pressure: None at the bound, and room again once writes have started."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1, max_queued_write_bytes=2 * N + N // 2)
    it.read(A)
    it.faulty.await_hung(1)
    assert it.write(B) is not None
    assert it.write(C) is not None
    assert it.write(D) is None
    assert it.transfers.queued_write_bytes == 2 * N
    it.read(D)  # reads and deletes are not refused
    it.transfers.delete(D)
    it.faulty.release()
    assert len(it.finish()) == 5
    assert it.transfers.queued_write_bytes == 0
    assert it.write(D) is not None


def test_moves_of_one_key_keep_their_order(rig: MakeRig) -> None:
    """Many threads, few keys: each key sees its moves in order, one at a time."""
    it = rig(num_threads=4)
    expected: dict[bytes, list[str]] = {}
    for i in range(400):
        key = (A, B, C)[i % 3]
        verb = ("write", "read", "delete", "read", "write")[i % 5]
        expected.setdefault(key, []).append(verb)
        if verb == "write":
            it.write(key)
        elif verb == "read":
            it.read(key)
        else:
            it.transfers.delete(key)
    assert len(it.finish()) == 400
    for key, verbs in expected.items():
        assert [verb for verb, each in it.recorder.calls if each == key] == verbs
    assert it.recorder.num_overlaps == 0


def test_a_late_write_still_holds_its_key(rig: MakeRig) -> None:
    """A delete and a write after a hung write of the same key wait for it, even past its end."""
    it = rig(Injector(Effect.HANG, both(on_key(A), on_verb("write_from"))), num_threads=2)
    it.write(A, SOON_S)
    it.faulty.await_hung(1)
    assert len(it.expired(SOON_S)) == 1
    it.transfers.delete(A)
    it.write(A)
    it.read(B)
    while not it.transfers.poll():
        pass
    assert it.recorder.calls == [("write", A), ("read", B)]
    it.faulty.release()
    it.finish()
    assert [verb for verb, key in it.recorder.calls if key == A] == ["write", "delete", "write"]
    assert it.memory.has(A)


def test_poll_reports_no_more_than_asked(rig: MakeRig) -> None:
    """Results and timeouts alike come in portions; none is lost."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    for i in range(5):
        it.read(key_of(i))
    assert it.transfers.drain(it.clock.now_s() + FOREVER_S)
    it.read(A)
    it.faulty.await_hung(1)
    for i in range(5):
        it.read(key_of(i), SOON_S)
    it.clock.advance(SOON_S)
    portions = [len(it.transfers.poll(max_outcomes=3)) for _ in range(5)]
    assert portions == [3, 3, 3, 1, 0]


def test_the_breaker_opens_probes_and_closes(rig: MakeRig) -> None:
    """Failures open it, all fails fast without a call, one probe after the pause closes it."""
    broken = Injector(Effect.ERROR, always)
    it = rig(broken, failures_to_open=3, first_pause_s=2.0)
    for key in (A, B, C):
        it.read(key)
        it.finish()
    assert it.transfers.breaker.state is BreakerState.OPEN
    assert not it.transfers.available
    refused = [it.read(D), it.write(D), it.transfers.delete(D)]
    dones = it.transfers.poll()
    assert [done.ticket for done in dones] == refused
    assert kinds(dones) == [(op, "TierUnavailable", True) for op in (Op.READ, Op.WRITE, Op.DELETE)]
    assert len(it.recorder.calls) == 3
    it.clock.advance(2.0)
    assert it.transfers.available
    it.read(D)
    it.finish()
    assert len(it.recorder.calls) == 4
    assert not it.transfers.available
    it.clock.advance(2.0)
    assert not it.transfers.available, "the pause has doubled"
    it.clock.advance(2.0)
    broken.active = False
    it.read(D)
    assert it.one().outcome.error is None
    assert it.transfers.available
    assert it.transfers.breaker.state is BreakerState.CLOSED


def test_what_is_queued_when_the_breaker_opens_fails_fast(rig: MakeRig) -> None:
    """A queue behind a broken tier is not worked through call by call."""
    it = rig(Injector(Effect.ERROR, on_verb("read_into")), num_threads=1, failures_to_open=2)
    for i in range(100):
        it.read(key_of(i))
    outcomes = it.finish()
    assert len(outcomes) == 100
    assert all(isinstance(each.error, TierUnavailable) for each in outcomes.values())
    assert len(it.recorder.calls) == 2


def test_timeouts_open_the_breaker(rig: MakeRig) -> None:
    """A tier that hangs is left alone like one that fails."""
    it = rig(Injector(Effect.HANG, always), num_threads=2, failures_to_open=2)
    it.read(A, SOON_S)
    it.read(B, SOON_S)
    it.faulty.await_hung(2)
    it.expired(SOON_S)
    assert not it.transfers.available


def test_cancel_queued_ends_what_has_not_started(rig: MakeRig) -> None:
    """A reset gets rid of the queue and then waits for what runs."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    it.read(A)
    it.faulty.await_hung(1)
    it.write(B)
    it.write(B)
    it.transfers.delete(A)
    it.transfers.cancel_queued()
    assert [error for _, error, _ in kinds(it.transfers.poll())] == ["TierUnavailable"] * 3
    now_s = it.clock.now_s()
    assert not it.transfers.drain(now_s)
    it.faulty.release()
    assert it.transfers.drain(now_s + FOREVER_S)
    assert it.recorder.calls == [("read", A)]


def test_drain_gives_up_at_its_deadline(rig: MakeRig) -> None:
    """It says False when time is up, not later."""
    it = rig(Injector(Effect.HANG, always))
    it.read(A)
    it.faulty.await_hung(1)
    answers: list[bool] = []
    deadline_s = it.clock.now_s() + 2.0
    waiting = threading.Thread(target=lambda: answers.append(it.transfers.drain(deadline_s)))
    waiting.start()
    it.clock.advance(2.0)
    waiting.join(timeout=60)
    assert answers == [False]


def test_speed_is_seen(rig: MakeRig) -> None:
    """Seconds per byte come from what was served, not from what hangs."""
    it = rig(Injector(Effect.SLOW, on_key(A), seconds=2.0), Injector(Effect.HANG, on_key(B)))
    assert it.transfers.speeds.average(Op.READ) is None
    it.store(A)
    it.read(A)
    it.clock.await_sleepers(1)
    it.clock.advance(2.0)
    it.finish()
    assert it.transfers.speeds.average(Op.READ) == pytest.approx(2.0 / N)
    assert it.transfers.speeds.average(Op.WRITE) is None
    it.read(B, 100.0)
    it.faulty.await_hung(1)
    it.expired(100.0)
    assert it.transfers.speeds.average(Op.READ) == pytest.approx(2.0 / N)


def test_deadlines_of_finished_moves_do_not_pile_up(rig: MakeRig) -> None:
    """Far deadlines cost nothing once their moves have ended."""
    it = rig()
    for _ in range(20):
        for i in range(200):
            it.read(key_of(i))
        it.finish()
    assert len(it.transfers._deadlines) < 2000
    assert not it.transfers._moves


@pytest.mark.parametrize(
    ("field", "value"), [("max_queued_write_bytes", 0), ("num_threads", 0), ("retries", -1)]
)
def test_nonsense_is_refused(field: str, value: int) -> None:
    """The message names the field, the value and the least that works."""
    more: dict[str, Any] = {"max_queued_write_bytes": 1, field: value}
    with pytest.raises(ConfigError, match=f"{field} is {value}: give at least"):
        Transfers(MemoryTier(1), clock=ManualClock(), **more)
