"""What goes wrong, written down: the control file of tier type `faulty`, and what it answers.

The control file is JSON: `{"version": 1, "plan": "...", "faults": [{...}, ...]}`. Each fault has
the keys of `Fault`. See docs/how-to/break-it.md.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from undercroft.clock import Clock
from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.testing.faulty_files import CALLS, FILE_CALLS
from undercroft.testing.injectors import (
    ANY_VERB,
    TIER_VERBS,
    Effect,
    Injector,
    When,
    always,
    both,
    every,
    on_index,
    randomly,
    while_between,
)

__all__ = ["FILES", "TIER", "VERSION", "Fault", "Plan", "began", "stamp_of"]

VERSION = 1
TIER, FILES = "tier", "files"
_SILENT = frozenset(
    {
        Effect.SHORT_READ,
        Effect.FLIPPED_BIT,
        Effect.TORN_WRITE,
        Effect.LOST_WRITE,
        Effect.MISDIRECTED_WRITE,
        Effect.MISDIRECTED_READ,
    }
)
_BELOW = _SILENT | {Effect.FULL, Effect.READ_ONLY, Effect.PERMISSION, Effect.FOREIGN}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, as it is written in a plan.

    Args:
        effect: What goes wrong: the value of an `Effect`.
        name: What its counter is called; unique in a plan. Default: the effect.
        at: `tier`: the verbs of the tier; `files`: the system calls below a tier that makes them
            through `undercroft.tiers.disk.files.Files`, as `disk` does. Default: `files` for
            effects that the tier itself has to notice, else `tier`.
        calls: Only these verbs (`contains`, `read_into`, `write_from`, `delete`), or methods of
            `Files`. Default: all that the effect can hit.
        keys: Only chunks whose keys begin so, in hexadecimal; at the tier only.
        ratio: This share of the calls, chosen by `seed`.
        seed: Chooses.
        index: Only the call with this index among those that it could hit, from 0.
        every: Each so-many-th of them.
        after_s: From so long after the plan was taken.
        for_s: For so long.
        at_most: So often, and then no more.
        seconds: How long `slow` takes.
        errno: The error of `foreign error`: a name such as `EIO`, or a number.
    """

    effect: str
    name: str | None = None
    at: str | None = None
    calls: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    ratio: float | None = None
    seed: int = 0
    index: int | None = None
    every: int | None = None
    after_s: float = 0.0
    for_s: float | None = None
    at_most: int | None = None
    seconds: float = 1.0
    errno: str | int = "EIO"

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: The message names the key.
        """
        effects = [effect.value for effect in Effect]
        if self.effect not in effects:
            raise _wrong("effect", self.effect, f"one of {', '.join(effects)}")
        if self.at not in {None, TIER, FILES}:
            raise _wrong("at", self.at, f"{TIER} or {FILES}")
        self._check_numbers()
        known = ANY_VERB if self.seam == TIER else CALLS
        for call in self.calls or ():
            if call not in known:
                raise _wrong(f"calls at {self.seam}", call, f"one of {', '.join(known)}")
        if self.keys is not None and self.seam != TIER:
            raise _wrong("keys", list(self.keys), f"left out at {FILES}, where calls have no key")
        for key in self.keys or ():
            if any(digit not in "0123456789abcdef" for digit in key):
                raise _wrong("keys", key, "lower-case hexadecimal digits")
        if self.number is None:
            raise _wrong("errno", self.errno, 'a name such as "EIO", or a number')

    def _check_numbers(self) -> None:
        for name, (kind, least) in _NUMBERS.items():
            value = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= least):
                raise _wrong(name, value, f"a {'' if kind is _ANY else 'whole '}number >= {least}")

    @property
    def kind(self) -> Effect:
        """The effect."""
        return Effect(self.effect)

    @property
    def label(self) -> str:
        """What its counter is called."""
        return self.name or self.effect

    @property
    def seam(self) -> str:
        """`TIER` or `FILES`."""
        return self.at or (FILES if self.kind in _BELOW else TIER)

    @property
    def number(self) -> int | None:
        """The errno as a number."""
        if isinstance(self.errno, int):
            return self.errno
        found = getattr(errno, self.errno, None)
        return found if isinstance(found, int) else None

    @property
    def lies(self) -> bool:
        """Whether it makes a tier give wrong bytes as right ones, above its checksum."""
        return self.seam == TIER and self.kind in _SILENT

    def injector(self, clock: Clock) -> Injector:
        """It, beginning now."""
        seam_calls = TIER_VERBS if self.seam == TIER else FILE_CALLS
        able = seam_calls.get(self.kind, ANY_VERB if self.seam == TIER else CALLS)
        verbs = able if self.calls is None else tuple(c for c in self.calls if c in able)
        return Injector(
            self.kind,
            self._when(clock),
            seconds=self.seconds,
            number=self.number or errno.EIO,
            verbs=verbs,
            at_most=self.at_most,
        )

    def _when(self, clock: Clock) -> When:
        when: When = always
        if self.after_s or self.for_s is not None:
            until_s = float("inf") if self.for_s is None else self.after_s + self.for_s
            when = both(when, while_between(clock, self.after_s, until_s))
        if self.keys is not None:
            when = both(when, _on_prefix(self.keys))
        if self.index is not None:
            when = both(when, on_index(self.index))
        if self.every is not None:
            when = both(when, every(self.every))
        if self.ratio is not None:
            when = both(when, randomly(self.ratio, seed=self.seed))
        return when

    def to_json(self) -> dict[str, Any]:
        """As it is written; what is as by default is left out."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def from_json(cls, written: object) -> Fault:
        """As it was written.

        Raises:
            ConfigError: It is no fault; the message names the key.
        """
        if not isinstance(written, Mapping):
            raise ConfigError(f"a fault is {written!r}, but must be an object")
        known = {field.name for field in fields(cls)}
        for key in written:
            if key not in known:
                raise ConfigError(f"a fault has an unknown key {key!r}; valid are {_list(known)}")
        if "effect" not in written:
            raise ConfigError(f"a fault lacks effect: {dict(written)!r}")
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in written.items()
        }
        for key in ("effect", "name", "at"):
            if not isinstance(values.get(key), str | None):
                raise _wrong(key, values[key], "text")
        for key in ("calls", "keys"):
            parts = values.get(key, ())
            if not isinstance(parts, tuple) or not all(isinstance(part, str) for part in parts):
                raise _wrong(key, values[key], "a list of text")
        return cls(**values)


