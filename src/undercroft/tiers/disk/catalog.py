"""A store directory read from outside, by tools: beside running engines, or without any.

Nothing is changed and no engine is disturbed: names are listed under the root's lock, held for
a moment as by any engine, and only there are the locks of segments tried, since engines take those
under it. Everything else is read without a lock, and read again where it looks damaged.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from undercroft.clock import Clock
from undercroft.errors import CorruptChunk, FormatTooNew, TierUnavailable
from undercroft.keys import Namespace
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.files import Files, translate
from undercroft.tiers.disk.manifest import MAX_MANIFEST_BYTES, parse_manifest
from undercroft.tiers.disk.names import (
    EPOCH_NAME,
    HISTORY,
    LOCK_NAME,
    MANIFEST_NAME,
    NAMESPACE,
    ROOT_NAME,
    ROOT_NAMES,
    SEGMENT,
    TEMPORARY,
    is_ours,
)
from undercroft.tiers.disk.root import hold_root
from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX, charge
from undercroft.tiers.disk.stored import (
    EPOCH_LOST,
    Piece,
    Store,
    StoredChunk,
    StoredNamespace,
    StoredSegment,
    Users,
)
from undercroft.tiers.disk.table import (
    ENTRY_BYTES,
    Entries,
    entry_offset,
    parse_entries,
    parse_header_of,
)

__all__ = ["Catalog"]

_LOCKS = "/proc/locks"
_LOCK_LINE = re.compile(r"FLOCK\s+\w+\s+\w+\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)")
_VERSION = struct.Struct("<8sH")
_RETRIES = 3


class Catalog:
    """Reads a store directory.

    Args:
        path: The directory that engines name, or `undercroft-v1` in it.
        clock: Time.
        files: The system calls; tests replace them.

    Threads: one at a time.
    """

    def __init__(self, path: str, clock: Clock, files: Files | None = None) -> None:
        self.files = files or Files()
        whole = path.rstrip("/") or "/"
        is_root = whole.rpartition("/")[2] == ROOT_NAME
        self.path = whole if is_root else f"{whole}/{ROOT_NAME}"
        self._clock = clock
        self._pids: dict[tuple[int, int, int], tuple[int, ...]] = {}

    # --- locks --------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that creates or removes files.

        Raises:
            TierUnavailable: Another process held the lock for two seconds, or there is none.
        """
        try:
            fd = self.files.open(f"{self.path}/{LOCK_NAME}", os.O_RDONLY)
        except OSError as exc:
            raise translate(exc, "open the lock", tier="disk") from exc
        try:
            with hold_root(self.files, fd, self.path, self._clock):
                yield
        finally:
            self.files.close(fd)

    @contextmanager
    def owning(self, path: str) -> Iterator[int | None]:
        """As `lock_of`, with the root's lock held only until the file's lock is."""
        with self.locked():
            fd = self._try_lock(path)
        try:
            yield fd
        finally:
            if fd is not None:
                self.files.close(fd)

    @contextmanager
    def lock_of(self, path: str) -> Iterator[int | None]:
        """The open file, locked; None if somebody has it, or it is gone. Needs the root's lock."""
        fd = self._try_lock(path)
        try:
            yield fd
        finally:
            if fd is not None:
                self.files.close(fd)

    def _try_lock(self, path: str) -> int | None:
        try:
            fd = self.files.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if self.files.lock(fd):
            return fd
        self.files.close(fd)
        return None

    def _users(self, path: str, found: os.stat_result, *, shared: bool, is_settled: bool) -> Users:
        """Who holds the lock of `path`: found out by trying, which is safe under the root's lock.

        Args:
            path: A file that users keep locked.
            found: What it is.
            shared: Whether several may hold it at once.
            is_settled: Whether this process holds the root's lock.
        """
        pids = self._pids.get((os.major(found.st_dev), os.minor(found.st_dev), found.st_ino), ())
        if not is_settled:
            return Users(is_held=True, pids=pids) if pids else Users(is_held=None)
        try:
            fd = self.files.open(path, os.O_RDONLY)
        except OSError:
            return Users(is_held=None)
        try:
            return Users(is_held=not self.files.lock(fd, shared=not shared), pids=pids)
        finally:
            self.files.close(fd)

    def _read_pids(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """Process ids by device and inode of what they have locked."""
        text, at = b"", 0
        try:
            fd = self.files.open(_LOCKS, os.O_RDONLY)
            try:
                while data := self.files.pread(fd, 1 << 20, at):
                    text, at = text + data, at + len(data)
            finally:
                self.files.close(fd)
        except OSError:
            return {}
        found: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for pid, major, minor, inode in _LOCK_LINE.findall(text.decode(errors="replace")):
            place = (int(major, 16), int(minor, 16), int(inode))
            if int(pid) > 0:
                found[place] = (*found.get(place, ()), int(pid))
        return found

    # --- the whole ----------------------------------------------------------------------------

    def look(self) -> Store:
        """What lies under the root now. Cost: a `stat` a file, three small reads a segment.

        Raises:
            TierUnavailable: There is no store, or it may not be read.
        """
        self._pids = self._read_pids()
        try:
            with self.locked():
                names = self._names(is_settled=True)
        except TierUnavailable:
            names = self._listed()
        except OSError as exc:
            raise translate(exc, "read the store", tier="disk") from exc
        filled = (self._fill(namespace) for namespace in names.namespaces)
        return replace(names, namespaces=tuple(one for one in filled if one))

    def _listed(self) -> Store:
        """As `_names`, without the lock: it is missing, or somebody else is slow."""
        try:
            return self._names(is_settled=False)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                raise TierUnavailable(
                    f"there is no store at {self.path}: name the directory that the engine's disk "
                    "tier has as its path"
                ) from exc
            raise translate(exc, "read the store", tier="disk") from exc

    def _names(self, *, is_settled: bool) -> Store:
        own = [self._piece(self.path)]
        namespaces: list[StoredNamespace] = []
        foreign: list[Piece] = []
        for name in self.files.list(self.path):
            path = f"{self.path}/{name}"
            with suppress(FileNotFoundError):
                found = self.files.stat(path)
                if stat.S_ISDIR(found.st_mode) and NAMESPACE.fullmatch(name):
                    namespaces.append(self._namespace(path, foreign, is_settled=is_settled))
                elif name in ROOT_NAMES:
                    own.append(self._piece(path))
                else:
                    foreign.append(self._tree(path))
        return Store(self.path, tuple(own), tuple(namespaces), tuple(foreign), is_settled)

    def _piece(self, path: str, found: os.stat_result | None = None) -> Piece:
        found = found or self.files.stat(path)
        return Piece(
            path, charge(found), found.st_blocks * 512, found.st_mtime_ns / 1e9, found.st_size
        )

    def _tree(self, path: str) -> Piece:
        """A stranger's file, or directory with all that is in it, as one piece.

        What may not be read, or lies too deep for a path, counts nothing.
        """
        piece, left = self._piece(path), [path]
        while left:
            at = left.pop()
            with suppress(OSError):
                found = self.files.stat(at)
                names = self.files.list(at) if stat.S_ISDIR(found.st_mode) else []
                left += [f"{at}/{name}" for name in names]
                below = self._piece(at, found)
                piece = piece if at == path else _together(piece, below)
        return piece

    def _namespace(
        self, directory: str, foreign: list[Piece], *, is_settled: bool
    ) -> StoredNamespace:
        parts: dict[str, dict[str, Piece]] = {}
        users: dict[str, Users] = {}
        own: list[Piece] = []
        temporaries: list[Piece] = []
        spare: list[Piece] = []
        for name in self.files.list(directory):
            path = f"{directory}/{name}"
            with suppress(FileNotFoundError):
                found = self.files.stat(path)
                match = SEGMENT.fullmatch(name)
                if match and stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
                    parts.setdefault(match[1], {})[match[2]] = self._piece(path, found)
                    if match[2] == INDEX_SUFFIX:
                        users[match[1]] = self._users(
                            path, found, shared=False, is_settled=is_settled
                        )
                elif TEMPORARY.fullmatch(name):
                    temporaries.append(self._piece(path, found))
                elif is_ours(name):
                    own.append(self._piece(path, found))
                    if name == MANIFEST_NAME:
                        users[name] = self._users(path, found, shared=True, is_settled=is_settled)
                    elif HISTORY.fullmatch(name):
                        held = self._users(path, found, shared=False, is_settled=is_settled).is_held
                        spare += own[-1:] if held is False else []
                else:
                    foreign.append(self._tree(path))
        nobody = Users(is_held=False if is_settled else None)
        return StoredNamespace(
            directory.rpartition("/")[2],
            self._piece(directory),
            tuple(
                StoredSegment(
                    segment_id,
                    directory,
                    files.get(SLAB_SUFFIX),
                    files.get(INDEX_SUFFIX),
                    users.get(segment_id, nobody),
                )
                for segment_id, files in sorted(parts.items())
            ),
            tuple(own),
            tuple(temporaries),
            users.get(MANIFEST_NAME, nobody),
            spare=tuple(spare),
        )

    # --- what is in the files -----------------------------------------------------------------

    def _fill(self, listed: StoredNamespace) -> StoredNamespace | None:
        """With what its files say; None if it was removed meanwhile."""
        directory = listed.directory.path
        try:
            self.files.stat(directory)
        except FileNotFoundError:
            return None
        epoch = self._epoch(f"{directory}/{EPOCH_NAME}")
        manifest, problem = self._manifest(directory)
        if not problem and epoch is None:
            problem = EPOCH_LOST
        namespace = manifest.digest if manifest and not problem else None
        segments = (self._segment(segment, namespace) for segment in listed.segments)
        return replace(
            listed,
            segments=tuple(segments),
            manifest=manifest.manifest if manifest else None,
            problem=problem,
            epoch=epoch,
        )

    def _epoch(self, path: str) -> int | None:
        file = EpochFile(self.files, path)
        try:
            file.open(read_only=True)
            return file.read()
        except OSError:
            return None
        finally:
            file.close()

    def _manifest(self, directory: str) -> tuple[Namespace | None, str]:
        """The manifest, whatever it says, and what is wrong with it."""
        try:
            data = self.read_file(f"{directory}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES + 1)
            namespace = parse_manifest(data)
            if namespace.id != directory.rpartition("/")[2]:
                return namespace, "the manifest was altered: its digest is not the directory's name"
        except FileNotFoundError:
            return None, "the manifest is missing"
        except OSError as exc:
            return None, f"the manifest cannot be read: {exc.strerror}"
        except CorruptChunk as exc:
            return None, str(exc)
        return namespace, ""

    def read_file(self, path: str, max_bytes: int, offset: int = 0) -> bytes:
        """Up to `max_bytes` of a file."""
        fd = self.files.open(path, os.O_RDONLY)
        try:
            size = min(max_bytes, max(0, self.files.fstat(fd).st_size - offset))
            return self.files.pread(fd, size, offset)
        finally:
            self.files.close(fd)

    def again(self, segment: StoredSegment) -> StoredSegment:
        """The same segment with its header read once more."""
        pieces: dict[str, Piece | None] = {}
        for name, path in (("slab", segment.slab_path), ("index", segment.index_path)):
            try:
                pieces[name] = self._piece(path)
            except FileNotFoundError:
                pieces[name] = None
        return self._segment(
            replace(
                segment,
                slab=pieces["slab"],
                index=pieces["index"],
                header=None,
                problem="",
                is_too_new=False,
            ),
            None,
        )

    def _segment(self, listed: StoredSegment, namespace: bytes | None) -> StoredSegment:
        if listed.index is None or listed.slab is None:
            gone = "index" if listed.index is None else "slab"
            return replace(listed, problem=f"its {gone} is missing")
        try:
            page = self.read_file(listed.index_path, PAGE_BYTES)
        except OSError as exc:
            return replace(listed, problem=f"its index cannot be read: {exc.strerror}")
        magic, version = _VERSION.unpack(page[: _VERSION.size].ljust(_VERSION.size, b"\0"))
        listed = replace(listed, version=version if magic == b"UNDRINDX" else None)
        try:
            # Without a good manifest a header is believed if it is whole and of this place.
            space = namespace or page[32:64]
            if space[:16].hex() != listed.directory.rpartition("/")[2]:
                raise CorruptChunk("the index belongs to another namespace")  # noqa: TRY301 - one way out
            header = parse_header_of(page, listed.segment_id, space)
        except (CorruptChunk, FormatTooNew) as exc:
            return replace(listed, problem=str(exc), is_too_new=isinstance(exc, FormatTooNew))
        return replace(listed, header=header)

    def entries(self, segment: StoredSegment) -> Entries | None:
        """What the index of a segment says; None if it says nothing, or is gone.

        An entry that its owner was just writing is read again. Cost: 128 bytes a slot.
        """
        header = segment.header
        if header is None:
            return None
        try:
            table = self.read_file(segment.index_path, header.num_slots * ENTRY_BYTES, PAGE_BYTES)
            entries = parse_entries(table, header.namespace)
            for _ in range(_RETRIES):
                if not len(entries.damaged_slots) or segment.users.is_held is False:
                    break
                self._clock.sleep(0.001)
                table = self.read_file(segment.index_path, len(table), PAGE_BYTES)
                entries = parse_entries(table, header.namespace)
        except OSError:
            return None
        return entries

    def entry(self, segment: StoredSegment, slot: int) -> bytes:
        """The bytes of one entry as they are now; empty if the index is gone or too short."""
        try:
            return self.read_file(segment.index_path, ENTRY_BYTES, entry_offset(slot))
        except OSError:
            return b""

    def chunks(self, namespace: StoredNamespace) -> Iterator[StoredChunk]:
        """Every chunk that the indexes of a namespace speak of, void ones too."""
        for segment in namespace.segments:
            yield from self.chunks_of(segment, namespace.epoch)

    def chunks_of(self, segment: StoredSegment, epoch: int | None) -> Iterator[StoredChunk]:
        """Those of one segment; `epoch` is the namespace's current one."""
        entries = self.entries(segment)
        if entries is None:
            return
        numbers = (entries.slots, entries.epochs, entries.sequences, entries.payload_bytes)
        rows = zip(entries.keys, *(column.tolist() for column in numbers), strict=True)
        namespace_id = segment.directory.rpartition("/")[2]
        for key, slot, stored, sequence, size in rows:
            yield StoredChunk(
                key, namespace_id, segment, slot, stored, sequence, size, stored == epoch
            )


def _together(piece: Piece, below: Piece) -> Piece:
    """`piece` with what lies below it."""
    return Piece(
        piece.path,
        piece.charged_bytes + below.charged_bytes,
        piece.disk_bytes + below.disk_bytes,
        max(piece.modified_s, below.modified_s),
        piece.num_bytes + below.num_bytes,
    )
