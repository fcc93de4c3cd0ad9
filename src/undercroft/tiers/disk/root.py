"""The directory all tiers of a host share: its owner, lock, manifests, and what lies in it."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from undercroft.clock import Clock
from undercroft.errors import ConfigError, CorruptChunk, TierUnavailable
from undercroft.keys import Namespace, first_difference
from undercroft.log import SparingLog
from undercroft.tiers.disk.buffers import PAGE_BYTES, AlignedPool
from undercroft.tiers.disk.files import Files, NotOurs
from undercroft.tiers.disk.manifest import MAX_MANIFEST_BYTES, parse_manifest
from undercroft.tiers.disk.names import (
    NAMESPACE,
    ROOT_NAME,
    ROOT_NAMES,
    SEGMENT,
    TEMPORARY,
    is_ours,
)
from undercroft.tiers.disk.segment import INDEX_SUFFIX, SLAB_SUFFIX, charge
from undercroft.tiers.disk.usage import NamespaceUsage, SegmentUsage, Usage

__all__ = ["ROOT_NAME", "Root", "hold_root", "remove_segment"]

_LOCK_WAIT_S = 2.0
_PRIVATE = 0o700
_LOCK_RETRY_S = 0.005
_MAX_SHOWN = 500
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_LOG = logging.getLogger(__name__)


@contextmanager
def hold_root(files: Files, lock_fd: int, path: str, clock: Clock) -> Iterator[None]:
    """Be the only process that creates or removes files under the root `path`.

    Args:
        files: The system calls.
        lock_fd: The root's open lock file.
        path: For the message.
        clock: Time.

    Raises:
        TierUnavailable: Somebody else held it for two seconds.
    """
    deadline = clock.now_s() + _LOCK_WAIT_S
    while not files.lock(lock_fd):
        if clock.now_s() >= deadline:
            raise TierUnavailable(
                f"another process has held {path}/lock for {_LOCK_WAIT_S:g} s; "
                "it is tried again later"
            )
        clock.sleep(_LOCK_RETRY_S)
    try:
        yield
    finally:
        files.unlock(lock_fd)


class Root:
    """`<path>/undercroft-v1` and this namespace's directory in it.

    Threads: one at a time (the keeper's lock). Methods raise `OSError` untranslated.
    """

    def __init__(self, files: Files, path: str, namespace: Namespace, clock: Clock) -> None:
        self.path = f"{path.rstrip('/')}/{ROOT_NAME}"
        self.directory = f"{self.path}/{namespace.id}"
        self.read_only = ""
        self.num_swept = 0
        self._above = path
        self._files = files
        self._namespace = namespace
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._lock_fd = -1
        self._manifest_fd = -1
        self._warned: tuple[str, ...] = ()

    def open(self) -> None:
        """Create the root if it is missing, check whose it is, open its lock.

        Raises:
            ConfigError: The path can never work: not a directory, a link, somebody else's.
        """
        self.close()
        self.read_only = ""
        try:
            self._make()
        except OSError as exc:
            if exc.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
                raise ConfigError(
                    f"disk path {self._above} is not a directory, or lies below a file; name a "
                    "folder, which is made if it is missing"
                ) from exc
            if exc.errno not in _REFUSED or not self._files.exists(self.directory):
                raise
            self.read_only = f"{exc.filename or self.path}: {exc.strerror}"
        self.check_owner()
        if self.read_only:
            self._check_directory(self.directory)
            self._compare_manifest(required=True)

    def is_new(self) -> bool:
        """Whether this namespace has no directory yet."""
        return not self._files.exists(self.directory)

    def enter(self) -> None:
        """Create or compare the namespace's directory and manifest. Needs the lock.

        Raises:
            ConfigError: The manifest there is another one; says where they differ first. Or the
                directory is a link, or somebody else's.
        """
        self._files.make_directories(self.directory)
        self._check_directory(self.directory)
        self._make_private(self.directory)
        if not self._compare_manifest(required=False):
            self._write_manifest()
        self._manifest_fd = self._files.open(f"{self.directory}/manifest.json", os.O_RDONLY)
        self._files.lock(self._manifest_fd, shared=True)

    def close(self) -> None:
        """Give the descriptors back; twice is fine."""
        fds, self._lock_fd, self._manifest_fd = (self._lock_fd, self._manifest_fd), -1, -1
        with ExitStack() as rest:
            for fd in fds:
                if fd >= 0:
                    rest.callback(self._files.close, fd)

    def _make(self) -> None:
        self._check_links_above()
        self._files.make_directories(self._above)
        self.check_owner()
        self._files.make_directories(self.path)
        self.check_owner()
        self._lock_fd = self._files.open(f"{self.path}/lock", os.O_RDWR | os.O_CREAT)
        self._make_private(self.path)

    def _make_private(self, directory: str) -> None:
        if stat.S_IMODE(self._files.stat(directory).st_mode) != _PRIVATE:
            self._files.restrict(directory)

    def check_owner(self) -> None:
        """Refuse a root that is not ours to use; one that is missing is fine.

        Raises:
            ConfigError: It is a link, a file, or somebody else's.
        """
        self._check_directory(self.path)

    def _check_directory(self, directory: str) -> None:
        if not self._files.exists(directory):
            return
        found = self._files.stat(directory)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{directory} is not a directory of its own: remove it or move away")
        if found.st_uid != self._files.user_id():
            raise ConfigError(
                f"{directory} belongs to user {found.st_uid}, not to us ({self._files.user_id()}): "
                "give each user a path of its own"
            )

    def _check_links_above(self) -> None:
        """Refuse to be led by others: links on the way to the root are ours, or the system's."""
        parts = self.path.split("/")[:-1]
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if not path or not self._files.exists(path):
                continue
            found = self._files.stat(path)
            if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, self._files.user_id()):
                raise ConfigError(
                    f"{path} is a symbolic link of user {found.st_uid}, who could point it "
                    "elsewhere: name the place itself"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that creates or removes files here.

        Raises:
            TierUnavailable: Somebody else held it for two seconds.
        """
        with hold_root(self._files, self._lock_fd, self.path, self._clock):
            yield

    def _compare_manifest(self, *, required: bool) -> bool:
        path = f"{self.directory}/manifest.json"
        try:
            fd = self._files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            if required:
                raise
            return False
        try:
            data = self._files.pread(fd, MAX_MANIFEST_BYTES + 1, 0)
        finally:
            self._files.close(fd)
        try:
            stored = parse_manifest(data)
            same_id = stored.id == self._namespace.id
        except CorruptChunk:
            self._log.warning("%s is unreadable and is written anew", path)
            return False
        difference = first_difference(Namespace(json.loads(self._namespace.text)), stored)
        if difference is None:
            return True
        difference = "".join(c if c.isprintable() else "?" for c in difference[:_MAX_SHOWN])
        if same_id:
            raise ConfigError(
                f"{path} describes another namespace of this id: {difference}; use another path"
            )
        # The directory is named after its manifest's digest, and this one has another: damaged.
        self._log.warning("%s was altered (%s) and is written anew", path, difference)
        return False

    def _write_manifest(self) -> None:
        path = f"{self.directory}/manifest.json"
        text = json.dumps(json.loads(self._namespace.text), indent=2, sort_keys=True) + "\n"
        try:
            parse_manifest(text.encode())
        except CorruptChunk as exc:
            raise ConfigError(f"this engine's namespace cannot be stored: {exc}") from exc
        for old in (path, f"{path}.tmp"):
            self._files.unlink(old)
        fd = self._files.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._files.pwrite(fd, text.encode(), 0)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)
        self._files.rename(f"{path}.tmp", path)

    def takes_direct(self, path: str, pool: AlignedPool) -> bool:
        """Whether the file system of `path` takes direct reads of whole pages: tried, not asked."""
        try:
            fd = self._files.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                return False
            raise
        try:
            page = pool.take(PAGE_BYTES)
            self._files.preadv(fd, [page], 0)
            pool.give(page)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                return False
            raise
        finally:
            self._files.close(fd)
        return True

    def usage(self) -> Usage:
        """What lies under the root now. Cost: one `stat` a file."""
        usage = Usage(fixed_bytes=charge(self._files.stat(self.path)))
        for name in self._files.list(self.path):
            path = f"{self.path}/{name}"
            with suppress(FileNotFoundError):
                found = self._files.stat(path)
                usage.fixed_bytes += charge(found)
                if NAMESPACE.fullmatch(name) and self._is_ours(found):
                    usage.namespaces[name] = self._namespace_usage(path, usage)
                elif name not in ROOT_NAMES:
                    usage.foreign_names.append(path)
        if tuple(usage.foreign_names) != self._warned and usage.foreign_names:
            self._warned = tuple(usage.foreign_names)
            self._log.warning(
                "%d files under %s are not ours; they count against the capacity: %s",
                len(self._warned),
                self.path,
                ", ".join(self._warned[:5]),
            )
        return usage

    def _is_ours(self, found: os.stat_result) -> bool:
        """Whether that is a directory of ours, rather than a link or somebody else's."""
        return stat.S_ISDIR(found.st_mode) and found.st_uid == self._files.user_id()

    def _is_plain(self, found: os.stat_result) -> bool:
        """Whether `Files.open` takes it: a file of ours with one name."""
        mine = found.st_uid == self._files.user_id()
        return stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and mine

    def _namespace_usage(self, directory: str, usage: Usage) -> NamespaceUsage:
        found: dict[str, dict[str, os.stat_result]] = {}
        for name in self._files.list(directory):
            with suppress(FileNotFoundError):
                status = self._files.stat(f"{directory}/{name}")
                match = SEGMENT.fullmatch(name)
                if match and self._is_plain(status):
                    found.setdefault(match[1], {})[match[2]] = status
                    continue
                usage.fixed_bytes += charge(status)
                if not is_ours(name):
                    usage.foreign_names.append(f"{directory}/{name}")
        out = NamespaceUsage(directory, charge(self._files.stat(directory)))
        for segment_id, parts in found.items():
            slab, index = parts.get(SLAB_SUFFIX), parts.get(INDEX_SUFFIX)
            out.segments.append(
                SegmentUsage(
                    segment_id,
                    directory,
                    slab.st_size if slab else 0,
                    sum(part.st_size for part in parts.values()),
                    sum(charge(part) for part in parts.values()),
                    index.st_mtime_ns if index else 0,
                )
            )
        return out

    def sweep(self) -> None:
        """Remove what a crash may leave: halves of segments, temporary files, dead namespaces.

        Needs the lock, under which segments are created: so no live creator owns a half.
        """
        for name in self._files.list(self.path):
            if not NAMESPACE.fullmatch(name):
                continue
            directory = f"{self.path}/{name}"
            if not self._is_ours(self._files.stat(directory)):
                continue
            names = set(self._files.list(directory))
            for each in sorted(names):
                match = SEGMENT.fullmatch(each)
                other = {SLAB_SUFFIX: INDEX_SUFFIX, INDEX_SUFFIX: SLAB_SUFFIX}
                half = match and f"seg-{match[1]}{other[match[2]]}" not in names
                if half or TEMPORARY.fullmatch(each):
                    with suppress(IsADirectoryError):
                        self._files.unlink(f"{directory}/{each}")
                        self.num_swept += 1
            if directory != self.directory:
                self._sweep_empty(directory, names)

    def _sweep_empty(self, directory: str, names: set[str]) -> None:
        if not all(map(is_ours, names)):
            return
        if not names:
            self._files.remove_directory(directory)
        if "manifest.json" not in names:
            return
        try:
            fd = self._files.open(f"{directory}/manifest.json", os.O_RDONLY)
        except NotOurs:
            return
        try:
            if not self._files.lock(fd):
                return
            for name in names:
                self._files.unlink(f"{directory}/{name}")
            self._files.remove_directory(directory)
        finally:
            self._files.close(fd)

    def remove_segment(self, segment_id: str, directory: str, slab_fd: int = -1) -> None:
        """See `remove_segment`."""
        remove_segment(self._files, directory, segment_id, slab_fd)


def remove_segment(files: Files, directory: str, segment_id: str, slab_fd: int = -1) -> None:
    """Remove a segment and give its space back at once, even if others have it open.

    The index goes first: a slab without one is swept after a crash. Of what is not ours only the
    name goes: its bytes may be somebody's.
    """
    base = f"{directory}/seg-{segment_id}"
    with suppress(IsADirectoryError):
        files.unlink(base + INDEX_SUFFIX)
    fd = slab_fd
    try:
        if fd < 0:
            fd = files.open(base + SLAB_SUFFIX, os.O_WRONLY)
        files.truncate(fd, 0)
    except FileNotFoundError:
        return
    except NotOurs:
        fd = -1
    finally:
        if slab_fd < 0 <= fd:
            files.close(fd)
    with suppress(IsADirectoryError):
        files.unlink(base + SLAB_SUFFIX)
