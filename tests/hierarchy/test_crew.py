"""How the mover threads come, hang, come back and go."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from transfers_rig import FOREVER_S, SOON_S, MakeRig, N, kinds, made_rigs, our_threads, until

from undercroft.errors import (
    TierClosed,
)
from undercroft.hierarchy.outcome import Op
from undercroft.hierarchy.transfers import Transfers
from undercroft.testing.clock import ManualClock
from undercroft.testing.faults import (
    Effect,
    Injector,
    always,
    on_key,
    on_verb,
)
from undercroft.testing.tier_suite import key_of
from undercroft.tiers.memory import MemoryTier

A, B, C, D = (key_of(label) for label in "abcd")

rig = pytest.fixture(made_rigs)


def test_nothing_starts_before_the_first_use(rig: MakeRig) -> None:
    """Threads come with the first move, are named, and idle threads use no time."""
    it = rig(num_threads=3)
    assert our_threads() == []
    it.read(A)
    it.finish()
    assert set(our_threads()) <= {f"undercroft-memory-{i}" for i in (1, 2, 3)}
    assert all(thread.daemon for thread in threading.enumerate() if "undercroft" in thread.name)


def test_a_move_added_while_a_thread_goes_to_sleep_is_not_overlooked(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler thread takes no lock: it may add between a thread's last look and its sleep."""
    it = rig(num_threads=1)
    queue = it.transfers._queue
    real_take = queue.take
    late = [B]

    def take(*, others_allowed: bool) -> Any:
        move = real_take(others_allowed=others_allowed)
        if move is None and late:
            it.read(late.pop())
        return move

    monkeypatch.setattr(queue, "take", take)
    it.read(A)
    give_up = threading.Event()
    timer = threading.Timer(60.0, give_up.set)
    timer.start()
    num_done = 0
    while num_done < 2 and not give_up.is_set():
        num_done += len(it.transfers.poll())
    timer.cancel()
    timer.join()
    assert num_done == 2


def test_one_thread_is_kept_for_reads(rig: MakeRig) -> None:
    """Writes that hang (within their deadlines) do not keep a read waiting."""
    it = rig(Injector(Effect.HANG, on_verb("write_from")), num_threads=3)
    for i in range(6):
        it.write(key_of(i))
    it.faulty.await_hung(2)
    it.store(A)
    ticket = it.read(A)
    dones = []
    while not dones:
        dones = it.transfers.poll()
    assert dones[0].ticket == ticket
    assert dones[0].outcome.found
    assert it.faulty.num_hung == 2
    assert it.transfers.num_queued_writes == 4


def test_a_tier_that_hangs_for_good_costs_threads_up_to_a_bound(rig: MakeRig) -> None:
    """Replacements come up to the bound; then all fails fast, and `close` is back in time."""
    it = rig(
        Injector(Effect.HANG, always), num_threads=2, num_extra_threads=1, failures_to_open=100
    )
    for num_hung in (2, 3):
        for i in range(num_hung):
            it.read(key_of((num_hung, i)), SOON_S)
        it.faulty.await_hung(num_hung)
        assert it.transfers.available
        it.expired(SOON_S)
    assert it.transfers.num_stuck == 3
    assert not it.transfers.available
    assert len(our_threads()) == 3
    it.read(A)
    assert kinds(it.transfers.poll()) == [(Op.READ, "TierUnavailable", True)]

    closing = threading.Thread(target=it.transfers.close, args=(it.clock.now_s() + 3.0,))
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive(), "it waits as long as it may"
    it.clock.advance(3.0)
    closing.join(timeout=60)
    assert not closing.is_alive()
    assert it.transfers.take_released() == []
    assert not it.transfers.close(it.clock.now_s()), "something is still in the tier"


def test_what_is_queued_when_the_last_thread_hangs_fails_fast(rig: MakeRig) -> None:
    """Nobody is left to serve the queue: `poll` ends it, chained moves included."""
    it = rig(
        Injector(Effect.HANG, always), num_threads=1, num_extra_threads=0, failures_to_open=100
    )
    it.read(A, SOON_S)
    it.faulty.await_hung(1)
    for key in (A, A, B):
        it.read(key)
    assert kinds(it.expired(SOON_S)) == [
        (Op.READ, "TierTimeout", False),
        (Op.READ, "TierUnavailable", True),
        (Op.READ, "TierUnavailable", True),
        (Op.READ, "TierUnavailable", True),
    ]


def test_threads_that_come_back_make_the_tier_available_and_the_surplus_leaves(
    rig: MakeRig,
) -> None:
    """After a hang everything is as before."""
    it = rig(
        Injector(Effect.HANG, always), num_threads=2, num_extra_threads=2, failures_to_open=100
    )
    for round_ in range(2):
        for i in range(2):
            it.read(key_of((round_, i)), SOON_S)
        it.faulty.await_hung(2 * round_ + 2)
        it.expired(SOON_S)
    assert not it.transfers.available
    it.faulty.release()
    assert it.transfers.drain(it.clock.now_s() + FOREVER_S)
    assert len(it.transfers.take_released()) == 4
    assert it.transfers.available
    for i in range(10):
        it.read(key_of(i))
    assert len(it.finish()) == 10
    until(lambda: len(our_threads()) <= 2)


def test_close_drops_what_is_queued_closes_the_tier_and_may_come_twice(rig: MakeRig) -> None:
    """Queued moves end, later ones end at once, the tier is closed, no thread is left."""
    it = rig(Injector(Effect.HANG, on_key(A)), num_threads=1)
    it.read(A)
    it.faulty.await_hung(1)
    it.write(B)

    def release_when_closing() -> None:
        until(lambda: not it.transfers.num_queued_writes)
        it.faulty.release()

    releaser = threading.Thread(target=release_when_closing)
    releaser.start()
    assert it.transfers.close(it.clock.now_s() + FOREVER_S)
    releaser.join()
    assert it.transfers.close(it.clock.now_s() + FOREVER_S)
    until(lambda: our_threads() == [])
    assert Counter(type(done.outcome.error) for done in it.transfers.poll()) == {
        TierClosed: 1,
        type(None): 1,
    }
    with pytest.raises(TierClosed):
        it.memory.contains(A)
    assert not it.transfers.available
    it.read(A)
    assert kinds(it.transfers.poll()) == [(Op.READ, "TierClosed", True)]


class BadAtClosing(MemoryTier):
    """`close` hangs until `gate` opens, then fails."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()

    def close(self) -> None:
        self.gate.wait()
        raise OSError(5, "cannot close")


def test_a_tier_that_hangs_or_fails_in_close_does_not_hold_us_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`close` is back at its deadline; a failure to close is a line in the log."""
    clock, tier = ManualClock(), BadAtClosing()
    it = Transfers(tier, clock=clock, max_queued_write_bytes=N)
    it.read(A, memoryview(bytearray(N)), clock.now_s() + FOREVER_S)
    answers: list[bool] = []
    deadline_s = clock.now_s() + 3.0
    closing = threading.Thread(target=lambda: answers.append(it.close(deadline_s)))
    closing.start()
    while not any(name.endswith("-close") for name in our_threads()):
        pass
    clock.advance(3.0)
    closing.join(timeout=60)
    assert answers == [False]
    tier.gate.set()
    assert it.close(clock.now_s() + FOREVER_S)
    assert "tier 'memory' failed to close" in caplog.text
    until(lambda: our_threads() == [])
