"""Which LoRA adapter a request's chunks belong to: by content, where the engine's keys have names.

The engine hashes an adapter's name and path. Files that are overwritten in place keep both, so each
key of such a request gets a tag of the files' content in front. Which content the engine computes
with cannot be seen; it reads the files at the adapter's first use, and maybe again later. So the
tag of an adapter's id is that of the files at its first request here, and once the files differ
from those, nothing is stored or loaded for that id any more. A reload under another id, and a
restart, begin anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadKey

from undercroft.clock import Clock, SystemClock
from undercroft.identity import weights_fingerprint
from undercroft.log import SparingLog

__all__ = ["AdapterTag", "Adapters", "untagged"]

_LOG = logging.getLogger(__name__)

_MAGIC = b"\xffUCLoRA1"
"""In front of every tag; a block hash begins like this once in 2^64."""
_DIGEST_BYTES = 16
_TAG_BYTES = len(_MAGIC) + _DIGEST_BYTES
_MAX_KNOWN = 65536
"""Adapter ids of one engine; nothing is kept for more."""

_Signature = tuple[tuple[str, int, int, int], ...]


def untagged(key: bytes) -> bytes:
    """The engine's key, whether it was tagged or not."""
    return key[_TAG_BYTES:] if key.startswith(_MAGIC) else key


@dataclass(eq=False, slots=True)
class AdapterTag:
    """What is put in front of the keys of one adapter's content.

    Args:
        value: The tag.
        is_sure: Whether the engine is known to compute with that content; shared by all requests
            of the adapter's id, and may become false while they run.
    """

    value: bytes
    is_sure: bool = True

    def on(self, key: bytes) -> OffloadKey:
        """The key under this tag."""
        return OffloadKey(self.value + key)

    def on_all(self, keys: Iterable[bytes]) -> list[OffloadKey]:
        """The keys under this tag, in their order."""
        value = self.value
        return [OffloadKey(value + key) for key in keys]


@dataclass(slots=True)
class _Known:
    signature: _Signature
    tag: AdapterTag


class Adapters:
    """The tags of the adapters that requests have named so far. Threads: the scheduler's.

    Args:
        environ: The process's environment, for the place of the hub cache.
        fingerprint: Digest of the content behind a path.
        clock: For how often something is logged.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        fingerprint: Callable[[str, Mapping[str, str]], str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._environ = environ
        self._log = SparingLog(_LOG, clock or SystemClock())
        self._fingerprint = fingerprint or self._of_files
        self._known: dict[int, _Known] = {}

    def tag(self, adapter_id: int, name: str, path: str) -> AdapterTag:
        """The tag for a request that comes now.

        Cost: one look at the folder; a read of its files, whole up to 64 MiB, at the first request
        of an adapter and when its files were touched.
        """
        known = self._known.get(adapter_id)
        if known is None:
            if len(self._known) == _MAX_KNOWN:
                self._log.warning("more than %d adapters: nothing is kept for more", _MAX_KNOWN)
                return AdapterTag(_MAGIC + bytes(_DIGEST_BYTES), is_sure=False)
            known = self._read(path)
            self._known[adapter_id] = known
        elif known.tag.is_sure and known.signature != _signature(path):
            again = self._read(path)
            known.signature = again.signature
            known.tag.is_sure = again.tag.is_sure and again.tag.value == known.tag.value
        else:
            return known.tag
        if not known.tag.is_sure:
            self._log.warning(
                "the files of adapter %s changed while it was in use: which content the engine "
                "has is not known, so nothing is kept for it until it is loaded under another id",
                name,
            )
        return known.tag

    def _read(self, path: str) -> _Known:
        before = _signature(path)
        content = self._fingerprint(path, self._environ)
        after = _signature(path)
        digest = hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()
        return _Known(after, AdapterTag(_MAGIC + digest, is_sure=before == after))

    def _of_files(self, path: str, environ: Mapping[str, str]) -> str:
        found = weights_fingerprint(path, environ=environ)
        if found.note:
            self._log.warning("adapter: %s", found.note)
        return f"{found.kind} {found.value}"


def _signature(path: str) -> _Signature:
    """Changes whenever a file of the adapter does; empty for a name that is no path."""
    folder = Path(path)
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats)
