"""Attack a running engine: write what goes wrong, wait until it does, read how often it did.

::

    control = FaultControl("/tmp/faults.json")
    control.apply(Fault("error", ratio=0.01), Fault("hang", calls=("read_into",), after_s=10))
    ...
    assert control.fired()["error"] > 0
    control.clear()
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from undercroft.clock import Clock, SystemClock
from undercroft.testing.fault_plan import Fault, Plan, began, stamp_of

__all__ = ["FaultControl", "Status"]

_PERIOD_S = 0.02
_HEX = "[0-9a-f]" * 8


@dataclass(frozen=True, slots=True)
class Status:
    """What one tier of one process says of its faults.

    Args:
        pid: The process.
        began: When it began, as `fault_plan.began` says.
        tier: The tier's name.
        plan: The plan that it has taken.
        seen: Which writing of the control file it has looked at, as `stamp_of` calls it.
        error: Why it did not take that, if it did not.
        fired: How often each fault fired in this process, by name, earlier plans included.
        num_hung: Calls that hang now.
        closed: Whether the tier is closed.
    """

    pid: int
    began: str
    tier: str
    plan: str
    seen: str | None
    error: str | None
    fired: dict[str, int]
    num_hung: int
    closed: bool

    @property
    def is_live(self) -> bool:
        """Whether it still follows the control file."""
        return not self.closed and began(self.pid) == self.began


_FIELDS = fields(Status)


class FaultControl:
    """Writes the control file of tiers of type `faulty`, and reads what they write beside it.

    Args:
        path: The control file, as the settings name it.
        clock: For waiting.
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.path = Path(path).expanduser()
        self._clock = clock or SystemClock()

    def apply(self, *faults: Fault, wait_s: float = 10.0) -> None:
        """Let these faults begin and all others end, in every live tier that follows the file.

        A fault that was there before, and is equal, goes on as it is.

        Args:
            faults: The first that chooses a call has it.
            wait_s: How long the tiers may take. Those that start later follow from their start.

        Raises:
            ConfigError: Two faults have one name.
            RuntimeError: A tier refused the plan.
            TimeoutError: A tier did not take it.
        """
        plan = Plan(os.urandom(8).hex(), faults)
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_text(json.dumps(plan.to_json(), indent=1), encoding="utf-8")
        draft.replace(self.path)
        stamp = stamp_of(self.path)
        ends_s = self._clock.now_s() + wait_s
        while late := [s for s in self.statuses() if s.is_live and s.plan != plan.id]:
            looked = [s for s in late if s.error and s.seen == stamp]
            if refused := [f"{s.tier}: {s.error}" for s in looked]:
                raise RuntimeError(f"the faults were refused: {'; '.join(refused)}")
            if self._clock.now_s() > ends_s:
                raise TimeoutError(f"{late} did not take the faults within {wait_s} s")
            self._clock.sleep(_PERIOD_S)

    def clear(self, *, wait_s: float = 10.0) -> None:
        """Let every fault end, and what hangs go on."""
        self.apply(wait_s=wait_s)

    def statuses(self) -> list[Status]:
        """What each tier said last, those of ended processes included."""
        found = []
        for path in sorted(self.path.parent.glob(f"{self.path.name}.*.{_HEX}")):
            with suppress(FileNotFoundError, ValueError):
                written = json.loads(path.read_text(encoding="utf-8"))
                found.append(Status(**{field.name: written[field.name] for field in _FIELDS}))
        return found

    def fired(self) -> dict[str, int]:
        """How often each fault has fired, by name, in all processes and under all plans.

        As it was 50 ms ago; `apply` and `clear` bring it up to date.
        """
        total: Counter[str] = Counter()
        for status in self.statuses():
            total.update(status.fired)
        return dict(total)

    def num_hung(self) -> int:
        """Calls that hang, in live processes; as it was 50 ms ago."""
        return sum(status.num_hung for status in self.statuses() if status.is_live)
