"""What the files under a root are called."""

from __future__ import annotations

import re

__all__ = [
    "EPOCH_NAME",
    "HISTORY",
    "LEDGER_NAME",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "NAMESPACE",
    "OURS",
    "ROOT_NAME",
    "ROOT_NAMES",
    "SEGMENT",
    "TEMPORARY",
    "is_ours",
]

ROOT_NAME = "undercroft-v1"
LOCK_NAME = "lock"
LEDGER_NAME = "writes"
MANIFEST_NAME = "manifest.json"
EPOCH_NAME = "epoch"
ROOT_NAMES = frozenset({LOCK_NAME, LEDGER_NAME})
"""In the root itself, besides directories of namespaces."""
OURS = frozenset({MANIFEST_NAME, EPOCH_NAME})
NAMESPACE = re.compile(r"[0-9a-f]{32}")
SEGMENT = re.compile(r"seg-([0-9a-f]{16})(\.slab|\.index)")
HISTORY = re.compile(r"history-[0-9a-f]{16}")
TEMPORARY = re.compile(r"(seg-[0-9a-f]{16}\.index|manifest\.json)\.tmp")


def is_ours(name: str) -> bool:
    """Whether a file of that name in a namespace's directory is ours, segments aside."""
    return name in OURS or bool(HISTORY.fullmatch(name) or TEMPORARY.fullmatch(name))
