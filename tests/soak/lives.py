"""The two engines of a soak: one lives through, the other is killed again and again."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.engine import OFFLOADER, Engine, EngineFailed, Nursery
from tests.engines.vllm.lab.storm import UNDER_WAY
from tests.soak.ledger import Ledger
from tests.soak.vitals import folder_bytes, now_s, vitals
from tests.soak.weather import Weather

__all__ = ["Setting", "resident", "victim"]

_ENGINE = {"max_model_len": 1024, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 1024}
_ROUND = 40
_ACCOUNTS_EVERY = 10
_LIFE_S = (1.0, 12.0)


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

    @property
    def over(self) -> bool:
        """No further round."""
        return now_s() >= self.ends_s

    def engine(self, nursery: Nursery) -> Engine:
        """One more, on the shared disk."""
        tier = {"type": "disk", "path": str(self.folder), "capacity": self.disk_bytes}
        tier["free_space_floor"] = 0
        offload = {**OFFLOADER, "host": self.host_bytes, "tiers": [tier]}
        return nursery.engine("llama", offload, **_ENGINE)

    def round(self, engine: Engine, dice: random.Random, ledger: Ledger, **odds: float) -> None:
        """Ask `_ROUND` prompts, some of them aborted, and compare every answer that comes."""
        order = dice.choices(range(len(self.prompts)), k=_ROUND)
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
            aborted=_ROUND - len(answers),
            reused_tokens=sum(answer["external_tokens"] for answer in answers),
        )


def resident(
    nursery: Nursery, setting: Setting, ledger: Ledger, weather: Weather, quiet: threading.Lock
) -> None:
    """One engine from beginning to end: faults while it is asked, and a look at it in between.

    Holds `quiet`, and so keeps the other engine from running, while books are compared.
    """
    dice = random.Random(f"resident {setting.seed}")
    engine = setting.engine(nursery)
    num_rounds = 0
    while not setting.over:
        kind = weather.draw()
        weather.begin(kind, engine)
        setting.round(engine, dice, ledger, wipes=0.001)
        weather.end(kind, engine)
        engine.settle()
        _look(engine, setting, ledger, kind)
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
    ledger.faults.update(weather.num_fired)
    engine.close()


def _look(engine: Engine, setting: Setting, ledger: Ledger, kind: str) -> None:
    census = engine.inside("storm:census")
    left = {name: census[name] for name in (*UNDER_WAY, "is_off", "broken_invariants")}
    if any(left.values()):
        still = {name: value for name, value in left.items() if value}
        ledger.fail(f"after a round in which {kind}: still there {still}")
    ledger.add(rounds=1)
    ledger.samples.append(vitals(engine.pid, now_s(), ledger.counts["answers"]))


def _compare_books(engine: Engine, setting: Setting, ledger: Ledger) -> None:
    books = engine.inside("accounts:accounts")
    ledger.accounts.append((books["root_bytes"], folder_bytes(setting.folder / "undercroft-v1")))


def victim(nursery: Nursery, setting: Setting, ledger: Ledger, quiet: threading.Lock) -> None:
    """An engine that is killed while it is asked, and started again, until the soak is over."""
    dice = random.Random(f"victim {setting.seed}")
    while not setting.over:
        with quiet:
            _one_life(setting.engine(nursery), setting, ledger, dice)


def _one_life(engine: Engine, setting: Setting, ledger: Ledger, dice: random.Random) -> None:
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        with suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)

    timer = threading.Timer(dice.uniform(*_LIFE_S), kill)
    timer.start()
    try:
        while True:
            setting.round(engine, dice, ledger)
    except EngineFailed:
        if not killed.is_set():
            raise
    finally:
        timer.cancel()
        timer.join()
    engine.kill()
    ledger.add(kills=1)


def guarded(function: Callable[[], None], ledger: Ledger) -> Callable[[], None]:
    """Whatever it raises is in the ledger."""

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the report says it
            ledger.fail(f"{type(error).__name__}: {error}")

    return run
