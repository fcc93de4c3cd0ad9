"""Resets that a directory has not taken yet, noted where neither a hung disk nor a kill reaches.

A reset is over when the epoch on disk is raised. A disk that hangs or refuses to be written cannot
be told so, and memory of it ends with the process; the next one would serve what was reset. So each
reset is noted first in shared memory, which never waits for a disk and outlives processes: one
directory per key space and path, one empty file a reset. Whoever raises the epoch takes away the
notes that were there *before*; whoever opens the directory, or is at work on it and sees a note
that is not taken away soon, raises the epoch itself. The notes go when the machine goes down.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from undercroft.clock import Clock
from undercroft.tiers.disk.files import Files

__all__ = ["SHARED_MEMORY", "OwedResets"]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - memory, not a place for temporary files
_PREFIX = "undercroft-owed-"
_OVERDUE_S = 0.3
"""How long somebody else's reset is left to whoever asked for it: most take a few milliseconds."""
_TRIES = 3
_UNNOTED = "unnoted-"


class OwedResets:
    """The notes about one key space under one path, of this user.

    Args:
        path: The tier's path.
        namespace_id: Whose chunks.
        clock: Time.
        directory: A file system in memory that all engines on the path see.

    Threads: any. Cost: a call to the kernel while nothing is owed; never waits for a disk.
    """

    def __init__(
        self, path: str, namespace_id: str, clock: Clock, *, directory: str = SHARED_MEMORY
    ) -> None:
        real = os.path.realpath(path)
        whose = f"{os.geteuid()}\0{real}\0{namespace_id}"
        self._path = f"{directory}/{_PREFIX}{hashlib.sha256(whose.encode()).hexdigest()[:32]}"
        self._files = Files()  # of its own: tests and faults make the tier's hang
        self._clock = clock
        self._lock = threading.Lock()
        self._debts: dict[str, int] = {}
        self._first_seen_s: dict[str, float] = {}
        self._mine = ""
        self._num_unnoted = 0

    def __bool__(self) -> bool:
        """Whether this process knows of a reset that the directory has not taken."""
        return bool(self._debts)

    # --- what is noted ------------------------------------------------------------------------

    def note(self, epoch: int) -> bool:
        """A reset was asked for while the epoch was `epoch`; False: only this process knows.

        Takes the place of this process's note before it, so that there is one however many come.
        """
        token = self._write()
        with self._lock:
            if token is None:
                self._num_unnoted += 1
                self._debts[f"{_UNNOTED}{self._num_unnoted}"] = epoch
                return False
            before, self._mine = self._mine, token
            self._debts[token] = epoch
            self._debts.pop(before, None)
        if before:
            with suppress(OSError):
                self._files.unlink(f"{self._path}/{before}")
        return True

    def _write(self) -> str | None:
        token = self._files.random_hex()
        for _ in range(_TRIES):  # whoever takes the last note away removes the directory, too
            try:
                self._files.make_directories(self._path)
                if not self._is_ours():
                    return None
                path = f"{self._path}/{token}"
                self._files.close(self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileNotFoundError:
                continue
            except OSError:
                return None
            return token
        return None

    def _is_ours(self) -> bool:
        found = self._files.stat(self._path)
        return found.st_uid == self._files.user_id() and not found.st_mode & 0o077

    def pending(self) -> frozenset[str]:
        """The notes there are, anybody's."""
        try:
            if not self._is_ours():
                return frozenset()
            return frozenset(self._files.list(self._path))
        except OSError:
            return frozenset()

    # --- what is owed -------------------------------------------------------------------------

    def take_over(self, epoch: int) -> bool:
        """Make notes of others that nobody has settled for a while ours; whether there were any.

        Until then their writers are at it, and what they raise is seen as always.
        """
        pending = self.pending()
        if not pending:
            self._first_seen_s.clear()
            return False
        now_s = self._clock.now_s()
        with self._lock:
            for token in self._first_seen_s.keys() - pending:
                del self._first_seen_s[token]
            overdue = [
                token
                for token in pending - self._debts.keys()
                if now_s - self._first_seen_s.setdefault(token, now_s) >= _OVERDUE_S
            ]
            self._debts.update(dict.fromkeys(overdue, epoch))
        return bool(overdue)

    def inherit(self, epoch: int) -> bool:
        """Make all notes ours at once: the directory is only now being opened."""
        with self._lock:
            for token in self.pending():
                self._debts.setdefault(token, epoch)
            return bool(self._debts)

    def debts(self) -> frozenset[str]:
        """What a raise that begins now settles."""
        with self._lock:
            return self.pending() | self._debts.keys()

    def settle(self, debts: Iterable[str]) -> None:
        """The epoch was raised, durably, after `debts` were listed."""
        settled = frozenset(debts)
        with self._lock:
            for token in settled:
                self._debts.pop(token, None)
        for token in settled:
            with suppress(OSError):
                self._files.unlink(f"{self._path}/{token}")
        if settled:
            with suppress(OSError):  # somebody may have noted another one
                self._files.remove_directory(self._path)

    def settled_by_others(self, epoch: int) -> bool:
        """Whether all that was owed is settled: the notes are gone, and `epoch` is a later one."""
        with self._lock:
            pending = self.pending()
            for token, owed_at in list(self._debts.items()):
                if epoch > owed_at and token not in pending and not token.startswith(_UNNOTED):
                    del self._debts[token]
            return not self._debts
