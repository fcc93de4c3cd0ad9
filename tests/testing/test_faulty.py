"""Tier type `faulty`: what its control file says goes wrong, below the tier's own checks too."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from undercroft.clock import SystemClock
from undercroft.engines.assemble import make_tier
from undercroft.errors import ConfigError, KvError
from undercroft.keys import Namespace
from undercroft.settings import load
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import Fault, Plan
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.base import Bounded, Epochal, Following, Indexed, SharedMemory

N = 64 << 10
A, B = key_of("a"), key_of("b")


class Rig:
    """A faulty disk tier, opened as an engine opens it, and who controls it."""

    def __init__(self, folder: Path, inner: dict[str, Any] | None = None) -> None:
        self.path = folder / "kv"
        disk = {"type": "disk", "path": str(self.path), "capacity": "32MiB"}
        entry = {
            "type": "faulty",
            "control": str(folder / "faults.json"),
            "inner": inner or {**disk, "free_space_floor": 0},
        }
        self.control = FaultControl(folder / "faults.json")
        (self.settings,) = load({"host": "1MiB", "tiers": [entry]}, environ={}).tiers
        self.tier: Any = None

    def open(self, memory: SharedMemory | None = None) -> Any:
        self.tier = make_tier(
            self.settings,
            namespace=Namespace({"model": "m"}),
            clock=SystemClock(),
            num_replicas=1,
            memory=memory,
        )
        return self.tier

    def write(self, key: Any) -> None:
        self.tier.write_from(key, chunk_of(key, N))

    def read(self, key: Any) -> bytes | None:
        out = memoryview(bytearray(N))
        return bytes(out) if self.tier.read_into(key, out) else None


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.open()
    yield rig
    rig.tier.close()


def outcome(do: Callable[[], Any]) -> str:
    try:
        return f"{do()}"
    except KvError as error:
        return type(error).__name__


def test_without_a_plan_it_is_the_inner_tier(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Its settings are the inner tier's, its abilities too; that it may go wrong is said."""
    assert (rig.settings.name, rig.settings.type) == ("disk", "disk")
    assert rig.settings.capacity_bytes == 32 << 20
    for ability in (Indexed, Bounded, Epochal, Following):
        assert isinstance(rig.tier, ability)
    rig.write(A)
    assert rig.read(A) == chunk_of(A, N)
    assert "going wrong on purpose as" in rig.tier.describe()
    assert rig.control.fired() == {}


