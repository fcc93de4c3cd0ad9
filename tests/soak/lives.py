"""The two engines of a soak: one lives through, the other is killed again and again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, EngineFailed, Nursery
from tests.engines.vllm.lab.storm import UNDER_WAY
from tests.soak.ledger import Ledger
from tests.soak.vitals import folder_bytes, now_s, vitals
from tests.soak.weather import Weather, rare_faults
from undercroft.testing.fault_control import FaultControl

__all__ = ["Setting", "resident", "victim"]

_ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 1024}
_ROUND = 40
_ACCOUNTS_EVERY = 10
_LIFE_S = (1.0, 12.0)
_MOVER_DIES_FIRST = 0.5
_CALM_S = 20.0
"""What came late under a fault has come by then."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both engines are given."""

    folder: Path
    """Of the disk tier, which both share."""
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]
    host_bytes: int
    disk_bytes: int
    ends_s: float
    """When the last round begins, by `vitals.now_s`."""
    seed: int
    lies: bool = False
    """Whether the resident's tier lies above its checksums, which must be found."""

    @property
    def over(self) -> bool:
        """No further round."""
        return now_s() >= self.ends_s

    def control(self, who: str) -> Path:
        """Of the faults of an engine's tier; outlives the tier's directory."""
        return self.folder.with_name(f"{who}.json")

    def engine(self, nursery: Nursery, who: str, *, mover_process: bool = False) -> Engine:
        """One more, on the shared disk.

        Its tier is `faulty`; or a process moves its chunks, which faults of files do not reach.
        """
        disk: dict[str, Any] = {"type": "disk", "path": str(self.folder)}
        disk |= {"capacity": self.disk_bytes, "free_space_floor": 0}
        tier = {"type": "faulty", "control": str(self.control(who)), "inner": disk}
        if mover_process:
            tier = disk | {"mover_process": True}
        offload = {**OFFLOADER, "host": self.host_bytes, "tiers": [tier]}
        return nursery.engine("llama", offload, **_ENGINE)

    def round(
        self,
        engine: Engine,
        dice: random.Random,
        ledger: Ledger,
        count: int = _ROUND,
        **odds: float,
    ) -> None:
        """Ask `count` prompts, some of them aborted, and compare every answer that comes."""
        order = dice.choices(range(len(self.prompts)), k=count)
        answers: list[dict[str, Any]] = engine.inside(
            "storm:storm",
            prompts=self.prompts,
            order=order,
            seed=dice.randrange(1 << 30),
            aborts=0.02,
            resets=0.02,
            timeout_s=200.0,
            **odds,
        )
        for answer in answers:
            index = answer["prompt"]
            ledger.compare(index, tuple(answer["tokens"]), self.expected[index])
        ledger.add(
            aborted=count - len(answers),
            reused_tokens=sum(answer["external_tokens"] for answer in answers),
        )


def resident(nursery: Nursery, setting: Setting, ledger: Ledger, quiet: threading.Lock) -> None:
    """One engine from beginning to end: faults while it is asked, and a look at it in between.

    Holds `quiet`, and so keeps the other engine from running, while books are compared.
    """
    dice = random.Random(f"resident {setting.seed}")
    weather = Weather(setting.control("resident"), setting.folder, setting.seed, lies=setting.lies)
    engine = setting.engine(nursery, "resident")
    num_rounds = 0
    while not setting.over:
        kind = weather.draw()
        weather.begin(kind)
        setting.round(engine, dice, ledger, wipes=0.001)
        weather.end()
        engine.settle()
        _look(engine, setting, ledger, kind, dice)
        num_rounds += 1
        if num_rounds % _ACCOUNTS_EVERY == 0:
            with quiet:
                engine.settle()
                _compare_books(engine, setting, ledger)
    with quiet:
        engine.settle()
        _compare_books(engine, setting, ledger)
    census = engine.inside("storm:census")
    ledger.totals = {
        f"{name} {what}": number
        for name in ("promoted", "cascaded", "evicted", "dropped", "declined", "misses")
        for what, number in census[name].items()
    }
    ledger.totals = {**ledger.totals, "loaded": census["loaded"]}
    ledger.add(resets=census["resets"])
    ledger.faults.update({f"resident: {kind}": n for kind, n in weather.num_fired.items()})
    engine.close()


def _look(engine: Engine, setting: Setting, ledger: Ledger, kind: str, dice: random.Random) -> None:
    ends_s = now_s() + _CALM_S
    while (still := _left(engine)) and now_s() < ends_s:
        time.sleep(0.5)
        setting.round(engine, dice, ledger, count=1)  # an engine without requests books nothing
        engine.settle()
    if still:
        ledger.fail(f"after a round in which {kind}: still there {still}")
    ledger.add(rounds=1)
    ledger.samples.append(vitals(engine.pid, now_s(), ledger.counts["answers"]))


def _left(engine: Engine) -> dict[str, int]:
    census = engine.inside("storm:census")
    names = (*UNDER_WAY, "is_off", "broken_invariants")
    return {name: census[name] for name in names if census[name]}


def _compare_books(engine: Engine, setting: Setting, ledger: Ledger) -> None:
    books = engine.inside("accounts:accounts")
    ledger.accounts.append((books["root_bytes"], folder_bytes(setting.folder / "undercroft-v1")))


def victim(nursery: Nursery, setting: Setting, ledger: Ledger, quiet: threading.Lock) -> None:
    """An engine that is killed while it is asked, and started again, until the soak is over."""
    dice = random.Random(f"victim {setting.seed}")
    control = FaultControl(setting.control("victim"))
    while not setting.over:
        with quiet:
            control.apply(*rare_faults(dice))
            _one_life(setting.engine(nursery, "victim"), setting, ledger, dice)
        with quiet:
            engine = setting.engine(nursery, "victim", mover_process=True)
            _one_life(engine, setting, ledger, dice, engine.inside("storm:mover_process")["pid"])
    ledger.faults.update({f"victim: {kind}": n for kind, n in control.fired().items()})


def _one_life(
    engine: Engine,
    setting: Setting,
    ledger: Ledger,
    dice: random.Random,
    mover: int | None = None,
) -> None:
    """Until it is killed; its `mover`, a process, half of the times in between, and with it."""
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        _kill(engine.pid)

    life_s = dice.uniform(*_LIFE_S)
    timers = [threading.Timer(life_s, kill)]
    if mover is not None and dice.random() < _MOVER_DIES_FIRST:
        timers.append(threading.Timer(life_s / 2, _kill, (mover,)))
        ledger.add(mover_kills=1)
    for timer in timers:
        timer.start()
    try:
        while True:
            setting.round(engine, dice, ledger)
    except EngineFailed:
        if not killed.is_set():
            raise
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
    engine.kill()
    ledger.add(kills=1)
    if mover is not None:
        _await_end(mover, ledger)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _await_end(mover: int, ledger: Ledger) -> None:
    ends_s = now_s() + _CALM_S
    while Path(f"/proc/{mover}/exe").exists():
        if now_s() > ends_s:
            ledger.fail(f"mover process {mover} outlives its engine")
            return
        time.sleep(0.05)


def guarded(function: Callable[[], None], ledger: Ledger) -> Callable[[], None]:
    """Whatever it raises is in the ledger."""

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the report says it
            ledger.fail(f"{type(error).__name__}: {error}")

    return run
