"""Death of a participant at any point, restarts, and engines that share a name by mistake."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from region_process import MIB, config, join, participants, shared_memory

from undercroft.errors import ConfigError, KvError
from undercroft.hierarchy import region_entry, rendezvous
from undercroft.hierarchy.region_control import Control
from undercroft.hierarchy.rendezvous import SeatLock, region_path, sweep_dead_regions


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_memory() as path:
        yield path


_STEPS = [
    *((SeatLock, name) for name in ("_check_ours", "sit", "unlink", "close_door")),
    *((Control, name) for name in ("write_header", "write_record", "set_joined", "release")),
    (rendezvous, "_try_lock"),
    (region_entry, "sweep_dead_regions"),
    *((os, name) for name in ("ftruncate", "posix_fallocate", "pread")),
]


def _die_at(step: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a forked child that SIGKILLs itself before its `step`-th step.

    Returns whether it died there; otherwise it finished, and ended without closing anything.
    """
    child = os.fork()
    if child == 0:
        left = step

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **keywords: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return original(*args, **keywords)

            return run

        try:
            for owner, name in _STEPS:
                setattr(owner, name, counted(getattr(owner, name)))
            kept = action()  # no finalizer before the exit
            os._exit(7 if kept else 1)
        except BaseException:  # noqa: BLE001 - a child must not go on as a second test run
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 7
    return False


def _start_whole_engine(directory: Path, num_ranks: int = 1) -> None:
    """A complete start works, with its own bytes, and leaves no file."""
    wanted = config(directory, num_ranks=num_ranks)
    ranks = [join(wanted, rank) for rank in range(num_ranks)]
    scheduler = join(wanted, "scheduler")
    scheduler.wait_joined(60)
    for rank in ranks:
        rank.wait_joined(60)
    ranks[0].buffer[-4:] = b"mine"
    assert bytes(scheduler.buffer[-4:]) == b"mine"
    assert list(directory.iterdir()) == []
    for region in (*ranks, scheduler):
        region.close()


def test_a_rank_killed_at_any_step_does_not_disturb_the_next_start(directory: Path) -> None:
    """SIGKILL of the creating rank before each of its steps: the next engine simply starts."""
    step = 0
    while _die_at(step, lambda: join(config(directory), 0)):
        _check_not_used_again(directory)
        _start_whole_engine(directory)
        step += 1
    assert step > 12
    assert len(list(directory.iterdir())) == 1  # a dead, joined rank
    _start_whole_engine(directory)


def _check_not_used_again(directory: Path) -> None:
    """Whatever bytes a dead start left are not those of the next one."""
    for left in directory.iterdir():
        with left.open("rb") as held:  # so that its inode is not given out again
            if held.read(1):
                region = join(config(directory), 0)
                assert not os.path.samestat(os.fstat(held.fileno()), left.stat())
                region.close()


def test_a_scheduler_killed_at_any_step_leaves_nothing_behind(directory: Path) -> None:
    """SIGKILL of the last to join before each step: its rank learns it, the next engine starts."""
    step = 0
    died = True
    while died:
        rank = join(config(directory), 0)
        died = _die_at(step, lambda: join(config(directory), "scheduler"))
        if rank._control.has_joined(1):
            rank.wait_joined(60)  # complete: no file, whatever dies now
            assert list(directory.iterdir()) == []
        else:
            with pytest.raises(KvError, match="the scheduler did not join in time"):
                rank.wait_joined(0)
        rank.close()
        assert list(directory.iterdir()) == []
        _start_whole_engine(directory)
        step += 1
    assert step > 8


def test_a_second_rank_killed_at_any_step_is_replaced_with_its_region(directory: Path) -> None:
    """SIGKILL of a joining rank, then of the other: a start with two ranks works at once."""
    step = 0
    died = True
    while died:
        with participants(1) as (first,):
            first.join(config(directory, num_ranks=2), 0)
            died = _die_at(step, lambda: join(config(directory, num_ranks=2), 1))
        _start_whole_engine(directory, num_ranks=2)
        step += 1
    assert step > 6


def test_twenty_kills_and_restarts_with_a_fixed_engine_id(directory: Path) -> None:
    """kill -9 of everybody, alternately before and after all joined, then start again, 20 times."""
    wanted = config(directory, total_bytes=8 * MIB)
    for restart in range(20):
        with participants(2) as (rank, scheduler):
            rank.join(wanted, 0)
            if restart % 3:
                scheduler.join(wanted, "scheduler")
                assert scheduler.ask("wait", 60) == [[4096, 512]]
                rank.ask("wait", 60)
                assert rank.ask("read", MIB, 2) == "\0\0"  # never bytes of a former engine
                rank.ask("write", MIB, "me")
                assert scheduler.ask("read", MIB, 2) == "me"
        assert len(list(directory.iterdir())) == (0 if restart % 3 else 1)
    _start_whole_engine(directory)