_WHOLE, _ANY = (int,), (int, float)
_NUMBERS: Mapping[str, tuple[tuple[type, ...], int]] = {
    "ratio": (_ANY, 0),
    "seed": (_WHOLE, 0),
    "index": (_WHOLE, 0),
    "every": (_WHOLE, 1),
    "after_s": (_ANY, 0),
    "for_s": (_ANY, 0),
    "at_most": (_WHOLE, 0),
    "seconds": (_ANY, 0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a control file says.

    Args:
        id: Which plan this is, as whoever wrote it calls it.
        faults: What goes wrong; the first that chooses a call has it.
    """

    id: str
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Refuse counters of one name.

        Raises:
            ConfigError: Two faults have it.
        """
        labels = [fault.label for fault in self.faults]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"two faults are called {label!r}; give them different names")

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        faults = [fault.to_json() for fault in self.faults]
        return {"version": VERSION, "plan": self.id, "faults": faults}

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """As it was written.

        Raises:
            ConfigError: It is no plan.
        """
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"the plan is no JSON: {exc}") from exc
        if not isinstance(written, dict) or not isinstance(written.get("faults"), list):
            raise ConfigError('the plan must be an object with a list "faults"')
        if unknown := written.keys() - {"version", "plan", "faults"}:
            raise ConfigError(f"the plan has unknown keys: {_list(unknown)}")
        if written.get("version", VERSION) != VERSION:
            raise ConfigError(f"the plan is of version {written['version']!r}, not {VERSION}")
        faults = tuple(Fault.from_json(fault) for fault in written["faults"])
        return cls(str(written.get("plan", "")), faults)


def began(pid: int) -> str | None:
    """When that process began, so that another of the same number is told apart; None: it ended."""
    try:
        text = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


def stamp_of(path: Path) -> str | None:
    """Which writing of the file this is; None: it cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return f"{found.st_mtime_ns} {found.st_ino} {found.st_size}"


def _on_prefix(prefixes: tuple[str, ...]) -> When:
    return lambda call: ChunkKey(call.key).hex().startswith(prefixes)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _wrong(key: str, value: object, must: str) -> ConfigError:
    return ConfigError(f"{key} of a fault is {value!r}, but must be {must}")
