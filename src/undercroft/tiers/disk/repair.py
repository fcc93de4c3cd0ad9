"""Mends what a check found, as far as that can be done without making anything up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from undercroft.errors import TierUnavailable
from undercroft.tiers.disk.fsck import Finding, Fsck, Kind, Report
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.stored import Store, StoredSegment

__all__ = ["Remedy", "repair"]

_SLOTS = (Kind.RECORD, Kind.ENTRY)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What became of a finding.

    Args:
        finding: Which.
        done: What was done; empty if nothing was.
        left: Why nothing was done; empty if something was.
    """

    finding: Finding
    done: str = ""
    left: str = ""


_LEFT = {
    Kind.QUOTA: "engines shrink by themselves; `undercroft gc --capacity` removes what nobody owns",
    Kind.NAMESPACE: "the next engine of this namespace writes it anew",
    Kind.NEWER: "stored by a later release: left alone",
    Kind.FOREIGN: "not ours: left alone",
    Kind.TWICE: "one is used, the other is overwritten in time",
}


def repair(
    report: Report, store: Store, fsck: Fsck, removal: Removal, capacity_bytes: int | None
) -> Iterator[Remedy]:
    """Mend the findings of `report` one by one, and say what became of each.

    Args:
        report: From `fsck.check`.
        store: What was checked.
        fsck: Looks at each bad chunk again before it is freed.
        removal: Does it.
        capacity_bytes: What the store may use; None if that is not known.
    """
    room = None if capacity_bytes is None else capacity_bytes - store.charged_bytes
    by_segment: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        if finding.kind in _SLOTS and finding.segment:
            by_segment[finding.segment.index_path].append(finding)
        else:
            yield _one(finding, removal, room)
    for findings in by_segment.values():
        yield from _slots(findings, fsck, removal)


def _remedy(finding: Finding, done: str, act: Callable[[], str]) -> Remedy:
    try:
        left = act()
    except (OSError, TierUnavailable) as error:
        left = str(error)
    return Remedy(finding, left=left) if left else Remedy(finding, done=done)


def _one(finding: Finding, removal: Removal, room_bytes: int | None) -> Remedy:
    segment, namespace = finding.segment, finding.namespace
    if finding.kind is Kind.SEGMENT and segment:
        return _remedy(finding, "removed", lambda: removal.remove_segment(segment, if_bad=True))
    if finding.kind is Kind.SIZE and segment:
        return _remedy(finding, "mended", lambda: removal.mend_sizes(segment, room_bytes))
    if finding.kind is Kind.EPOCH and namespace:
        return _remedy(finding, "raised", lambda: removal.mend_epoch(namespace))
    if finding.kind is Kind.DEBRIS and namespace:
        piece = next(p for p in namespace.temporaries if p.path == finding.path)
        return _remedy(finding, "removed", lambda: removal.remove_debris(piece))
    return Remedy(finding, left=_LEFT[finding.kind])


def _slots(findings: list[Finding], fsck: Fsck, removal: Removal) -> Iterator[Remedy]:
    """Free the bad slots of one segment."""
    segment: StoredSegment | None = findings[0].segment
    if segment is None:
        return
    records = [finding for finding in findings if finding.chunk]
    still = [f for f in records if f.chunk and fsck.verify(f.chunk)]
    chunks = [finding.chunk for finding in still if finding.chunk]
    entries = [finding for finding in findings if not finding.chunk]
    for finding in records:
        if finding not in still:
            yield Remedy(finding, done="good by now")
    for group, act in (
        (still, lambda: removal.free_chunks(segment, chunks)),
        (entries, lambda: removal.free_damaged(segment)),
    ):
        if group:
            first = _remedy(group[0], "freed", act)
            yield first
            for finding in group[1:]:
                yield Remedy(finding, first.done, first.left)
