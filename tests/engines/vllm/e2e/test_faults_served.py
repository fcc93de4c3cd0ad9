"""`undercroft serve` under attack: hundreds of requests of several clients, all right, in time."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm.e2e.conftest import total
from tests.engines.vllm.e2e.test_faults import faulty
from tests.engines.vllm.lab.server import Server
from tests.engines.vllm.lab.traffic import FirstTokens, Heard, Talk, first_tokens, record, replay
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import Fault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLIENTS = 6
PAIRS = 40
FIRST_TOKEN_RATIO = 1.10
NOISE_RATIO = 1.15
"""What two cores that others use, too, may add to a ratio of medians."""
WRITE_DEADLINE_S = 30.0
MOST_STUCK = 16
AT_REST = (
    "pinned_chunks",
    "waiting_restores",
    "moving_chunks",
    "waiting_chunks",
    "running_transfers",
    "stuck_threads",
    "queued_write_bytes",
)


@dataclass(frozen=True)
class Phase:
    """What goes wrong while all is asked once more."""

    name: str
    faults: tuple[Fault, ...] = ()
    harm: Callable[[Path], None] | None = None
    """Done once, in the middle."""


PHASES = (
    Phase("nothing"),
    Phase(
        "1 % failed, 1 % wrong, 1 % 5 s late",
        (
            Fault("error", ratio=0.01, seed=1),
            Fault("flipped bit", ratio=0.01, seed=2),
            Fault("slow", ratio=0.01, seed=3, seconds=5),
        ),
    ),
    Phase("disk full", (Fault("full"),)),
    Phase("directory deleted", (Fault("vanished directory", every=150),), shutil.rmtree),
    Phase("hung for good", (Fault("hang"),)),
)


class Attack:
    """Two servers, one with a tier that goes wrong; and what is asked of them."""

    def __init__(self, ours: Server, plain: Server, control: FaultControl, disk: Path) -> None:
        self.ours, self.plain, self.control, self.disk = ours, plain, control, disk
        self.talks: list[Talk] = record(plain, seed=77, chats=24, turns=5, documents=90)
        self.report: list[str] = []

    def run(self, phase: Phase, seed: int) -> tuple[Heard, FirstTokens, dict[str, int]]:
        """Everything is asked once under these faults, and prompts that nobody sent before."""
        before = self.control.fired()
        self.control.apply(*phase.faults)
        if phase.harm is not None:
            harm = threading.Timer(3.0, phase.harm, (self.disk,))
            harm.start()
        began = time.monotonic()
        heard = replay(self.ours, self.talks, seed, clients=CLIENTS)
        wall_s = time.monotonic() - began
        backlog = self.rest(3.0)["waiting_chunks"]  # what is measured is not the end of the replay
        first = first_tokens(self.ours, self.plain, PAIRS, seed)
        fired = {
            f.label: self.control.fired()[f.label] - before.get(f.label, 0) for f in phase.faults
        }
        self.report.append(
            f"{phase.name:36} {heard.num_requests} requests in {wall_s:5.1f} s, {heard.num_wrong} "
            f"wrong, {heard.cached_tokens} tokens reused, slowest first token "
            f"{heard.slowest_first_s:.2f} s; of new prompts {1000 * first.ours_s:.1f} ms, without "
            f"offloading {1000 * first.plain_s:.1f} ms, {first.ratio:.2f}; {backlog:.0f} chunks "
            f"waited; {fired or ''}"
        )
        return heard, first, fired

    def step(self) -> dict[str, float]:
        """The metrics after a step of the engine."""
        self.ours.complete([1, 2, 3], max_tokens=2)
        return self.ours.metrics()

    def after_deadlines(self) -> tuple[float, float]:
        """Pinned chunks and stuck threads once no move that hangs is within its deadline."""
        ends = time.monotonic() + WRITE_DEADLINE_S + 15.0
        while True:
            metrics = self.step()
            pinned, stuck = total(metrics, "pinned_chunks"), total(metrics, "stuck_threads")
            if pinned <= stuck or time.monotonic() > ends:
                return pinned, stuck
            time.sleep(1.0)

    def rest(self, patience_s: float) -> dict[str, float]:
        """What is still under way after so long, or all 0."""
        ends = time.monotonic() + patience_s
        while True:
            metrics = self.step()
            left = {name: total(metrics, f"undercroft_{name}") for name in AT_REST}
            if not any(left.values()) or time.monotonic() > ends:
                return left
            time.sleep(0.3)


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    folder = tmp_path_factory.mktemp("attack")
    control = FaultControl(folder / "faults.json")
    tiers = [faulty(folder / "kv", control.path, capacity="128MiB")]
    words = ["--host", "4MiB", "--set", f"tiers={json.dumps(tiers)}"]
    with Server(folder, words) as ours, Server(folder, None) as plain:
        attack = Attack(ours, plain, control, folder / "kv")
        yield attack
        control.apply(Fault("hang"))
        replay(ours, attack.talks[:12], seed=99, clients=CLIENTS)
        began = time.monotonic()
        assert ours.stop() == 0, "it does not stop well while its tier hangs"
        assert time.monotonic() - began < 30
        assert plain.stop() == 0


def test_every_request_succeeds_and_is_right(
    attack: Attack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the tier does: the tokens of an engine without one, nothing left, no delay."""
    assert sum(map(len, attack.talks)) >= 200
    try:
        for seed, phase in enumerate(PHASES):
            heard, first, fired = attack.run(phase, seed)
            assert heard.num_wrong == 0, phase.name
            assert all(fired.values()), f"{phase.name}: {fired}"
            assert first.ratio < FIRST_TOKEN_RATIO * NOISE_RATIO, f"{phase.name}: {first}"
            if phase.name == "hung for good":
                pinned, stuck = attack.after_deadlines()
                assert pinned <= stuck <= MOST_STUCK
            attack.control.clear()
            left = attack.rest(20.0)
            assert not any(left.values()), f"{phase.name}: {left}"
        attack.ours.reset(connector=True)
        metrics = attack.step()
        assert total(metrics, "resident_bytes", "host") == 0, "a slot stays filling"
        for name in ("tier_bugs", "broken_invariants"):
            assert total(metrics, f"undercroft_{name}_total") == 0
        assert "Traceback" not in attack.ours.log_text()
    finally:
        with capsys.disabled():
            print("\n" + "\n".join(attack.report))
