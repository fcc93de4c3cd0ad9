"""What goes wrong during a soak: rare faults all the time, one worse thing a round, and proof."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab import damage
from tests.engines.vllm.lab.storm import HUNG_CALLS
from undercroft.testing.fault_control import FaultControl
from undercroft.testing.fault_plan import FILES, TIER, Fault

__all__ = ["RARE", "Weather", "rare_faults"]

_ERRORS = ("EIO", "ENOSPC", "EROFS", "EACCES", "EMFILE", "ESTALE")
_READS = ("preadv",)
_WRITES = ("pwrite", "pwritev", "allocate", "fdatasync")
_ALL = (*_READS, *_WRITES, "open", "stat", "list", "rename", "lock")
_VERBS = ("read_into", "write_from", "delete")
# Chunks, and what is written of tables. Not `pread`: the epoch is read so ten times a second.
_FLIPPED = ("preadv", "pwrite", "pwritev")
_FLIPPED_RATIO = 0.05
_RARE_RATIO, _SLOW_RATIO, _SLOW_S = 0.01, 0.003, 3.0
RARE = ("rare errors", "rare flipped bits", "rare slow calls")
"""What is always there, but between rounds."""


def rare_faults(dice: random.Random, *, lies: bool = False) -> tuple[Fault, ...]:
    """One call of a hundred fails, one of a hundred is wrong by a bit, a few come late.

    Args:
        dice: Decide which.
        lies: Above the tier's checksums half of the reads give another chunk: must be found.
    """
    rare: dict[str, Any] = {"ratio": _RARE_RATIO}
    late: dict[str, Any] = {"ratio": _SLOW_RATIO, "seconds": _SLOW_S}
    errors, bits, slow = RARE
    faults = [
        Fault("error", name=errors, calls=_VERBS, seed=dice.randrange(1 << 30), **rare),
        Fault("flipped bit", name=bits, calls=_FLIPPED, seed=dice.randrange(1 << 30), **rare),
        Fault("slow", name=slow, calls=_VERBS, seed=dice.randrange(1 << 30), **late),
    ]
    if lies:
        faults.append(Fault("misdirected read", name="lies", at=TIER, ratio=0.5))
    return tuple(faults)


@dataclass(frozen=True, slots=True)
class _Kind:
    weight: float
    faults: Callable[[], Iterable[Fault]] = tuple
    harm: Callable[[], int] | None = None
    """Done from outside; how often it hit."""


class Weather:
    """Faults of the disk under one engine, whose tier is of type `faulty`.

    Args:
        control: The tier's control file.
        folder: That the engine's disk tier keeps.
        seed: Decides what comes when.
        more: Given to `rare_faults`.
    """

    def __init__(self, control: Path, folder: Path, seed: int, **more: Any) -> None:
        self._control = FaultControl(control)
        self._harmed: Counter[str] = Counter()
        self._folder = folder
        self._dice = random.Random(f"weather {seed}")
        self._more = more
        self._kinds = {
            "calm": _Kind(4),
            "reads fail": _Kind(2, lambda: self._fail("reads fail", _READS)),
            "writes fail": _Kind(2, lambda: self._fail("writes fail", _WRITES)),
            "every call fails": _Kind(1, lambda: self._fail("every call fails", _ALL)),
            "disk hangs": _Kind(
                1, lambda: [Fault("hang", name="disk hangs", at=FILES, calls=HUNG_CALLS)]
            ),
            "bits flip": _Kind(2, harm=self._flip),
            "records change places": _Kind(1, harm=self._swap),
            "directory deleted": _Kind(0.5, harm=self._delete),
        }

    @property
    def kinds(self) -> list[str]:
        """Everything that can go wrong in a round, the rare faults aside."""
        return [kind for kind in self._kinds if kind != "calm"]

    @property
    def num_fired(self) -> Counter[str]:
        """How often each fault really hit something."""
        return self._harmed + Counter(self._control.fired())

    def draw(self) -> str:
        """The name of what comes next."""
        kinds = list(self._kinds)
        return self._dice.choices(kinds, [self._kinds[kind].weight for kind in kinds])[0]

    def begin(self, kind: str) -> None:
        """Make it so, and rare faults beside it."""
        chosen = self._kinds[kind]
        self._control.apply(*rare_faults(self._dice, **self._more), *chosen.faults())
        if chosen.harm is not None:
            self._harmed[kind] += chosen.harm()

    def end(self) -> None:
        """All is well again; what is late still comes late."""
        self._control.clear()

    def _fail(self, name: str, calls: tuple[str, ...]) -> list[Fault]:
        error = self._dice.choice(_ERRORS)
        return [Fault("foreign error", name=name, calls=calls, errno=error)]

    def _flip(self) -> int:
        records = self._some_records()
        for record in records:
            at = damage.HEADER_BYTES + self._dice.randrange(record.payload_bytes)
            damage.flip_bit(record, at, self._dice.randrange(8))
        return len(records)

    def _swap(self) -> int:
        records = self._some_records()
        pairs = list(zip(records[::2], records[1::2], strict=False))
        same = [(one, other) for one, other in pairs if one.num_bytes == other.num_bytes]
        for one, other in same:
            damage.swap(one, other)
        return 2 * len(same)

    def _some_records(self) -> list[damage.Record]:
        try:
            found = damage.records(self._folder)
        except FileNotFoundError:  # a segment went while we looked
            return []
        return self._dice.sample(found, int(len(found) * _FLIPPED_RATIO))

    def _delete(self) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        return 1
