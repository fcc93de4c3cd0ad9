from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from transfers_rig import FOREVER_S, N, Rig

from undercroft.errors import Bug, CorruptChunk, KvError, TierClosed, TierUnavailable
from undercroft.testing.faults import Effect, Injector, always, on_index
from undercroft.testing.tier_suite import key_of
from undercroft.tiers.memory import MemoryTier

A = key_of("a")


class Raising(MemoryTier):
    """Raises the same thing at every read."""

    def __init__(self, exc: BaseException) -> None:
        super().__init__(1 << 20, name="raising")
        self.exc = exc

    def read_into(self, _key: Any, _out: memoryview) -> bool:
        raise self.exc


def ended(it: Rig) -> KvError | None:
    """The error of a read that may sleep between tries; time goes on meanwhile."""
    it.read(A)
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            it.clock.advance(0.05)

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        return it.one().outcome.error
    finally:
        done.set()
        ticking.join()
        it.close()


def test_a_retryable_error_is_tried_again_after_a_growing_pause() -> None:
    """Two failures, then success: pauses of 1 s and 2 s on the clock."""
    it = Rig(Injector(Effect.ERROR, lambda call: call.index < 2), retries=2, retry_pause_s=1.0)
    it.store(A)
    it.read(A)
    for pause_s, num_calls in ((1.0, 1), (2.0, 2)):
        it.clock.await_sleepers(1)
        assert len(it.recorder.calls) == num_calls
        it.clock.advance(pause_s - 0.1)
        assert len(it.recorder.calls) == num_calls
        it.clock.advance(0.1)
    assert it.one().outcome.found
    assert it.transfers.num_retries == 2
    it.close()


def test_tries_are_bounded() -> None:
    """A tier that always fails is called once and retried `retries` times."""
    it = Rig(Injector(Effect.ERROR, always), retries=2)
    assert isinstance(ended(it), TierUnavailable)
    assert len(it.recorder.calls) == 3


def test_no_retry_that_would_pass_the_deadline() -> None:
    """The error comes at once rather than a timeout later."""
    it = Rig(Injector(Effect.ERROR, always), retries=5, retry_pause_s=1.0)
    it.read(A, 0.9)
    assert isinstance(it.one().outcome.error, TierUnavailable)
    assert len(it.recorder.calls) == 1
    it.close()


@pytest.mark.parametrize("error", [CorruptChunk, TierClosed], ids=lambda each: each.__name__)
def test_what_would_not_change_is_not_tried_again(error: type[KvError]) -> None:
    """Corrupt, full, closed, too new: one call."""
    it = Rig(tier=Raising(error("no")), retries=3)
    assert type(ended(it)) is error
    assert len(it.recorder.calls) == 1


def test_a_foreign_exception_becomes_ours_with_its_cause() -> None:
    """The outcome names tier, verb and cause; it is retried like any unavailability."""
    it = Rig(Injector(Effect.FOREIGN, on_index(0)), retries=0)
    error = ended(it)
    assert isinstance(error, TierUnavailable)
    assert isinstance(error.__cause__, OSError)
    assert error.key == A
    assert "tier 'memory' failed to read a chunk: OSError" in str(error)
    it = Rig(Injector(Effect.FOREIGN, on_index(0)), retries=1)
    assert ended(it) is None


def test_a_bug_is_an_outcome_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The engine lives on, the bug is not retried, and its place is in the log."""
    it = Rig(tier=Raising(Bug("a slot is gone")), retries=3)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            it.read(A)
            error = it.one().outcome.error
            assert isinstance(error, TierUnavailable)
            assert isinstance(error.__cause__, Bug)
    assert it.transfers.num_bugs == 2
    assert len(it.recorder.calls) == 2
    assert len(caplog.records) == 1
    assert "a slot is gone" in caplog.text
    it.close()


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_a_thread_still_ends_the_ticket(
    exc: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread dies of it, loudly; the ticket ends, and another thread takes over."""
    seen: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    tier = Raising(exc)
    it = Rig(tier=tier, num_threads=1)
    it.read(A)
    assert isinstance(it.one().outcome.error, TierUnavailable)
    assert it.transfers.drain(it.clock.now_s() + FOREVER_S)
    tier.exc = CorruptChunk("now an ordinary error")
    it.read(A)
    assert isinstance(it.one().outcome.error, CorruptChunk)
    it.close()
    assert seen == [exc]


@pytest.mark.parametrize("exc", [None, OSError(5, "no"), CorruptChunk("bad"), Bug("ours")])
def test_no_buffer_is_kept_alive(exc: BaseException | None) -> None:
    """After the report nothing holds the buffer: a region can be unmapped."""
    it = Rig(tier=MemoryTier(1 << 20) if exc is None else Raising(exc))
    out = bytearray(N)
    it.read(A, out=out)
    done = it.one()
    assert (done.outcome.error is None) == (exc is None)
    out.extend(b"x")  # BufferError while any view exists
    it.close()


def test_threads_that_cannot_be_started_are_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine out of threads costs the moves their deadlines, not the engine its life."""
    it = Rig(num_threads=1)
    real_start = threading.Thread.start

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    it.read(A, 1.0)
    assert it.transfers.poll() == []
    (done,) = it.expired(1.0)
    assert type(done.outcome.error).__name__ == "TierTimeout"
    monkeypatch.setattr(threading.Thread, "start", real_start)
    it.read(A)
    assert it.one().outcome.error is None
    it.close()
