"""Open what may hang, and go on without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from undercroft.errors import TierTimeout, TierUnavailable

__all__ = ["Opening"]

_T = TypeVar("_T")


class Opening(Generic[_T]):
    """Makes something on a thread of its own, which is left behind if that takes too long.

    Args:
        make: What is called; may hang, and raise anything.
        discard: Called there with what was made too late.
        name: The tier's, for the thread and for errors.
    """

    def __init__(
        self, make: Callable[[], _T], *, discard: Callable[[_T], object], name: str
    ) -> None:
        self._make = make
        self._discard = discard
        self._name = name
        self._lock = threading.Lock()
        self._is_late = False
        self._made: list[_T] = []
        self._error: BaseException | None = None

    def wait(self, seconds: float) -> _T:
        """What was made.

        Raises:
            TierTimeout: It was not made within `seconds`.
            TierUnavailable: There is no thread for it, or `make` raised what is no `Exception`.
            Exception: What `make` raised.
        """
        thread = threading.Thread(target=self._run, name=f"undercroft-{self._name}-open")
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError as error:
            raise TierUnavailable(f"no thread to open it: {error}", tier=self._name) from error
        thread.join(seconds)
        with self._lock:
            if self._made:
                return self._made[0]
            if self._error is None:
                self._is_late = True
                raise TierTimeout(
                    f"it did not open within {seconds:g} s: is what it needs there and answering? "
                    "Restart once it is, or raise open_deadline_s",
                    tier=self._name,
                )
        if isinstance(self._error, Exception):
            raise self._error
        raise TierUnavailable(f"{type(self._error).__name__}: {self._error}", tier=self._name)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error
            return
        with self._lock:
            if not self._is_late:
                self._made.append(made)
                return
        self._discard(made)
