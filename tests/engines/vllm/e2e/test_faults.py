"""A real engine whose tier goes wrong on purpose, as a file says that changes while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.e2e.conftest import Plain
from tests.engines.vllm.e2e.test_storm import Weather
from tests.engines.vllm.lab.engine import Nursery
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import Fault


def faulty(disk: Path, control: Path, **more: Any) -> dict[str, Any]:
    """An entry of `tiers`."""
    inner = {"type": "disk", "path": str(disk), "capacity": "16MiB", "free_space_floor": "0"}
    return {"type": "faulty", "control": str(control), "inner": {**inner, **more}}


class Attacked:
    """An engine under a storm, and who attacks it."""

    def __init__(self, nursery: Nursery, plain: Plain, folder: Path) -> None:
        self.control = FaultControl(folder / "faults.json")
        tiers = [faulty(folder / "kv", self.control.path)]
        self.weather = Weather(nursery, plain, folder / "kv", tiers=tiers)

    def under(self, *faults: Fault, count: int = 40, seed: int = 0) -> dict[str, int]:
        """A storm under these faults, every answer right; how often each fired in it."""
        before = self.control.fired()
        self.control.apply(*faults)
        self.weather.storm(count, seed)
        return {f.label: self.control.fired()[f.label] - before.get(f.label, 0) for f in faults}

    def calm_down(self) -> None:
        """All faults end, and what was delayed; what is left is nothing."""
        self.control.clear()
        ends = time.monotonic() + 20
        # A write that is late has a pin, a read that is late drains.
        while self._is_held() and time.monotonic() < ends:
            time.sleep(0.5)
            self.weather.storm(1, 0)  # it rests while it has nothing else to do
        self.weather.assert_calm()
        assert self.control.num_hung() == 0

    def _is_held(self) -> bool:
        census = self.weather.engine.inside("storm:census")
        return bool(census["pins"] or census["draining"])


@pytest.fixture(scope="module")
def attacked(
    nursery: Nursery, plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    attacked = Attacked(nursery, plain, tmp_path_factory.mktemp("attacked"))
    yield attacked
    attacked.control.clear()
    attacked.weather.engine.close()


RARE = (
    Fault("error", every=40, calls=("read_into", "write_from")),
    Fault("flipped bit", every=45, calls=("preadv", "pwritev")),
    Fault("slow", every=60, seconds=5),
)


def test_errors_wrong_bytes_and_delays(attacked: Attacked) -> None:
    """A few of a hundred operations fail, lie or come too late: no answer is wrong."""
    fired = attacked.under(*RARE, count=60)
    assert min(fired.values()) > 0, fired
    attacked.calm_down()
    assert attacked.weather.storm(30, 1) > 0


def test_a_full_disk_and_a_vanished_directory(attacked: Attacked) -> None:
    """Requests go on; with room and a directory again, the disk is used again."""
    assert attacked.under(Fault("full"), seed=2)["full"] > 0
    attacked.calm_down()
    assert attacked.under(Fault("vanished directory", index=3), seed=3)["vanished directory"] == 1
    attacked.calm_down()
    attacked.weather.storm(30, 4)
    assert attacked.weather.storm(30, 5) > 0


def test_a_tier_that_hangs_for_good(attacked: Attacked) -> None:
    """Requests go on. What a thread is in stays where it is, and nothing else; then all is calm."""
    assert attacked.under(Fault("hang"), seed=6)["hang"] > 0
    hung = attacked.control.num_hung()
    left = attacked.weather.engine.inside("storm:census")
    assert 0 < left["filling"] + left["draining"] + left["pins"] <= hung <= 16
    attacked.calm_down()


def test_a_tier_that_lies_is_noticed_here(attacked: Attacked) -> None:
    """The control: above all checksums, the same storm does find a wrong answer."""
    attacked.weather.storm(30, 7)
    lies = Fault("misdirected read", at="tier")
    with pytest.raises(AssertionError):
        attacked.under(lies, seed=8, count=120)
    attacked.control.clear()
    assert attacked.control.fired()["misdirected read"] > 0
    attacked.weather.engine.reset(connector=True)
    attacked.weather.storm(30, 12)
