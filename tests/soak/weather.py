"""What goes wrong during a soak: one thing a round, drawn at random, and proof that it did."""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.engines.vllm.lab import damage
from tests.engines.vllm.lab.engine import Engine

__all__ = ["Weather"]

_ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ESTALE)
_READS = ("preadv",)
_WRITES = ("pwrite", "pwritev", "allocate", "fdatasync")
_ALL = (*_READS, *_WRITES, "open", "stat", "list", "rename", "lock")
_FLIPPED_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class _Kind:
    weight: float
    begin: Callable[[Engine], None]
    end: Callable[[Engine], None]


class Weather:
    """Faults of the disk under one engine.

    Args:
        folder: That the engine's disk tier keeps.
        seed: Decides what comes when.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.num_fired: Counter[str] = Counter()
        """How often each fault really hit something."""
        self._folder = folder
        self._dice = random.Random(f"weather {seed}")
        self._kinds = {
            "calm": _Kind(4, _nothing, _nothing),
            "reads fail": _Kind(2, self._fail(_READS), self._heal("reads fail")),
            "writes fail": _Kind(2, self._fail(_WRITES), self._heal("writes fail")),
            "every call fails": _Kind(1, self._fail(_ALL), self._heal("every call fails")),
            "disk hangs": _Kind(1, _hang, self._release),
            "bits flip": _Kind(2, self._flip, _nothing),
            "records change places": _Kind(1, self._swap, _nothing),
            "directory deleted": _Kind(0.5, self._delete, _nothing),
        }

    @property
    def kinds(self) -> list[str]:
        """Everything that can go wrong."""
        return [kind for kind in self._kinds if kind != "calm"]

    def draw(self) -> str:
        """The name of what comes next."""
        kinds = list(self._kinds)
        return self._dice.choices(kinds, [self._kinds[kind].weight for kind in kinds])[0]

    def begin(self, kind: str, engine: Engine) -> None:
        """Make it so."""
        self._kinds[kind].begin(engine)

    def end(self, kind: str, engine: Engine) -> None:
        """All is well again."""
        self._kinds[kind].end(engine)

    def _fail(self, calls: tuple[str, ...]) -> Callable[[Engine], None]:
        def begin(engine: Engine) -> None:
            error = self._dice.choice(_ERRORS)
            engine.inside("storm:fail_disk", error=error, calls=list(calls))

        return begin

    def _heal(self, kind: str) -> Callable[[Engine], None]:
        def end(engine: Engine) -> None:
            self.num_fired[kind] += engine.inside("storm:fail_disk", error=0, calls=[])

        return end

    def _release(self, engine: Engine) -> None:
        hung = engine.inside("storm:census")
        self.num_fired["disk hangs"] += int(hung["cascade"] + hung["restores"] + hung["waiting"])
        engine.inside("storm:hang_disk", on=False)

    def _flip(self, _engine: Engine) -> None:
        records = self._some_records()
        for record in records:
            at = damage.HEADER_BYTES + self._dice.randrange(record.payload_bytes)
            damage.flip_bit(record, at, self._dice.randrange(8))
        self.num_fired["bits flip"] += len(records)

    def _swap(self, _engine: Engine) -> None:
        records = self._some_records()
        for one, other in zip(records[::2], records[1::2], strict=False):
            if one.num_bytes == other.num_bytes:
                damage.swap(one, other)
                self.num_fired["records change places"] += 2

    def _some_records(self) -> list[damage.Record]:
        try:
            found = damage.records(self._folder)
        except FileNotFoundError:  # a segment went while we looked
            return []
        return self._dice.sample(found, int(len(found) * _FLIPPED_RATIO))

    def _delete(self, _engine: Engine) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self.num_fired["directory deleted"] += 1


def _nothing(_engine: Engine) -> None:
    """As it should be."""


def _hang(engine: Engine) -> None:
    engine.inside("storm:hang_disk", on=True)
