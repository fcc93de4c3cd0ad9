"""Read a small file for a caller that must not wait for a disk that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Watch"]


class Watch:
    """Calls a function on a thread of its own, and waits for it only so long.

    Even a read from the page cache can wait for the device: for the time of access to be noted, or
    because memory was short. While a call hangs, nobody waits for it a second time.

    Args:
        read: What is called. May raise anything; that counts as no answer.
        name: The thread's.

    Threads: any. The thread starts with the first call. Cost: two switches of threads, 0.1 ms.
    """

    def __init__(self, read: Callable[[], int | None], name: str) -> None:
        self._read = read
        self._name = name
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_reading = self._is_late = self._is_closed = False
        self._answer: int | None = None

    def read(self, timeout_s: float) -> int | None:
        """The function's answer; None if it has none, or none in time, or there is no thread."""
        with self._changed:
            if self._is_closed or self._is_late:
                return None
            if not self._is_reading:
                if not self._has_thread():
                    return None
                self._is_reading, self._answer = True, None
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_reading, timeout_s)
            self._is_late = self._is_reading
            return self._answer

    def close(self) -> None:
        """Let the thread go, at once unless it hangs; twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=0.1)

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads; the next call tries again
                return False
            self._thread = thread
        return True

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_reading or self._is_closed)
                if self._is_closed:
                    return
            try:
                answer = self._read()
            except Exception:  # noqa: BLE001 - the caller gets no answer, the thread lives on
                answer = None
            with self._changed:
                self._is_reading = self._is_late = False
                self._answer = answer
                self._changed.notify_all()
