"""Registers the host region with the device's driver, so that copies need no bounce buffer.

What there is of the region at the start is registered before the worker is ready, the rest on a
thread of its own, piece by piece, as its pages come to exist: registering would otherwise make them
exist all at once, at the start, on one thread. The rest comes only after the scheduler has joined,
which is after the engine has captured its graphs: a driver call on another thread would break a
capture. Nobody waits for it: copies from and to what is not registered yet are right, and slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from undercroft.clock import Clock

__all__ = ["PIECE_BYTES", "HostMemory", "Pinning", "Registrar"]

PIECE_BYTES = 128 << 20
"""Of one registration. The driver holds up other calls while it registers, so not much more. No
copy may cross a multiple of it in the region."""

_POLL_S = 0.25
_STOP_S = 2.0

_LOG = logging.getLogger(__name__)


class Registrar(Protocol):
    """The driver's registration of host memory."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Whether these bytes, whole pages, can be copied without a bounce buffer from now on."""
        ...

    def unregister(self, address: int) -> None:
        """Take back the registration that began at `address`."""
        ...


class HostMemory(NamedTuple):
    """What is to be registered.

    Args:
        address: Where it begins, page-aligned.
        num_bytes: Its length.
        ready_bytes: How much of it, from its start, exists by now; grows.
    """

    address: int
    num_bytes: int
    ready_bytes: Callable[[], int]


class Pinning:
    """The registrations of one region by one process.

    Args:
        registrar: The driver; None: it has no such thing, said once.
        memory: The region.
        bind_thread: Called first on the thread that registers.
        clock: Times it, for the log.
        piece_bytes: Of one registration.

    Registers what exists at once, before it returns. If the driver refuses then, what it took is
    taken back: such a driver takes no more later. If it refuses later, what it took stays: copies
    may be using it. Either way one line says so.

    Threads: one makes and closes; `pinned_bytes` any.
    """

    def __init__(
        self,
        registrar: Registrar | None,
        *,
        memory: HostMemory,
        bind_thread: Callable[[], None],
        clock: Clock,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._registrar = registrar
        self._address, self._total_bytes, self._ready_bytes = memory
        self._bind_thread = bind_thread
        self._clock = clock
        self.piece_bytes = piece_bytes
        self._pinned_bytes = 0
        self._registered: list[int] = []
        self._begun_s = clock.now_s()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if registrar is None:
            _LOG.warning(
                "host memory cannot be registered with this device's driver: copies of KV cache go "
                "through its bounce buffers, slower, and hold up the engine"
            )
        elif not self._pin_ready(registrar):
            self._roll_back(registrar)
        elif self._pinned_bytes < memory.num_bytes:
            self._thread = threading.Thread(
                target=self._run, args=(registrar,), name="undercroft-pinning", daemon=True
            )
            self._thread.start()
        else:
            self._say_done()

    @property
    def pinned_bytes(self) -> int:
        """How much of the region, from its start, is registered. Cost: none."""
        return self._pinned_bytes

    def close(self) -> bool:
        """Take all registrations back; no copy may be under way.

        Returns:
            False if the driver did not come back from a registration: the region must stay mapped.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                return False
        if self._registrar is not None:
            self._unregister_all(self._registrar)
        return True

    def _run(self, registrar: Registrar) -> None:
        try:
            self._bind_thread()
            while not self._stopping.is_set():
                if not self._pin_ready(registrar):
                    _LOG.warning(
                        "host memory: %d of %d bytes are registered with the device's driver, it "
                        "refused the next %d: copies from and to the rest are slower, and hold up "
                        "the engine",
                        self._pinned_bytes,
                        self._total_bytes,
                        self.piece_bytes,
                    )
                    return
                if self._pinned_bytes >= self._total_bytes:
                    self._say_done()
                    return
                self._stopping.wait(_POLL_S)
        except Exception:  # noqa: BLE001 - slower copies are no reason to lose the worker
            _LOG.exception(
                "host memory: %d of %d bytes are registered with the device's driver, no more",
                self._pinned_bytes,
                self._total_bytes,
            )

    def _pin_ready(self, registrar: Registrar) -> bool:
        """Register the whole pieces that exist; False if the driver refused one."""
        while not self._stopping.is_set():
            start = self._pinned_bytes
            end = min(start + self.piece_bytes, self._total_bytes)
            if end <= start or end > self._ready_bytes():
                return True
            if not registrar.register(self._address + start, end - start):
                return False
            self._registered.append(self._address + start)
            self._pinned_bytes = end
        return True

    def _roll_back(self, registrar: Registrar) -> None:
        refused_at = self._pinned_bytes
        self._unregister_all(registrar)
        _LOG.warning(
            "host memory could not be registered with the device's driver (refused at byte %d of "
            "%d): copies of KV cache are slower, and hold up the engine",
            refused_at,
            self._total_bytes,
        )

    def _unregister_all(self, registrar: Registrar) -> None:
        self._pinned_bytes = 0
        while self._registered:
            registrar.unregister(self._registered.pop())

    def _say_done(self) -> None:
        _LOG.info(
            "host memory: all %d bytes are registered with the device's driver, after %.1f s",
            self._total_bytes,
            self._clock.now_s() - self._begun_s,
        )
