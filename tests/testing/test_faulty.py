"""Tier type `faulty`: what its control file says goes wrong, below the tier's own checks too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from undercroft.clock import SystemClock
from undercroft.engines.assemble import make_tier
from undercroft.errors import KvError
from undercroft.keys import Namespace
from undercroft.settings import load
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import Fault
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.base import Bounded, Epochal, Following, Indexed

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

    def open(self) -> Any:
        self.tier = make_tier(
            self.settings,
            namespace=Namespace({"model": "m"}),
            clock=SystemClock(),
            num_replicas=1,
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
