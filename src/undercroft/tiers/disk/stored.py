"""What a store directory was found to hold: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX
from undercroft.tiers.disk.table import IndexHeader
from undercroft.tiers.disk.usage import reserve_bytes

__all__ = [
    "EPOCH_LOST",
    "Piece",
    "Store",
    "StoredChunk",
    "StoredNamespace",
    "StoredSegment",
    "Users",
]

EPOCH_LOST = "the epoch is missing or damaged: all chunks are void"
"""The `problem` of a namespace whose manifest is good."""


@dataclass(frozen=True, slots=True)
class Users:
    """Whether processes hold the lock of something, and which, as far as can be told.

    Args:
        is_held: None where it could not be found out.
        pids: Of those of them that this process may see.
    """

    is_held: bool | None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a directory without what is in it.

    Args:
        path: Where.
        charged_bytes: What it counts against the capacity.
        disk_bytes: What `du` says of it.
        modified_s: Unix time of the last change.
        num_bytes: Its size.
    """

    path: str
    charged_bytes: int
    disk_bytes: int
    modified_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A slab and its index, or what is left of them.

    Args:
        segment_id: The 16 hex digits of its name.
        directory: Of its namespace.
        slab: None if there is none.
        index: None if there is none.
        users: Who writes it.
        header: What the index says of it; None if that cannot be read, see `problem`.
        problem: Why it serves nothing; empty if it can.
        version: Format version as far as it can be read.
        is_too_new: Its index is whole, and of a later version than this release reads.
    """

    segment_id: str
    directory: str
    slab: Piece | None
    index: Piece | None
    users: Users
    header: IndexHeader | None = None
    problem: str = ""
    version: int | None = None
    is_too_new: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The files that are there."""
        return tuple(piece for piece in (self.slab, self.index) if piece)

    @property
    def charged_bytes(self) -> int:
        """What both files count against the capacity."""
        return sum(piece.charged_bytes for piece in self.pieces)

    @property
    def planned_bytes(self) -> int:
        """Charged now, or once its block map has grown."""
        size = sum(piece.num_bytes for piece in self.pieces)
        slab_bytes = self.slab.num_bytes if self.slab else 0
        return max(self.charged_bytes, size + reserve_bytes(slab_bytes))

    @property
    def modified_s(self) -> float:
        """When the last chunk was stored or deleted, or an engine took it over."""
        return self.index.modified_s if self.index else max(p.modified_s for p in self.pieces)

    @property
    def slab_path(self) -> str:
        """Where the records are."""
        return f"{self.directory}/seg-{self.segment_id}{SLAB_SUFFIX}"

    @property
    def index_path(self) -> str:
        """Where the entries are."""
        return f"{self.directory}/seg-{self.segment_id}{INDEX_SUFFIX}"


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace's directory.

    Args:
        namespace_id: Its name.
        directory: Itself.
        segments: By id.
        own: Manifest, epoch, and other files of ours that are no segment.
        temporaries: What a crash left of a file being created.
        users: Which engines have it open.
        manifest: What the manifest says; None if it cannot be read, see `problem`.
        problem: What is wrong with manifest or epoch; empty if nothing is.
        epoch: The current one; None if it cannot be read.
        spare: Those of `own` that are histories which no engine writes.
    """

    namespace_id: str
    directory: Piece
    segments: tuple[StoredSegment, ...]
    own: tuple[Piece, ...]
    temporaries: tuple[Piece, ...]
    users: Users
    manifest: Mapping[str, Any] | None = None
    problem: str = ""
    epoch: int | None = None
    spare: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> Iterator[Piece]:
        """All that is there, foreign files aside."""
        yield self.directory
        yield from self.own
        yield from self.temporaries
        for segment in self.segments:
            yield from segment.pieces

    @property
    def charged_bytes(self) -> int:
        """What it counts against the capacity."""
        return sum(piece.charged_bytes for piece in self.pieces)

    @property
    def disk_bytes(self) -> int:
        """What `du` says of it, foreign files aside."""
        return sum(piece.disk_bytes for piece in self.pieces)

    @property
    def modified_s(self) -> float:
        """When something was last stored in it, or an engine came or went."""
        return max(piece.modified_s for piece in self.pieces)

    @property
    def is_in_use(self) -> bool:
        """Whether an engine has it open, or may have."""
        users = (self.users, *(segment.users for segment in self.segments))
        return any(one.is_held is not False for one in users)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that have it open, as far as they can be seen."""
        users = (self.users, *(segment.users for segment in self.segments))
        return tuple(sorted({pid for one in users for pid in one.pids}))

    @property
    def model_name(self) -> str:
        """The model as its engines named it; empty if that is not known."""
        model = (self.manifest or {}).get("model")
        if not isinstance(model, Mapping):
            return str(model or "")
        weights = model.get("weights")
        known = weights.get("value") if isinstance(weights, Mapping) else None
        return str(model.get("name") or known or "")

    @property
    def dtype(self) -> str:
        """The type of the KV cache's elements; empty if that is not known."""
        model = (self.manifest or {}).get("model")
        return str(model.get("dtype", "")) if isinstance(model, Mapping) else ""


@dataclass(frozen=True, slots=True)
class Store:
    """All that lies under a root.

    Args:
        path: The root.
        own: The root directory and its lock.
        namespaces: By id.
        foreign: What is not ours, wherever it lies.
        is_settled: Whether nobody could create or remove files while it was looked at. If not,
            what looks like debris may be somebody's work in progress.
    """

    path: str
    own: tuple[Piece, ...]
    namespaces: tuple[StoredNamespace, ...]
    foreign: tuple[Piece, ...]
    is_settled: bool

    @property
    def charged_bytes(self) -> int:
        """What counts against the capacity."""
        mine = sum(piece.charged_bytes for piece in (*self.own, *self.foreign))
        return mine + sum(namespace.charged_bytes for namespace in self.namespaces)

    @property
    def disk_bytes(self) -> int:
        """What `du` says."""
        mine = sum(piece.disk_bytes for piece in (*self.own, *self.foreign))
        return mine + sum(namespace.disk_bytes for namespace in self.namespaces)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as its index entry has it.

    Args:
        key: The chunk's.
        namespace_id: Whose it is.
        segment: Where it is.
        slot: Where in it.
        epoch: When it was stored; only chunks of the current epoch are served.
        sequence: By the order of writing.
        payload_bytes: Its length.
        is_current: Whether its epoch is the current one.
    """

    key: bytes
    namespace_id: str
    segment: StoredSegment
    slot: int
    epoch: int
    sequence: int
    payload_bytes: int
    is_current: bool
