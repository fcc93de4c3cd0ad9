"""Every kind of fault at every system call, one run each, until a run meets no fault."""

from pathlib import Path

import pytest

from undercroft.errors import KvError, TierFull
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.records import RecordIo

from .injection import EFFECTS, FaultyFiles
from .support import ManualClock, disk, du, open_files, put, right

CAPACITY = 128 << 10
MAX_CALLS = 400


def opened(path: Path, injected: Files, clock: ManualClock) -> DiskTier:
    return disk(path, capacity_bytes=CAPACITY, files=injected, clock=clock, flush_interval_s=0.5)


def attempt(tier: DiskTier, verb: str, number: int) -> None:
    """One verb; only `KvError` may come out of it."""
    try:
        if verb == "put":
            put(tier, number)
        elif verb == "get":
            right(tier, number)
        elif verb == "big":
            put(tier, number, 20_000)
        elif verb == "raise":
            tier.raise_epoch()
            tier.voided = True  # type: ignore[attr-defined]
        elif verb == "flush":
            tier.flush()
        else:
            from .support import key

            tier.delete(key(number))
    except KvError:
        return


SCRIPT = [
    *[("put", n) for n in range(7)],
    ("get", 0),
    ("get", 6),
    ("delete", 1),
    ("put", 8),
    ("get", 8),
    ("flush", 0),
    ("big", 100),
    ("get", 3),
    ("raise", 0),
    ("get", 2),
    ("put", 20),
    ("put", 21),
    ("get", 20),
    ("get", 21),
]
BEFORE_RAISE = (0, 2, 3, 4, 5, 6, 8)


def run(path: Path, injected: FaultyFiles) -> None:
    """The script over a restart, with the fault; then, without it, everything must be in order."""
    clock, descriptors = ManualClock(), open_files()
    for script in (SCRIPT[:11], SCRIPT[11:]):
        tier = opened(path, injected, clock)
        for verb, number in script:
            attempt(tier, verb, number)
            clock.t += 0.06
            assert du(path) <= CAPACITY
        voided = getattr(tier, "voided", False)
        if voided:
            assert not any(right(tier, n) for n in BEFORE_RAISE), "served across a reset"
        tier.close()
    assert open_files() <= descriptors, "descriptors leak"
    tier = opened(path, Files(), clock)
    if voided:
        assert not any(right(tier, n) for n in BEFORE_RAISE), "served across a reset, reopened"
    for number in range(22):
        attempt(tier, "get", number)
    tier.refresh()
    assert tier.used_bytes() == du(path) <= CAPACITY
    put_or_make_room(tier)
    tier.close()


def put_or_make_room(tier: DiskTier) -> None:
    """After the fault the tier must take and give chunks again."""
    try:
        put(tier, 50)
    except TierFull:
        for held, _ in list(tier.evictable()):
            tier.delete(held)
        put(tier, 50)
    assert right(tier, 50)


def sweep(path: Path, effect: str) -> int:
    """Runs until one meets no fault; returns how many faults were met."""
    for at in range(MAX_CALLS):
        injected = FaultyFiles(effect, at)
        run(path / f"{effect}-{at}", injected)
        if not injected.fired:
            return at
    pytest.fail("the script never ends")


@pytest.mark.parametrize("effect", EFFECTS)
def test_no_fault_does_harm(memory_path: Path, effect: str) -> None:
    """No wrong byte, no foreign exception, no lost room, no leak, whatever call fails and how."""
    assert sweep(memory_path, effect) > 30


@pytest.mark.parametrize("effect", ["torn", "lost", "flipped"])
def test_the_sweep_can_fail(
    memory_path: Path, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without verification the same sweep must serve wrong bytes."""
    monkeypatch.setattr(RecordIo, "_verify", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong bytes served"):
        sweep(memory_path, effect)


@pytest.mark.parametrize("effect", ["error", "full"])
def test_a_device_that_keeps_failing_is_survived(tmp_path: Path, effect: str) -> None:
    """From any call on, for ever: typed errors only, and all is well once it works again."""
    for at in range(0, 120, 7):
        run(tmp_path / str(at), FaultyFiles(effect, at, times=10**9))
