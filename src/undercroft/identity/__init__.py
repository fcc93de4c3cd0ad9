"""What makes two chunks the same bytes: the weights' fingerprint and the namespace manifest."""

from __future__ import annotations

from undercroft.identity.manifest import (
    EngineFacts,
    KeyHash,
    key_hash,
    namespace,
)
from undercroft.identity.weights import Fingerprint, local_folder, weights_fingerprint

__all__ = [
    "EngineFacts",
    "Fingerprint",
    "KeyHash",
    "key_hash",
    "local_folder",
    "namespace",
    "weights_fingerprint",
]
