"""Killed anywhere, the directory must hold whole chunks, the truth about them, and no debris."""

import gc
import mmap
import os
import random
import signal
from pathlib import Path

import pytest

from undercroft.errors import CorruptChunk, KvError, TierFull
from undercroft.tiers.disk import DiskTier

from .injection import KillingFiles
from .support import ManualClock, content, disk, du, files, key, put, right

CAPACITY = 240 << 10
NUM_KEYS = 40
ABSENT, PRESENT, UNKNOWN, EXCEEDED = 0, 1, 2, 3
SIZES = (4096, 8192)


def size_of(number: int) -> int:
    return SIZES[number % 2]


class Ledger:
    """What the child has been promised, in memory that outlives it."""

    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, 4096)

    def all_unknown(self) -> None:
        self.bytes[:NUM_KEYS] = bytes([UNKNOWN]) * NUM_KEYS


def churn(tier: DiskTier, ledger: mmap.mmap, dice: random.Random, steps: int) -> None:
    """Random verbs; the ledger says what is promised before and after each."""
    for _ in range(steps):
        number, verb = dice.randrange(NUM_KEYS), dice.random()
        if verb < 0.65:
            held = ledger[number]
            ledger[number] = UNKNOWN if held != PRESENT else PRESENT
            try:
                put(tier, number, size_of(number))
            except TierFull:
                # A segment of the other size may have been given up to make room, before it failed.
                free_one(tier, ledger, dice)
            else:
                # To make room for one size a segment of the other may have gone: see `settle`.
                settle(tier, ledger)
        elif verb < 0.88:
            ledger[number] = UNKNOWN
            tier.delete(key(number))
            ledger[number] = ABSENT
        elif verb < 0.97:
            tier.flush()
        else:
            ledger[:NUM_KEYS] = bytes([UNKNOWN]) * NUM_KEYS
            tier.raise_epoch()
            ledger[:NUM_KEYS] = bytes(NUM_KEYS)


def free_one(tier: DiskTier, ledger: mmap.mmap, dice: random.Random) -> None:
    settle(tier, ledger)
    held = [n for n in range(NUM_KEYS) if tier.has(key(n))]
    if held:
        number = dice.choice(held)
        ledger[number] = UNKNOWN
        tier.delete(key(number))
        ledger[number] = ABSENT


def settle(tier: DiskTier, ledger: mmap.mmap) -> None:
    ledger[:NUM_KEYS] = bytes(PRESENT if tier.has(key(n)) else ABSENT for n in range(NUM_KEYS))


def child(path: Path, ledger: mmap.mmap, at: int, seed: int, *, power: bool) -> None:
    """Open, churn, close; killed at call `at`. Never returns."""

    def watch() -> None:
        if du(path) > CAPACITY:
            ledger[NUM_KEYS] = EXCEEDED

    gc.disable()  # a collection would touch, and so copy, all that the parent has
    dice = random.Random(seed)
    injected = KillingFiles(at, seed if power else None, watch)
    status = 1
    try:
        tier = disk(path, capacity_bytes=CAPACITY, files=injected, flush_interval_s=0.01)
        churn(tier, ledger, dice, 40)
        tier.close()
        status = 0
    except BaseException:  # noqa: BLE001 - the parent sees the status
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def killed(path: Path, ledger: Ledger, at: int, seed: int, *, power: bool) -> bool:
    pid = os.fork()
    if pid == 0:
        child(path, ledger.bytes, at, seed, power=power)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"the child failed, seed {seed}, call {at}"
    return False


def inspect(path: Path, ledger: Ledger, *, power: bool, hint: str) -> None:
    """Reopen and compare with what was promised."""
    assert ledger.bytes[NUM_KEYS] != EXCEEDED, f"the capacity was exceeded, {hint}"
    assert du(path) <= CAPACITY, hint
    tier = disk(path, capacity_bytes=CAPACITY, clock=ManualClock())
    try:
        assert tier.used_bytes() == du(path) <= CAPACITY, hint
        assert not list(path.glob("undercroft-v1/*/*.tmp")), hint
        slabs = {f.stem for f in files(path, ".slab")}
        assert slabs == {f.stem for f in files(path, ".index")}, hint
        for number in range(NUM_KEYS):
            promised = ledger.bytes[number]
            try:
                there = right(tier, number, size_of(number))
            except CorruptChunk:
                assert power, f"a killed process left a chunk in pieces, {hint}"
                there = False
            if not power and promised != UNKNOWN:
                assert there == (promised == PRESENT), f"chunk {number}: {promised}, {hint}"
        live = len(list(tier.evictable()))
        assert live == sum(tier.has(key(n)) for n in range(NUM_KEYS)), hint
        settle(tier, ledger.bytes)
    finally:
        tier.close()


def kill_often(path: Path, num_kills: int, seed: int, *, power: bool) -> None:
    ledger, dice = Ledger(), random.Random(seed)
    count = runs = 0
    while count < num_kills:
        runs += 1
        assert runs < 2 * num_kills, "too few runs are killed: the test has lost its bite"
        seed, at = dice.getrandbits(32), dice.randrange(160)
        hint = f"run {runs}, seed {seed}, call {at}"
        count += killed(path, ledger, at, seed, power=power)
        inspect(path, ledger, power=power, hint=hint)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("power", [False, True])
def test_killed_at_any_call(memory_path: Path, power: bool, seed: int) -> None:
    """SIGKILL, or loss of power, at 960 random calls: whole or absent, as promised, counted."""
    kill_often(memory_path, 40, seed, power=power)


@pytest.mark.parametrize("power", [False, True])
def test_killed_at_any_call_on_a_real_disk(tmp_path: Path, power: bool) -> None:
    """The same where direct I/O, preallocation and syncing are real: 80 calls."""
    kill_often(tmp_path, 40, 99, power=power)


def test_the_crash_test_can_fail(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with verification off, loss of power must be seen to serve wrong bytes."""
    from undercroft.tiers.disk.records import RecordIo

    monkeypatch.setattr(RecordIo, "_verify", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong bytes served"):
        kill_often(memory_path, 300, 7, power=True)


def test_flushed_chunks_survive_the_loss_of_power(tmp_path: Path) -> None:
    """What `flush` returned for must be there after any unsynced write is undone."""
    for seed in range(12):
        path = tmp_path / str(seed)
        pid = os.fork()
        if pid == 0:
            try:
                injected = KillingFiles(10**9, seed + 1, lambda: None)
                tier = disk(path, capacity_bytes=CAPACITY, files=injected, flush_interval_s=1e9)
                for number in range(6):
                    put(tier, number)
                tier.flush()
                for number in range(6, 10):
                    put(tier, number)
                injected.die()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        tier = disk(path, capacity_bytes=CAPACITY)
        assert all(right(tier, number) for number in range(6)), f"seed {seed}"
        for number in range(6, 10):
            try:
                right(tier, number)
            except KvError as exc:
                assert isinstance(exc, CorruptChunk)  # noqa: PT017 - absent or caught, never wrong
            put(tier, number)
            assert right(tier, number)
        tier.close()


def test_content_is_a_function_of_the_key() -> None:
    """The tests above rest on this."""
    assert content(key(1)) == content(key(1)) != content(key(2))
