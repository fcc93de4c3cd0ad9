"""The disk tier's system calls, which go wrong on purpose: below its checksums and its translation.

::

    bits = Injector(Effect.FLIPPED_BIT, randomly(0.01, seed=7), verbs=DATA_CALLS)
    tier = DiskTier("/nvme/kv", ..., files=FaultyFiles(Faults(bits)))
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from undercroft.keys import ChunkKey
from undercroft.testing.injectors import Effect, Faults
from undercroft.tiers.disk.files import Files

__all__ = ["CALLS", "DATA_CALLS", "FILE_CALLS", "FaultyFiles"]

_Bytes = Any
"""Arguments and answers of some call; what is read or written: a number, bytes, or buffers."""

_READS, _WRITES = ("pread", "preadv"), ("pwrite", "pwritev")
DATA_CALLS = _READS + _WRITES
"""Calls that move bytes."""

_CREATES = ("allocate", "make_directories", "rename", "unlink", "remove_directory", "restrict")
_BY_PATH = ("open", "sync_directory", "stat", "list", "free_bytes", *_CREATES[1:])
_CHANGES = (*_WRITES, "open", "truncate", *_CREATES)
_BY_DESCRIPTOR = ("close", "allocate", "truncate", "fdatasync", "lock", "unlock", "fstat")
CALLS = (*DATA_CALLS, *_BY_PATH, *_BY_DESCRIPTOR)
"""Calls that can go wrong: the names of methods of `Files`."""

FILE_CALLS = {
    Effect.FULL: (*_WRITES, "allocate", "make_directories", "free_bytes"),
    Effect.READ_ONLY: _CHANGES,
    Effect.PERMISSION: _BY_PATH,
    Effect.SHORT_READ: _READS,
    Effect.FLIPPED_BIT: DATA_CALLS,
    Effect.TORN_WRITE: _WRITES,
    Effect.LOST_WRITE: _WRITES,
    Effect.MISDIRECTED_WRITE: _WRITES,
    Effect.MISDIRECTED_READ: _READS,
}
"""The calls that an effect can hit; of the others any of `CALLS`."""

_ERRNOS = {
    Effect.ERROR: errno.EIO,
    Effect.FULL: errno.ENOSPC,
    Effect.READ_ONLY: errno.EROFS,
    Effect.PERMISSION: errno.EACCES,
}
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NO_KEY = ChunkKey(b"")
_MAX_PLACES = 256


class FaultyFiles(Files):
    """Makes the calls of `Files`, wrongly when an injector says so: the first one that does.

    Calls fail with a real `errno`, move fewer bytes, or others, or to another place. One that
    closes a descriptor closes it even if it fails, as the kernel does.

    Args:
        faults: Whose injectors choose by the names of methods (`CALLS`).

    Threads: any. Cost without injectors: some 200 ns a call.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()  # (fd, offset): bytes
        for name in CALLS:
            setattr(self, name, partial(self._call, name, getattr(super(), name)))
        vars(self)["pread_now"] = partial(self._call_now, super().pread_now)

    def _call(self, name: str, call: Callable[..., Any], *args: _Bytes, **more: _Bytes) -> _Bytes:
        injector = self.faults.strike(name, _NO_KEY) if self.faults.injectors else None
        if name in DATA_CALLS:
            self._note(args[0], args[2], _size(args[1]))
        if injector is None:
            return call(*args, **more)
        effect = injector.effect
        number = injector.number if effect is Effect.FOREIGN else _ERRNOS.get(effect)
        if number is not None:
            return self._refuse(effect, number, name, call, args, more)
        if effect in _WRONG:
            wrong = getattr(self, f"_{effect.name.lower()}")
            return wrong(name, call, *args)
        return call(*args, **more)

    def _call_now(self, call: Callable[..., bytes | None], *args: int) -> bytes | None:
        """While anything may go wrong, reads can only be waited for."""
        return None if self.faults.injectors else call(*args)

    def _refuse(
        self,
        effect: Effect,
        number: int,
        name: str,
        call: Callable[..., Any],
        args: tuple[_Bytes, ...],
        more: dict[str, _Bytes],
    ) -> _Bytes:
        if effect is Effect.FULL and name == "free_bytes":
            return 0
        if effect is Effect.READ_ONLY and name == "open" and not args[1] & _OPENS_TO_WRITE:
            return call(*args, **more)
        if name == "close":
            call(*args)
        path = args[0] if args and isinstance(args[0], str) else None
        raise OSError(number, f"{os.strerror(number)}, injected into {name}", path)

    # --- bytes that go wrong --------------------------------------------------------------------

    def _short_read(self, name: str, call: Callable[..., Any], fd: int, *args: _Bytes) -> _Bytes:
        got = call(fd, *args)
        return got[: len(got) // 2] if name == "pread" else got // 2

    def _flipped_bit(
        self,
        name: str,
        call: Callable[..., Any],
        fd: int,
        what: _Bytes,
        offset: int,
    ) -> _Bytes:
        if name in _WRITES:
            copy = _copy_of(what)
            self._flip(copy)
            return _write(fd, copy, offset)
        got = call(fd, what, offset)
        if name == "pread":
            if not got:
                return got
            copy = memoryview(bytearray(got))
            self._flip(copy)
            return bytes(copy)
        if got:
            at, mask = self.faults.bit_of(got)
            for buffer in what:
                if at < len(buffer):
                    buffer[at] ^= mask
                    break
                at -= len(buffer)
        return got

    def _flip(self, data: memoryview) -> None:
        byte, mask = self.faults.bit_of(len(data))
        data[byte] ^= mask

    def _torn_write(
        self,
        _name: str,
        _call: Callable[..., Any],
        fd: int,
        what: _Bytes,
        offset: int,
    ) -> None:
        copy = _copy_of(what)
        half = len(copy) // 2
        if half >= mmap.PAGESIZE:
            half -= half % mmap.PAGESIZE  # direct I/O takes nothing else
        elif len(copy) >= mmap.PAGESIZE:
            return
        _write(fd, copy[:half], offset)

    def _lost_write(self, *_call: object) -> None:
        return

    def _misdirected_write(
        self,
        _name: str,
        _call: Callable[..., Any],
        fd: int,
        what: _Bytes,
        offset: int,
    ) -> None:
        copy = _copy_of(what)
        elsewhere = self._elsewhere(fd, offset, len(copy))
        if elsewhere is not None:
            _write(fd, copy, elsewhere)

    def _misdirected_read(
        self,
        _name: str,
        call: Callable[..., Any],
        fd: int,
        what: _Bytes,
        offset: int,
    ) -> _Bytes:
        elsewhere = self._elsewhere(fd, offset, _size(what))
        return call(fd, what, offset if elsewhere is None else elsewhere)

    def _note(self, fd: int, offset: int, num_bytes: int) -> None:
        with self.faults.changed:
            self._places[fd, offset] = num_bytes
            if len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)

    def _elsewhere(self, fd: int, offset: int, num_bytes: int) -> int | None:
        """Another place in the same file where so many bytes were moved; None: there is none."""
        end = 0
        with suppress(OSError):
            end = os.fstat(fd).st_size - num_bytes
        with self.faults.changed:
            places = [
                at
                for (other, at), size in self._places.items()
                if other == fd and size == num_bytes and at != offset and at <= end
            ]
            return self.faults.random.choice(places) if places else None


_WRONG = frozenset(
    {
        Effect.SHORT_READ,
        Effect.FLIPPED_BIT,
        Effect.TORN_WRITE,
        Effect.LOST_WRITE,
        Effect.MISDIRECTED_WRITE,
        Effect.MISDIRECTED_READ,
    }
)


def _size(what: _Bytes) -> int:
    if isinstance(what, int):
        return what
    return len(what) if isinstance(what, bytes) else sum(map(len, what))


def _copy_of(what: bytes | Sequence[memoryview]) -> memoryview:
    """What is to be written, in pages of its own: the caller's bytes are others', too."""
    parts = [what] if isinstance(what, bytes) else what
    copy = memoryview(mmap.mmap(-1, max(1, _size(what))))
    at = 0
    for part in parts:
        copy[at : at + len(part)] = part
        at += len(part)
    return copy[:at]


def _write(fd: int, data: memoryview, offset: int) -> None:
    os.pwrite(fd, data, offset)
