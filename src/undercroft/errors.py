"""Every error this library raises, as one tree.

::

    KvError                     .retryable .tier .key; message = what, where, what to do
    ├ ConfigError(ValueError)   wrong before any I/O, only at construction
    │ ├ UnknownPlugin           no plug-in of that name is installed
    │ └ LayoutMismatch          two layouts that cannot be the same bytes
    ├ TierError
    │ ├ TierUnavailable         the medium refused or vanished (retryable)
    │ ├ TierTimeout             no answer within the deadline (retryable)
    │ ├ TierFull                the hard bound would be exceeded
    │ └ TierClosed              used after `close()`
    ├ CorruptChunk              length, version, key or checksum differs: never retried
    ├ FormatTooNew              stored by a later format: refused, never guessed
    └ BadTrace                  a line of a trace file is wrong; names file and line
    Bug(AssertionError)         our own invariant broke; outside KvError on purpose

A miss, a full pool and a refused admission are values, not errors.
"""

from __future__ import annotations

__all__ = [
    "BadTrace",
    "Bug",
    "ConfigError",
    "CorruptChunk",
    "FormatTooNew",
    "KvError",
    "LayoutMismatch",
    "TierClosed",
    "TierError",
    "TierFull",
    "TierTimeout",
    "TierUnavailable",
    "UnknownPlugin",
]


class KvError(Exception):
    """Base of everything an engine adapter has to catch.

    Args:
        message: What happened, where, and what to do about it.
        tier: Name of the tier it happened in, if any.
        key: Key of the chunk it happened to, if one chunk is to blame.
    """

    retryable: bool = False

    def __init__(self, message: str, *, tier: str | None = None, key: bytes | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key


class ConfigError(KvError, ValueError):
    """The configuration cannot work; found before any I/O, at construction."""


class UnknownPlugin(ConfigError):
    """No plug-in of that name is installed; the message lists those that are."""


class LayoutMismatch(ConfigError):
    """Two layouts that cannot describe the same bytes."""


class TierError(KvError):
    """A tier could not do what was asked."""


class TierUnavailable(TierError):
    """The medium refused, failed or vanished; the same call may work later."""

    retryable = True


class TierTimeout(TierError):
    """No answer within the deadline; the call may still end later."""

    retryable = True


class TierFull(TierError):
    """Writing would exceed the tier's hard bound; delete something first."""


class TierClosed(TierError):
    """The tier was used after `close()`."""


class CorruptChunk(KvError):
    """Length, format version, key, namespace or checksum differ from what was stored."""


class FormatTooNew(KvError):
    """The stored format is later than this version reads."""


class BadTrace(KvError):
    """A trace file is not what a trace file is; the message names the file and the line."""


class Bug(AssertionError):
    """An invariant of ours broke. Not a `KvError`, so that no handler hides it."""
