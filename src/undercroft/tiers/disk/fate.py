"""What became of a chunk: what the store shows, or else what the history says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from undercroft.errors import CorruptChunk
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fsck import Fsck
from undercroft.tiers.disk.history import MAX_HISTORY_BYTES, Incident, key_part, read_history
from undercroft.tiers.disk.names import HISTORY
from undercroft.tiers.disk.stored import Store, StoredChunk, StoredNamespace

__all__ = ["Fate", "FateKind", "Fates"]

_LOSSES = ("evicted", "declined", "dropped")


class FateKind(Enum):
    """What a chunk is now."""

    STORED = "stored"
    DAMAGED = "damaged"
    VOID = "void"
    EVICTED = "evicted"
    DECLINED = "declined"
    DROPPED = "dropped"
    NO_TRACE = "no trace"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one chunk in one namespace.

    Args:
        key: Whose.
        kind: What it is now.
        detail: More, in words; empty if there is nothing to say.
        chunk: Where it is, if it is anywhere.
        incident: How it was lost, if that is known.
        missed: The latest lookup that missed it for being late, if any did.
    """

    key: bytes
    kind: FateKind
    detail: str = ""
    chunk: StoredChunk | None = None
    incident: Incident | None = None
    missed: Incident | None = None


@dataclass(slots=True)
class _Known:
    chunks: dict[bytes, StoredChunk]
    incidents: defaultdict[bytes, list[Incident]]
    general: list[Incident] = field(default_factory=list)
    since_s: int | None = None


class Fates:
    """Answers for the chunks of a store.

    Args:
        catalog: Of the store.
        store: What it showed.

    Threads: one at a time. Cost: the indexes and histories of a namespace are read once, at the
    first question about it; each chunk that is there is read and verified.
    """

    def __init__(self, catalog: Catalog, store: Store) -> None:
        self._catalog = catalog
        self._store = store
        self._fsck = Fsck(catalog, num_threads=1)
        self._known: dict[str, _Known] = {}

    def has(self, namespace: StoredNamespace, key: bytes) -> bool:
        """Whether the namespace's index has the chunk, and it is of the current epoch."""
        chunk = self._of(namespace).chunks.get(key)
        return chunk is not None and chunk.is_current

    def general(self, namespace: StoredNamespace) -> list[Incident]:
        """What happened that is about no single chunk: resets, levels that went down; in order."""
        return self._of(namespace).general

    def since_s(self, namespace: StoredNamespace) -> int | None:
        """Unix time from which on losses were noted; None if they never were."""
        return self._of(namespace).since_s

    def of(self, namespace: StoredNamespace, key: bytes) -> Fate:
        """What became of `key` in a namespace."""
        known = self._of(namespace)
        incidents = known.incidents.get(key_part(key), [])
        missed = next((i for i in reversed(incidents) if i.event == "missed"), None)
        lost = next((i for i in reversed(incidents) if i.event in _LOSSES), None)
        chunk = known.chunks.get(key)
        if chunk is not None and chunk.is_current:
            wrong = self._fsck.verify(chunk)
            kind = FateKind.DAMAGED if wrong else FateKind.STORED
            return Fate(key, kind, wrong, chunk, None, missed)
        if chunk is not None:
            detail = f"stored in epoch {chunk.epoch}; a reset made it {namespace.epoch}"
            return Fate(key, FateKind.VOID, detail, chunk, None, missed)
        if lost is not None:
            return Fate(key, FateKind[lost.event.upper()], lost.reason, None, lost, missed)
        return Fate(key, FateKind.NO_TRACE, "", None, None, missed)

    def _of(self, namespace: StoredNamespace) -> _Known:
        if namespace.namespace_id not in self._known:
            self._known[namespace.namespace_id] = self._read(namespace)
        return self._known[namespace.namespace_id]

    def _read(self, namespace: StoredNamespace) -> _Known:
        known = _Known({}, defaultdict(list))
        for chunk in self._catalog.chunks(namespace):
            old = known.chunks.get(chunk.key)
            if old is None or (chunk.is_current, chunk.sequence) > (old.is_current, old.sequence):
                known.chunks[chunk.key] = chunk
        incidents = sorted(self._incidents(namespace), key=lambda i: i.unix_s)
        for incident in incidents:
            if incident.key_part:
                known.incidents[incident.key_part].append(incident)
            else:
                known.general.append(incident)
        if incidents:
            known.since_s = incidents[0].unix_s
        return known

    def _incidents(self, namespace: StoredNamespace) -> Iterator[Incident]:
        for piece in namespace.own:
            if HISTORY.fullmatch(piece.path.rpartition("/")[2]):
                try:
                    yield from read_history(self._catalog.read_file(piece.path, MAX_HISTORY_BYTES))
                except (OSError, CorruptChunk):
                    continue
