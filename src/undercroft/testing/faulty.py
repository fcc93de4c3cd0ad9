"""Tier type `faulty`: any tier, gone wrong as a file says that may change while the engine runs.

Settings write it round the tier's own entry:
`{"type": "faulty", "control": "/tmp/faults.json", "inner": {"type": "disk", ...}}`.
The control file is that of `undercroft.testing.fault_plan`; it is looked at 20 times a second, on a
thread of its own. What fired is written beside it, into a file for each tier of each process; see
`undercroft.testing.fault_control`, which writes the one and reads the others.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from undercroft.clock import Clock
from undercroft.errors import ConfigError
from undercroft.testing.fault_plan import FILES, TIER, VERSION, Fault, Plan, began, stamp_of
from undercroft.testing.faults import FaultyTier
from undercroft.testing.faulty_files import FaultyFiles
from undercroft.testing.injectors import Effect, Faults, Injector
from undercroft.tiers.base import Described, Tier
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.names import ROOT_NAME

__all__ = ["ControlledTier", "Watch", "make"]

_LOG = logging.getLogger(__name__)
_PERIOD_S = 0.05
_CLOSE_S = 1.0


def make(
    build: Callable[[Files | None], Tier],
    *,
    control: str,
    name: str,
    clock: Clock,
    path: str | None,
    takes_files: bool,
) -> ControlledTier:
    """Open a tier so that it goes wrong as `control` says, from the first call on.

    Args:
        build: Makes the tier, with these system calls if it takes such.
        control: The control file; need not be there yet.
        name: The tier's.
        clock: Time.
        path: The tier's directory, if it has one, for `Effect.VANISHED`.
        takes_files: Whether it does; else faults of files are refused.

    Raises:
        ConfigError: The directory of `control` is not there, or cannot be written to.
    """
    watch = Watch(Path(control).expanduser(), name, clock, path, takes_files=takes_files)
    _LOG.warning(
        "tier %s goes wrong on purpose, as %s says (type faulty in its settings); never run it so "
        "for users",
        name,
        watch.control,
    )
    try:
        return ControlledTier(build(watch.files if takes_files else None), watch)
    except BaseException:
        watch.close()
        raise


class ControlledTier(FaultyTier):
    """See `FaultyTier`; its injectors are those of the control file.

    Args:
        inner: A tier that works.
        watch: Of the control file; closed with this one.
    """

    def __init__(self, inner: Tier, watch: Watch) -> None:
        super().__init__(inner, faults=watch.at[TIER])
        self._watch = watch
        self.on_close = watch.close

    def describe(self) -> str:
        """See `Described.describe`."""
        said = f"{self.inner.describe()}, " if isinstance(self.inner, Described) else ""
        return f"{said}going wrong on purpose as {self._watch.control} says"


class Watch:
    """Takes plans from a control file, and writes what fired beside it.

    Args:
        control: The file; while it is missing nothing goes wrong.
        tier: The tier's name.
        clock: For faults that wait.
        path: The tier's directory, if it has one.
        takes_files: Whether the tier makes its system calls through `files`.

    Attributes:
        at: What goes wrong at `TIER` and at `FILES`.
        files: System calls that go wrong.

    Threads: any; one of its own.
    """

    def __init__(
        self, control: Path, tier: str, clock: Clock, path: str | None, *, takes_files: bool
    ) -> None:
        if not control.parent.is_dir():
            raise ConfigError(
                f"control of tier {tier} is {control}, but there is no directory {control.parent}",
                tier=tier,
            )
        self.control = control
        self._tier = tier
        self._clock = clock
        self._root = Path(path, ROOT_NAME) if path is not None else None
        self._status = control.with_name(f"{control.name}.{os.getpid()}.{os.urandom(4).hex()}")
        self.at = {
            seam: Faults(
                clock=clock, seed=seed, vanish=self._vanish, before_kill=self._tell_before_the_end
            )
            for seed, seam in enumerate((TIER, FILES))
        }
        self.files = FaultyFiles(self.at[FILES])
        told = (str(control.absolute()), tier, path or "")
        self.files.mover = ("undercroft.testing.faulty_mover", *told)
        self._takes_files = takes_files
        self._stamp: str | None = None
        self._plan = Plan("")
        self._error: str | None = None
        self._injectors: dict[Fault, Injector] = {}
        self._earlier: dict[str, int] = {}
        self._written: dict[str, Any] | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()
        try:
            self.look()
        except OSError as exc:
            raise ConfigError(
                f"control of tier {tier} is {control}, and what fired cannot be written beside it: "
                f"{exc}",
                tier=tier,
            ) from exc
        self._thread = threading.Thread(
            target=self._run, name=f"undercroft-{tier}-faults", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """Take the plan, if it is a new one, and write what fired, if that changed."""
        with self._lock:
            stamp = stamp_of(self.control)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()
            self._write_status()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                self.look()
            except OSError as exc:
                _LOG.warning("tier %s cannot follow %s: %s", self._tier, self.control, exc)
                self._stop.wait(1.0)

    def close(self) -> None:
        """End; what fired is written for the last time. Twice is fine."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        self._write_status(closed=True)

    # --- plans ----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            plan = Plan.from_text(self.control.read_text(encoding="utf-8"))
            self._check(plan)
        except FileNotFoundError:
            plan = Plan("")
        except (ConfigError, OSError, UnicodeDecodeError) as exc:
            self._error = str(exc)
            _LOG.warning("tier %s keeps its faults: %s: %s", self._tier, self.control, exc)
            return
        self._error = None
        self._take(plan)

    def _check(self, plan: Plan) -> None:
        for fault in plan.faults:
            if fault.seam == FILES and not self._takes_files:
                raise ConfigError(
                    f"{fault.label!r} is at {FILES}, but tier {self._tier} makes no system calls "
                    f'that could be made to fail; say "at": "{TIER}"'
                )
            if fault.kind is Effect.VANISHED and self._root is None:
                raise ConfigError(f"{fault.label!r}: tier {self._tier} has no directory")

    def _take(self, plan: Plan) -> None:
        """Faults that stay as they are go on; those that are gone end, and let go what hangs."""
        kept = {
            fault: self._injectors.pop(fault) for fault in plan.faults if fault in self._injectors
        }
        fresh = {f: f.injector(self._clock) for f in plan.faults if f not in kept}
        now = {fault: kept.get(fault) or fresh[fault] for fault in plan.faults}
        for seam, faults in self.at.items():
            faults.injectors = tuple(i for f, i in now.items() if f.seam == seam)
        for fault, injector in self._injectors.items():
            injector.active = False
            self._earlier[fault.label] = self._earlier.get(fault.label, 0) + injector.num_fired
        for fault in fresh:
            _LOG.warning(
                "tier %s goes wrong on purpose from now on: %s%s",
                self._tier,
                json.dumps(fault.to_json()),
                ", above its checksums: the engine gets wrong bytes" if fault.lies else "",
            )
        if self._plan.faults and not now:
            _LOG.warning("tier %s goes wrong no more", self._tier)
        self._injectors, self._plan = now, plan

    def _vanish(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _tell_before_the_end(self) -> None:
        with suppress(OSError):
            self._write_status()

    # --- what fired -----------------------------------------------------------------------------

    def _write_status(self, *, closed: bool = False) -> None:
        with self._lock:
            fired = dict(self._earlier)
            for fault, injector in self._injectors.items():
                fired[fault.label] = fired.get(fault.label, 0) + injector.num_fired
            status = {
                "version": VERSION,
                "pid": os.getpid(),
                "began": began(os.getpid()),
                "tier": self._tier,
                "plan": self._plan.id,
                "seen": self._stamp,
                "error": self._error,
                "fired": fired,
                "num_hung": sum(faults.num_hung for faults in self.at.values()),
                "closed": closed,
            }
            if status == self._written:
                return
            self._written = status
            draft = self._status.with_name(f"{self._status.name}.draft")
            draft.write_text(json.dumps(status), encoding="utf-8")
            draft.replace(self._status)