def test_a_stale_region_is_replaced_and_said_so(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of a dead start is not reused but removed, with one line naming it."""
    wanted = config(directory)
    with participants(1) as (rank,):
        rank.join(wanted, 0)
    (stale,) = directory.iterdir()
    inode = stale.stat().st_ino
    with stale.open("rb") as held:  # keeps the inode from being used again
        region = join(wanted, 0)
        assert stale.stat().st_ino != inode
        assert held.read(8)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert str(stale) in record.getMessage()
    region.close()


def test_a_start_sweeps_other_engines_regions_only_if_they_are_dead(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dead engines' files go, with a line each; live ones and foreign files stay."""
    foreign = directory / "undercroft-notes"
    foreign.write_text("keep me")
    with participants(2) as (dead, live):
        dead.join(config(directory, "dead"), 0)
        live.join(config(directory, "live"), 0)
        dead.kill()
        region = join(config(directory, "new"), 0)
        left = {path.name for path in directory.iterdir()}
        kept = {region_path(directory, name).name for name in ("live", "new")}
        assert left == {foreign.name, *kept}
        (message,) = [record.getMessage() for record in caplog.records]
        assert str(region_path(directory, "dead")) in message
        assert "a dead engine" in message
        region.close()
        live.ask("close")
    foreign.unlink()


def test_the_sweep_leaves_a_region_that_is_being_entered(directory: Path) -> None:
    """A file whose door is held, joined by nobody yet, is not dead."""
    path = region_path(directory, "starting")
    lock = SeatLock(path, 0)
    assert lock.open_door(create=True)
    sweep_dead_regions(directory, directory / "none")
    assert path.exists()
    lock.close_door()
    sweep_dead_regions(directory, directory / "none")
    assert not path.exists()
    lock.leave()


def test_twins_one_after_the_other_get_a_region_each(directory: Path) -> None:
    """Two live engines with one engine_id: the second has its own bytes."""
    wanted = config(directory)
    with participants(4) as (rank_a, scheduler_a, rank_b, scheduler_b):
        for rank, scheduler, text in ((rank_a, scheduler_a, "A"), (rank_b, scheduler_b, "B")):
            rank.join(wanted, 0)
            scheduler.join(wanted, "scheduler")
            scheduler.ask("wait", 60)
            rank.ask("wait", 60)
            rank.ask("write", 100, text)
        assert [one.ask("read", 100, 1) for one in (scheduler_a, scheduler_b)] == ["A", "B"]


def test_twins_that_start_together_never_mix(directory: Path) -> None:
    """The second twin's rank waits until the first engine is complete, then makes its own."""
    wanted = config(directory)
    with participants(4) as (rank_a, scheduler_a, rank_b, scheduler_b):
        rank_a.join(wanted, 0)
        rank_b.send("join", *rank_b.arguments(wanted, 0, 60))
        scheduler_a.join(wanted, "scheduler")
        rank_b.answer()
        scheduler_b.join(wanted, "scheduler")
        for scheduler in (scheduler_a, scheduler_b):
            scheduler.ask("wait", 60)
        rank_a.ask("write", 100, "A")
        rank_b.ask("write", 100, "B")
        assert [one.ask("read", 100, 1) for one in (scheduler_a, scheduler_b)] == ["A", "B"]
    assert list(directory.iterdir()) == []


def test_twins_whose_ranks_interleave_both_refuse(directory: Path) -> None:
    """A mixed set of ranks never becomes complete: clear errors, no shared bytes."""
    wanted = config(directory, num_ranks=2)
    with participants(4) as (a0, a1, b0, b1):
        a0.join(wanted, 0)
        b1.join(wanted, 1)
        b0.send("join", *b0.arguments(wanted, 0, 0.3))
        a1.send("join", *a1.arguments(wanted, 1, 0.3))
        for one, named in ((b0, "rank 0"), (a1, "rank 1")):
            with pytest.raises(RuntimeError, match=f"ConfigError.*{named} is already there"):
                one.answer()
        for one in (a0, b1):
            one.ask("close")
    assert list(directory.iterdir()) == []


def test_twins_that_start_again_and_again_each_see_their_own_bytes(directory: Path) -> None:
    """Three processes with one engine_id, each starting engine after engine: none shares bytes."""

    def starts(me: int) -> None:
        for turn in range(12):
            wanted = config(directory)
            rank, scheduler = join(wanted, 0, 60), join(wanted, "scheduler", 60)
            scheduler.wait_joined(60)
            rank.wait_joined(60)
            token = bytes([me, turn])
            assert bytes(scheduler.buffer[1000:1002]) == bytes(2)
            rank.buffer[1000:1002] = token
            time.sleep(0.002)
            assert bytes(scheduler.buffer[1000:1002]) == token
            rank.close()
            scheduler.close()

    context = multiprocessing.get_context("fork")
    twins = [context.Process(target=starts, args=(me,)) for me in (1, 2, 3)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join(200)
    assert [twin.exitcode for twin in twins] == [0, 0, 0]


def test_a_file_replaced_between_opening_and_its_door_is_not_entered(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was about to enter a file that somebody just removed tries again with the new one."""
    path = region_path(directory, "engine")
    try_lock = rendezvous._try_lock

    def slow(fd: int, byte: int) -> bool:
        monkeypatch.setattr(rendezvous, "_try_lock", try_lock)
        path.unlink()
        path.touch(0o600)
        return try_lock(fd, byte)

    monkeypatch.setattr(rendezvous, "_try_lock", slow)
    lock = SeatLock(path, 0)
    assert not lock.open_door(create=True)
    assert lock.open_door(create=True)
    assert os.path.samestat(os.fstat(lock.fd), path.stat())
    lock.leave()
    assert not path.exists()


def test_the_reason_given_is_the_last_real_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that happens to be busy at the deadline does not hide why the wait was needed."""
    answers = iter([region_entry.Waiting("the seat is taken"), region_entry._DOOR_BUSY])
    monkeypatch.setattr(region_entry.Entrance, "attempt", lambda _: next(answers))
    with pytest.raises(KvError, match="the seat is taken"):
        join(config(directory), 0, 0.005)


def test_leaving_before_all_joined_takes_the_file_along(directory: Path) -> None:
    """A failed start removes its file at once, whoever else is in it, and that one learns it."""
    wanted = config(directory, num_ranks=2)
    with participants(1) as (other,):
        other.join(wanted, 1)
        rank = join(wanted, 0)
        rank.close()
        assert list(directory.iterdir()) == []
        with pytest.raises(RuntimeError, match="rank 0 died"):
            other.ask("wait", 60)
    _start_whole_engine(directory, num_ranks=2)


def test_leaving_while_another_is_at_the_door_leaves_the_file_to_it(directory: Path) -> None:
    """The name is only taken away with the door held."""
    rank = join(config(directory), 0)
    path = region_path(directory, "engine")
    other = SeatLock(path, 1)
    assert other.open_door(create=False)
    rank.close()
    assert path.exists()
    assert not other.is_live(0)
    other.leave()
    assert not path.exists()


def test_a_second_start_in_this_process_is_told_whose_seat_it_wants(directory: Path) -> None:
    """A seat held by an unclosed region of this very process is named as such."""
    region = join(config(directory), 0)
    with pytest.raises(ConfigError, match=r"live process \d+ \(this one\)"):
        join(config(directory), 0, 0.05)
    region.close()


def test_a_forked_child_does_not_keep_a_dead_rank_alive(directory: Path) -> None:
    """A child forked after joining outlives its parent, and the next start still works."""
    with participants(1) as (rank,):
        rank.join(config(directory), 0)
        pid = rank.ask("fork")
    try:
        assert len(list(directory.iterdir())) == 1
        _start_whole_engine(directory)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_forked_child_that_closes_leaves_the_parents_seat(directory: Path) -> None:
    """`close` in a child, of a region inherited from its parent, changes nothing outside it."""
    rank = join(config(directory), 0)
    pid = os.fork()
    if pid == 0:
        rank.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    scheduler = join(config(directory), "scheduler")
    scheduler.wait_joined(60)
    rank.wait_joined(60)
    rank.close()
    scheduler.close()


def test_a_killed_peer_leaves_no_file_and_the_others_keep_their_bytes(directory: Path) -> None:
    """After all have joined, a SIGKILL leaves nothing in shared memory and hurts nobody's view."""
    wanted = config(directory)
    with participants(1) as (rank,):
        rank.join(wanted, 0)
        scheduler = join(wanted, "scheduler")
        scheduler.wait_joined(60)
        rank.ask("write", 0, "bytes")
    assert list(directory.iterdir()) == []
    assert bytes(scheduler.buffer[:5]) == b"bytes"
    scheduler.close()
