"""What `doctor` finds: one line each, worst last in importance, the same for people and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from undercroft.cli.output import Output, Style

__all__ = ["Finding", "Severity", "error", "fine", "note", "problems", "show", "warning", "worst"]


class Severity(Enum):
    """How bad a finding is; by value, worse is greater."""

    FINE = 0
    """Checked, and right."""
    NOTE = 1
    """Worth knowing; nothing was checked, or nothing is to be done."""
    WARNING = 2
    """It will run, and probably not as it is meant."""
    ERROR = 3
    """It will not run, or keep nothing."""

    @property
    def word(self) -> str:
        """As printed, and in JSON."""
        return {0: "ok", 1: "note", 2: "warning", 3: "error"}[self.value]


_STYLES: Mapping[Severity, tuple[Style, ...]] = {
    Severity.FINE: ("green",),
    Severity.NOTE: ("dim",),
    Severity.WARNING: ("yellow",),
    Severity.ERROR: ("red", "bold"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: What was looked at: `memory`, `disk`, `engine`, ...
        severity: How bad it is.
        message: One line: what, where, and what to do about it.
        facts: The numbers in it, for programs; names end in their unit.
    """

    check: str
    severity: Severity
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "check": self.check,
            "severity": self.severity.word,
            "message": self.message,
            "facts": dict(self.facts),
        }


def fine(check: str, message: str, **facts: object) -> Finding:
    """Checked, and right."""
    return Finding(check, Severity.FINE, message, facts)


def note(check: str, message: str, **facts: object) -> Finding:
    """Worth knowing."""
    return Finding(check, Severity.NOTE, message, facts)


def warning(check: str, message: str, **facts: object) -> Finding:
    """Probably not meant."""
    return Finding(check, Severity.WARNING, message, facts)


def error(check: str, message: str | Exception, **facts: object) -> Finding:
    """It cannot work."""
    return Finding(check, Severity.ERROR, " ".join(str(message).split()), facts)


def worst(findings: Iterable[Finding]) -> Severity:
    """The worst severity; `FINE` of none."""
    return max((f.severity for f in findings), key=lambda s: s.value, default=Severity.FINE)


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Warnings and errors."""
    return [f for f in findings if f.severity.value >= Severity.WARNING.value]


def show(output: Output, findings: Sequence[Finding]) -> None:
    """One line each, for people: how bad, what was looked at, what was found."""
    width = max((len(f.check) for f in findings), default=0)
    for finding in findings:
        mark = output.paint(f"{finding.severity.word:<7}", *_STYLES[finding.severity])
        output.say(f"{mark}  {finding.check:<{width}}  {finding.message}")