def test_a_warning_says_so_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can run it unawares."""
    rig = Rig(tmp_path)
    with caplog.at_level(logging.WARNING):
        rig.open().close()
    assert any("tier disk goes wrong on purpose, as" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("fault", "verb", "expected"),
    [
        (Fault("error", calls=("read_into",)), "read", "TierUnavailable"),
        (Fault("error", at="files", calls=("preadv",)), "read", "TierUnavailable"),
        (Fault("error", at="files", calls=("pread",)), "read", "None"),  # the epoch's file
        (Fault("foreign error", errno="ESTALE", calls=("preadv",)), "read", "TierUnavailable"),
        (Fault("short read", calls=("preadv",)), "read", "CorruptChunk"),
        (Fault("flipped bit", calls=("preadv",)), "read", "CorruptChunk"),
        (Fault("flipped bit", calls=("pwritev",)), "write, read", "CorruptChunk"),
        (Fault("torn write", calls=("pwritev",)), "write, read", "CorruptChunk"),
        (Fault("lost write", calls=("pwritev",)), "write, read", "CorruptChunk"),
        (Fault("misdirected write", calls=("pwritev",)), "write, read", "CorruptChunk"),
        (Fault("misdirected read"), "read", "CorruptChunk"),
        (Fault("full"), "write", "TierFull"),
        (Fault("full", at="tier"), "write", "TierFull"),
        (Fault("read only"), "write", "TierUnavailable"),
    ],
    ids=lambda value: f"{value.effect} {value.at or ''}" if isinstance(value, Fault) else None,
)
def test_faults_meet_the_tiers_own_code(rig: Rig, fault: Fault, verb: str, expected: str) -> None:
    """Each fires, becomes the error it should, and is over when the plan says so.

    Before and after, the very same calls work: the fault alone makes the difference.
    """
    rig.write(A)
    rig.write(key_of("other"))
    assert rig.read(A) == chunk_of(A, N)
    assert rig.read(key_of("other")) == chunk_of(key_of("other"), N)
    rig.control.apply(fault)
    written = outcome(lambda: rig.write(B)) if "write" in verb else None
    found = outcome(lambda: rig.read(B if written else A)) if "read" in verb else written
    assert found == expected
    rig.control.clear()
    assert rig.control.fired()[fault.label] > 0
    for key in (A, B):
        if outcome(lambda key=key: rig.read(key)) == "CorruptChunk":
            assert fault.effect == "misdirected write", "another chunk came to harm"
        rig.write(key)
        assert rig.read(key) == chunk_of(key, N)
    fired = rig.control.fired()[fault.label]
    rig.read(A)
    assert rig.control.fired()[fault.label] == fired


def test_permission_hits_what_takes_a_path(tmp_path: Path) -> None:
    """From the first call on: the tier starts without its disk; later it makes it anew."""
    rig = Rig(tmp_path)
    rig.control.apply(Fault("permission"))
    tier = rig.open()
    assert outcome(lambda: rig.write(A)) == "TierUnavailable"
    assert soon(lambda: rig.control.fired()["permission"] > 0)
    rig.control.clear()
    time.sleep(1.1)  # it tries its directory once a second
    rig.write(A)
    assert rig.read(A) == chunk_of(A, N)
    tier.close()


def test_a_vanished_directory_is_really_gone(rig: Rig) -> None:
    """Of ours, and what lies beside it stays; the tier makes it anew."""
    rig.write(A)
    beside = rig.path / "somebody's"
    beside.touch()
    rig.control.apply(Fault("vanished directory", at_most=1))
    outcome(lambda: rig.tier.contains(A))
    assert not (rig.path / "undercroft-v1").exists()
    assert beside.exists()
    assert soon(lambda: rig.control.fired() == {"vanished directory": 1})
    time.sleep(1.1)
    outcome(lambda: rig.write(B))
    rig.write(B)
    assert rig.read(B) == chunk_of(B, N)


@contextmanager
def in_thread(do: Callable[[], Any]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


def soon(done: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 20
    while not done() and time.monotonic() < ends:
        time.sleep(0.01)
    return done()


@pytest.mark.parametrize("at", ["tier", "files"])
def test_what_hangs_goes_on_when_the_fault_ends(rig: Rig, at: str) -> None:
    """Not before, however long it is; it is counted while it hangs."""
    calls = ("write_from",) if at == "tier" else ("pwritev",)
    rig.control.apply(Fault("hang", at=at, calls=calls))
    with in_thread(lambda: rig.write(A)) as thread:
        assert soon(lambda: rig.control.num_hung() == 1)
        rig.control.apply(
            Fault("hang", at=at, calls=calls), Fault("error", calls=("contains",), index=10**6)
        )  # the same fault goes on in another plan
        thread.join(0.2)
        assert thread.is_alive()
        rig.control.clear()
    assert soon(lambda: rig.control.num_hung() == 0)
    assert rig.read(A) == chunk_of(A, N)


def test_delays_take_as_long_as_they_say(rig: Rig) -> None:
    """And then the call works."""
    rig.control.apply(Fault("slow", calls=("write_from",), seconds=0.3))
    began = time.monotonic()
    rig.write(A)
    assert time.monotonic() - began >= 0.3
    assert rig.read(A) == chunk_of(A, N)
    assert soon(lambda: rig.control.fired() == {"slow": 1})


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("error", index=2), "..x......"),
        (Fault("error", every=3), "..x..x..x"),
        (Fault("error", at_most=2), "xx......."),
        (Fault("error", keys=(A.hex()[:12],)), "xxxxxxxxx"),
        (Fault("error", keys=(B.hex()[:12],)), "........."),
        (Fault("error", ratio=0.0), "........."),
        (Fault("error", ratio=1.0), "xxxxxxxxx"),
        (Fault("error", after_s=3600), "........."),
        (Fault("error", for_s=0), "........."),
        (Fault("error", calls=("delete",)), "........."),
    ],
    ids=lambda value: json.dumps(value.to_json()) if isinstance(value, Fault) else "",
)
def test_calls_are_chosen_as_the_plan_says(rig: Rig, fault: Fault, expected: str) -> None:
    """By number, share, key, time, verb and count."""
    rig.control.apply(fault)
    seen = [outcome(lambda: rig.tier.contains(A)) == "TierUnavailable" for _ in range(9)]
    assert "".join("x" if failed else "." for failed in seen) == expected


def test_a_share_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """And another one for another."""

    def seen(seed: int, folder: Path) -> str:
        folder.mkdir()
        rig = Rig(folder)
        rig.control.apply(Fault("error", ratio=0.3, seed=seed))
        rig.open()
        found = [outcome(lambda: rig.tier.contains(A)) for _ in range(200)]
        rig.tier.close()
        assert 30 < found.count("TierUnavailable") < 100
        return "".join(each[0] for each in found)

    one, two, other = (seen(seed, tmp_path / str(number)) for number, seed in enumerate((1, 1, 2)))
    assert one == two != other


def test_a_plan_that_cannot_be_read_changes_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The faults go on, a warning and the status say why; a missing file ends them."""
    rig.control.apply(Fault("error", calls=("contains",)))
    rig.control.path.write_text('{"faults": [{"effect": "eror"}]}')
    assert soon(lambda: any(status.error for status in rig.control.statuses()))
    (status,) = rig.control.statuses()
    assert "effect of a fault is 'eror', but must be one of error, " in str(status.error)
    assert any("keeps its faults" in line for line in caplog.messages)
    assert outcome(lambda: rig.tier.contains(A)) == "TierUnavailable"
    rig.control.path.unlink()
    assert soon(lambda: outcome(lambda: rig.tier.contains(A)) == "False")


