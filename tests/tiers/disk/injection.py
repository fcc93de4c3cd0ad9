"""System calls that fail, lie, or kill the process at a chosen one."""

import errno
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from undercroft.tiers.disk.files import Files

EFFECTS = ("error", "full", "short", "torn", "lost", "flipped")


def flip(data: bytes, at: int) -> bytes:
    out = bytearray(data)
    if out:
        out[at % len(out)] ^= 1 << (at % 8)
    return bytes(out)


class FaultyFiles(Files):
    """Does `effect` at counted call number `at`, counting from 0; `fired` tells whether it did.

    Writes: open-to-create, pwrite, pwritev, allocate, truncate, fdatasync, unlink, rename,
    make_directories. Reads: pread, preadv. "lost" and "torn" claim success.
    """

    def __init__(self, effect: str, at: int, times: int = 1) -> None:
        self.effect, self.at, self.times = effect, at, times
        self.count = -1
        self.fired = 0
        self.log: list[str] = []

    def hit(self, name: str, able: Sequence[str]) -> bool:
        self.count += 1
        if self.effect not in able or self.count < self.at or self.fired >= self.times:
            return False
        self.fired += 1
        self.log.append(name)
        return True

    def fail(self) -> OSError:
        number = errno.ENOSPC if self.effect == "full" else errno.EIO
        return OSError(number, os.strerror(number), "injected")

    def plain(self, name: str, *args: Any, able: Sequence[str] = ("error",)) -> Any:
        if self.hit(name, able):
            if self.effect == "lost":
                return None
            raise self.fail()
        return getattr(Files, name)(self, *args)

    def open(self, path: str, flags: int) -> int:
        able = ("error", "full") if flags & os.O_CREAT else ("error",)
        return self.plain("open", path, flags, able=able)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.plain("allocate", fd, num_bytes, able=("error", "full"))

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.plain("truncate", fd, num_bytes)

    def fdatasync(self, fd: int) -> None:
        self.plain("fdatasync", fd, able=("error", "lost"))

    def unlink(self, path: str) -> None:
        self.plain("unlink", path)

    def rename(self, source: str, target: str) -> None:
        self.plain("rename", source, target)

    def make_directories(self, path: str) -> None:
        self.plain("make_directories", path, able=("error", "full"))

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        if not self.hit("pwrite", EFFECTS):
            super().pwrite(fd, data, offset)
        elif self.effect in ("error", "full"):
            raise self.fail()
        elif self.effect in ("short", "torn"):
            os.pwrite(fd, data[: len(data) // 2], offset)
            if self.effect == "short":
                self._whole(len(data) // 2, len(data))
        elif self.effect == "flipped":
            super().pwrite(fd, flip(data, self.at * 31), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if not self.hit("pwritev", EFFECTS):
            super().pwritev(fd, buffers, offset)
        elif self.effect in ("error", "full"):
            raise self.fail()
        elif self.effect in ("short", "torn"):
            os.pwritev(fd, buffers[:1], offset)
            if self.effect == "short":
                self._whole(len(buffers[0]), sum(map(len, buffers)))
        elif self.effect == "flipped":
            os.pwritev(fd, buffers, offset)
            flip_file(fd, offset + 4096 + self.at * 37 % len(buffers[1]))

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        data = self.read("pread", fd, num_bytes, offset)
        return data if isinstance(data, bytes) else b""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = self.read("preadv", fd, buffers, offset)
        return got if isinstance(got, int) else 0

    def read(self, name: str, fd: int, what: Any, offset: int) -> Any:
        hit = self.hit(name, ("error", "short", "flipped"))
        if hit and self.effect == "error":
            raise self.fail()
        got = getattr(Files, name)(self, fd, what, offset)
        if not hit:
            return got
        if self.effect == "short":
            return got[: len(got) // 2] if isinstance(got, bytes) else got // 2
        if isinstance(got, bytes):
            return flip(got, self.at * 31)
        last = what[1] if len(what) > 1 else what[0]
        last[self.at * 37 % len(last)] ^= 1
        return got


def flip_file(fd: int, at: int) -> None:
    with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class KillingFiles(Files):
    """SIGKILLs its process at counted call number `at`, in the middle of it where that can be.

    With `seed`, that is a loss of power: writes not yet made durable are undone at random, whole
    or in 512-byte sectors, before the process dies.
    """

    def __init__(self, at: int, seed: int | None, watch: Callable[[], None]) -> None:
        self.at, self.watch = at, watch
        self.count = -1
        self.random = random.Random(seed or at)
        self.power = seed is not None
        self.unsynced: list[tuple[int, int, bytes]] = []

    def die(self) -> None:
        if self.power:
            for fd, offset, old in reversed(self.unsynced):
                self.undo(fd, offset, old)
        os.kill(os.getpid(), signal.SIGKILL)

    def undo(self, fd: int, offset: int, old: bytes) -> None:
        choice = self.random.random()
        if choice < 0.4:
            return
        try:
            with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
                for start in range(0, len(old), 512):
                    if choice < 0.6 or self.random.random() < 0.5:
                        file.seek(offset + start)
                        file.write(old[start : start + 512])
        except FileNotFoundError:
            return

    def gate(self, name: str, *args: Any) -> Any:
        self.count += 1
        if self.count == self.at and self.random.random() < 0.5:
            self.die()
        out = getattr(Files, name)(self, *args)
        self.watch()
        if self.count == self.at:
            self.die()
        return out

    def remember(self, fd: int, num_bytes: int, offset: int) -> None:
        if self.power:
            with Path(f"/proc/self/fd/{fd}").open("rb", buffering=0) as file:
                file.seek(offset)
                self.unsynced.append((fd, offset, file.read(num_bytes)))

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        self.count += 1
        self.remember(fd, len(data), offset)
        if self.count == self.at:
            os.pwrite(fd, data[: self.random.randrange(len(data) + 1)], offset)
            self.die()
        Files.pwrite(self, fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.count += 1
        self.remember(fd, sum(map(len, buffers)), offset)
        if self.count == self.at:
            kept = self.random.randrange(len(buffers) + 1)
            if kept:
                os.pwritev(fd, buffers[:kept], offset)
            self.die()
        Files.pwritev(self, fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.gate("fdatasync", fd)
        self.unsynced = [write for write in self.unsynced if write[0] != fd]

    def close(self, fd: int) -> None:
        # What is closed may be undone no longer: the descriptor is gone. Fewer losses, none hidden.
        self.unsynced = [write for write in self.unsynced if write[0] != fd]
        Files.close(self, fd)

    def open(self, path: str, flags: int) -> int:
        return self.gate("open", path, flags)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.gate("allocate", fd, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.gate("truncate", fd, num_bytes)

    def unlink(self, path: str) -> None:
        self.gate("unlink", path)

    def rename(self, source: str, target: str) -> None:
        self.gate("rename", source, target)

    def make_directories(self, path: str) -> None:
        self.gate("make_directories", path)
