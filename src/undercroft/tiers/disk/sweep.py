"""What of a store can go: debris, old formats, unused namespaces, what exceeds the capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from undercroft.identity.manifest import MANIFEST_FORMAT
from undercroft.tiers.disk.names import HISTORY
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.stored import Piece, Store, StoredNamespace, StoredSegment
from undercroft.tiers.disk.table import FORMAT_VERSION

__all__ = ["Reason", "Waste", "plan", "remove"]

_HISTORY_KEPT_S = 30 * 86400.0


class Reason(Enum):
    """Why something can go."""

    DEBRIS = "left by a crash"
    DAMAGED = "serves nothing"
    OLD_FORMAT = "of an older format"
    EMPTY = "holds nothing"
    UNUSED = "unused for long"
    OVER_CAPACITY = "over the capacity"
    OLD_HISTORY = "the history of an engine long gone"


@dataclass(frozen=True, slots=True)
class Waste:
    """One thing that can go.

    Args:
        reason: Why.
        what: It.
        path: Where.
        num_bytes: What that gives back.
        detail: More, in words.
    """

    reason: Reason
    what: Piece | StoredSegment | StoredNamespace
    path: str
    num_bytes: int
    detail: str = ""


def plan(
    store: Store,
    *,
    now_s: float,
    unused_s: float | None = None,
    capacity_bytes: int | None = None,
) -> list[Waste]:
    """What can go now. Of what an engine has open, nothing ever can.

    Args:
        store: From the catalogue's `look`.
        now_s: Unix time.
        unused_s: Namespaces in which nothing was stored for that long go whole; None keeps them.
        capacity_bytes: Beyond it, segments go, those first in which nothing was stored for longest.
    """
    if not store.is_settled:
        return []
    found: list[Waste] = []
    for namespace in store.namespaces:
        found += _of_namespace(namespace, now_s, unused_s)
    if capacity_bytes is not None:
        found += _over(store, found, capacity_bytes)
    return found


def _of_namespace(
    namespace: StoredNamespace, now_s: float, unused_s: float | None
) -> Iterator[Waste]:
    directory = namespace.directory.path
    age_s = now_s - namespace.modified_s
    written = (namespace.manifest or {}).get("format", MANIFEST_FORMAT)
    whole: tuple[Reason, str] | None = None
    if namespace.is_in_use or any(_is_newer(segment) for segment in namespace.segments):
        whole = None
    elif isinstance(written, int) and written < MANIFEST_FORMAT and not namespace.problem:
        whole = (Reason.OLD_FORMAT, f"manifest format {written}, engines ask for {MANIFEST_FORMAT}")
    elif not namespace.segments:
        whole = (Reason.EMPTY, "")
    elif unused_s is not None and age_s >= unused_s:
        whole = (Reason.UNUSED, f"last stored to {age_s / 86400:.1f} days ago")
    if whole:
        yield Waste(whole[0], namespace, directory, namespace.charged_bytes, whole[1])
        return
    for piece in namespace.temporaries:
        yield Waste(Reason.DEBRIS, piece, piece.path, piece.charged_bytes)
    yield from _old_histories(namespace, now_s)
    for segment in namespace.segments:
        if segment.header is not None or segment.users.is_held or _is_newer(segment):
            continue
        is_old = segment.version is not None and segment.version < FORMAT_VERSION
        if segment.index is None or segment.slab is None:
            reason = Reason.DEBRIS
        else:
            reason = Reason.OLD_FORMAT if is_old else Reason.DAMAGED
        yield Waste(reason, segment, _path(segment), segment.charged_bytes, segment.problem)


def _old_histories(namespace: StoredNamespace, now_s: float) -> Iterator[Waste]:
    """Of engines that ran beside others; the last one stays, whatever its age."""
    histories = [p for p in namespace.own if HISTORY.fullmatch(p.path.rpartition("/")[2])]
    last = max(histories, key=lambda piece: piece.modified_s, default=None)
    for piece in namespace.spare:
        age_s = now_s - piece.modified_s
        if piece is not last and age_s >= _HISTORY_KEPT_S:
            detail = f"last written {age_s / 86400:.1f} days ago"
            yield Waste(Reason.OLD_HISTORY, piece, piece.path, piece.charged_bytes, detail)


def _path(segment: StoredSegment) -> str:
    return segment.pieces[0].path


def _is_newer(segment: StoredSegment) -> bool:
    return segment.version is not None and segment.version > FORMAT_VERSION


def _over(store: Store, found: list[Waste], capacity_bytes: int) -> Iterator[Waste]:
    """Segments nobody owns, coldest first, until the rest fits."""
    left = store.charged_bytes - sum(waste.num_bytes for waste in found)
    gone = {waste.path for waste in found}
    candidates = [
        segment
        for namespace in store.namespaces
        if namespace.directory.path not in gone
        for segment in namespace.segments
        if segment.users.is_held is False and not _is_newer(segment) and _path(segment) not in gone
    ]
    for segment in sorted(candidates, key=lambda s: s.modified_s):
        if left <= capacity_bytes:
            return
        left -= segment.charged_bytes
        yield Waste(Reason.OVER_CAPACITY, segment, _path(segment), segment.charged_bytes)


def remove(waste: Waste, removal: Removal) -> str:
    """Let it go; why not, if it stays."""
    if isinstance(waste.what, StoredNamespace):
        return removal.remove_namespace(waste.what)
    if isinstance(waste.what, StoredSegment):
        return removal.remove_segment(waste.what, if_bad=waste.what.header is None)
    if waste.reason is Reason.OLD_HISTORY:
        return removal.remove_history(waste.what)
    return removal.remove_debris(waste.what)