def test_a_tier_without_system_calls_of_ours(tmp_path: Path) -> None:
    """It is attacked at its verbs; what belongs below is refused in words."""
    rig = Rig(tmp_path, {"type": "memory", "capacity": "1MiB", "name": "attic"})
    tier = rig.open()
    with pytest.raises(RuntimeError, match=r"attic: 'flipped bit' is at files, but tier attic"):
        rig.control.apply(Fault("flipped bit"))
    with pytest.raises(RuntimeError, match="has no directory"):
        rig.control.apply(Fault("vanished directory"))
    rig.control.apply(Fault("flipped bit", at="tier", calls=("read_into",)))
    rig.write(A)
    found = rig.read(A)
    assert found is not None
    assert sum((x ^ y).bit_count() for x, y in zip(found, chunk_of(A, N), strict=True)) == 1
    tier.close()


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.testing.test_faulty import A, B, Rig
rig = Rig(Path({folder!r}))
rig.open()
rig.write(A)
print("written", flush=True)
rig.write(B)
print("not reached", flush=True)
"""


def test_a_killed_process_has_told_that_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle of a call; the counter says so, and the next process goes on."""
    rig = Rig(tmp_path)
    rig.control.apply(Fault("killed", calls=("write_from",), index=1))
    script = KILLED.format(paths=sys.path, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (-9, "written\n"), done.stderr
    assert rig.control.fired() == {"killed": 1}
    (status,) = rig.control.statuses()
    assert not status.is_live
    rig.control.clear()
    rig.open()
    assert rig.read(A) == chunk_of(A, N)
    assert rig.read(B) is None
    rig.tier.close()


def test_a_process_that_nobody_waited_for_is_not_waited_for_here(tmp_path: Path) -> None:
    """A killed engine whose parent has not noticed yet; nor another process of its number."""
    rig = Rig(tmp_path)
    rig.control.apply(Fault("killed", calls=("write_from",)))
    script = KILLED.format(paths=sys.path, folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert soon(lambda: rig.control.fired() == {"killed": 1})
        assert soon(lambda: not any(status.is_live for status in rig.control.statuses()))
        rig.control.clear(wait_s=5.0)
        process.wait(30)


def test_a_control_file_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A line that says so, before anything else happens."""
    rig = Rig(tmp_path / "absent")
    with pytest.raises(ConfigError, match="but there is no directory"):
        rig.open()
    assert not rig.path.exists()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"effect": "hang", "calls": ["read"]}, "calls at tier of a fault is 'read'"),
        ({"effect": "hang", "ratio": "1%"}, "ratio of a fault is '1%', but must be a number >= 0"),
        ({"effect": "hang", "index": 1.5}, "index of a fault is 1.5, but must be a whole number"),
        ({"effect": "hang", "at": "disk"}, "at of a fault is 'disk', but must be tier or files"),
        ({"effect": "foreign error", "errno": "EI0"}, "errno of a fault is 'EI0'"),
        ({"effect": "full", "keys": ["ab"]}, "keys of a fault is ['ab'], but must be left out"),
        ({"effect": "hang", "keys": ["AB"]}, "keys of a fault is 'AB', but must be lower-case"),
        ({"effect": "hang", "rate": 1}, "a fault has an unknown key 'rate'"),
        ({"effect": "hang", "calls": "open"}, "calls of a fault is 'open', but must be a list"),
        ({"ratio": 1}, "a fault lacks effect"),
        ("hang", "a fault is 'hang', but must be an object"),
    ],
)
def test_a_wrong_fault_is_refused_in_words(written: object, message: str) -> None:
    """The key, what it is, what it must be."""
    with pytest.raises(ConfigError) as caught:
        Plan.from_text(json.dumps({"faults": [written]}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"faults": 1}', '{"faults": [], "x": 1}', "[" * 9999]
)
def test_a_wrong_plan_is_refused(text: str) -> None:
    """Whatever it is."""
    with pytest.raises(ConfigError, match="the plan"):
        Plan.from_text(text)


def test_two_counters_of_one_name_are_refused() -> None:
    """Nobody could tell which fired."""
    with pytest.raises(ConfigError, match="two faults are called 'error'"):
        Plan("x", (Fault("error"), Fault("error", ratio=0.5)))


def test_a_plan_reads_back_as_it_was() -> None:
    """Every key of a fault."""
    fault = Fault(
        "slow", name="n", at="tier", calls=("delete",), keys=("ab",), ratio=0.5, seed=3, index=1,
        every=2, after_s=1.0, for_s=2.0, at_most=4, seconds=5.0, errno="ESTALE",
    )  # fmt: skip
    plan = Plan("id", (fault, Fault("killed")))
    assert Plan.from_text(json.dumps(plan.to_json())) == plan
    assert len(fault.to_json()) == 14
