"""What a soak has counted, and whether it was good enough."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.soak.vitals import Growth, Vitals, growth

__all__ = ["FLAT_RATIO", "Ledger", "verdict"]

FLAT_RATIO = 1.02
_MB = 1_000_000
_MOST_KEPT = 20
_VITALS: tuple[tuple[str, Callable[[Vitals], int], float, str, int], ...] = (
    ("resident memory", lambda v: v.rss, _MB, "MB", 0),
    ("shared memory, mapped", lambda v: v.shared, _MB, "MB", 0),
    ("shared memory, files left", lambda v: v.named_shared, _MB, "MB", 0),
    ("descriptors", lambda v: v.descriptors, 1, "", 1),
    ("threads", lambda v: v.threads, 1, "", 1),
)
"""Name, value, unit's size, unit, and how much more is flat whatever the ratio: of small counts."""


@dataclass
class Ledger:
    """Counts of all engines. Threads: any; `lock` guards changes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """What each kind of fault really hit."""
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Everything else that must not happen."""
    samples: list[Vitals] = field(default_factory=list)
    """Of the engine that lives through."""
    accounts: list[tuple[int, int]] = field(default_factory=list)
    """Bytes in the directory by the engine's books, and by `du`."""
    most_disk_bytes: int = 0
    totals: Mapping[str, int] = field(default_factory=dict)
    """The hierarchy's own counters, at the end."""

    def add(self, **counts: int) -> None:
        """Count."""
        with self.lock:
            self.counts.update(counts)

    def fail(self, what: str) -> None:
        """Something happened that must not."""
        with self.lock:
            self.counts["failures"] += 1
            if len(self.failures) < _MOST_KEPT:
                self.failures.append(what)

    def compare(self, prompt: int, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """One answer, which must be the right one."""
        with self.lock:
            self.counts["answers"] += 1
            if got != wanted:
                self.counts["wrong"] += 1
                if len(self.wrong) < _MOST_KEPT:
                    self.wrong.append(f"prompt {prompt}: {got}, not {wanted}")

    def growths(self) -> dict[str, Growth]:
        """Of every vital, by name."""
        return {name: growth(self.samples, pick) for name, pick, *_ in _VITALS}


def verdict(ledger: Ledger, capacity_bytes: int, needed_faults: set[str]) -> list[str]:
    """Everything that is not as promised, in sentences; empty: all is well."""
    bad = [f"{len(ledger.wrong)} wrong answers or more: {ledger.wrong[0]}"] if ledger.wrong else []
    bad += ledger.failures
    if ledger.most_disk_bytes > capacity_bytes:
        bad.append(f"the disk held {ledger.most_disk_bytes} bytes, of {capacity_bytes} at most")
    bad += [
        f"the books say {books} bytes, du says {du}" for books, du in ledger.accounts if books != du
    ]
    for name, _, unit_size, unit, spare in _VITALS:
        grown = ledger.growths()[name]
        if grown.after > max(grown.before * FLAT_RATIO, grown.before + spare):
            before, after = grown.before / unit_size, grown.after / unit_size
            bad.append(f"{name} grew from {before:.1f} to {after:.1f} {unit}".rstrip())
    bad += [f"no fault fired: {kind}" for kind in sorted(needed_faults - set(+ledger.faults))]
    for count in ("answers", "reused_tokens", "kills", "resets"):
        if not ledger.counts[count]:
            bad.append(f"nothing was tried: {count} is 0")
    if not ledger.accounts:
        bad.append("the books were never compared with du")
    return bad


def report(ledger: Ledger, capacity_bytes: int, bad: list[str]) -> str:
    """All of it, as aligned text."""
    lines = [f"{'':<28}{'after warm-up':>15}{'at the end':>13}{'growth':>9}"]
    for name, _, unit_size, unit, _spare in _VITALS:
        grown = ledger.growths()[name]
        before, after = grown.before / unit_size, grown.after / unit_size
        lines.append(
            f"{name:<28}{before:>12.1f} {unit:<2}{after:>10.1f} {unit:<2}{grown.ratio - 1:>+8.1%}"
        )
    lines += ["", "counted"]
    lines += [f"  {name:<26}{ledger.counts[name]:>12,}" for name in sorted(ledger.counts)]
    lines += ["", "faults that hit"]
    lines += [f"  {name:<26}{ledger.faults[name]:>12,}" for name in sorted(ledger.faults)]
    lines += ["", "what became of chunks"]
    lines += [f"  {name:<40}{value:>12,}" for name, value in sorted(ledger.totals.items())]
    same = sum(books == du for books, du in ledger.accounts)
    most = ledger.most_disk_bytes
    lines += [
        "",
        f"books equal du {same} of {len(ledger.accounts)} times; the disk held at most "
        f"{most / _MB:.1f} MB of {capacity_bytes / _MB:.1f} MB ({most / capacity_bytes:.1%})",
        "",
    ]
    lines += [f"NOT AS PROMISED: {each}" for each in bad] or ["all as promised"]
    return "\n".join(lines)
