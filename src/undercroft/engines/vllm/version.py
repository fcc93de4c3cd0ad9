"""Which vLLM this adapter is for, and what a user of another one is told."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from undercroft.errors import ConfigError

__all__ = ["SERVED", "doubt", "explain", "own_version"]

SERVED = ("0.32", "0.33")
"""The minor versions whose interface this adapter is written against."""

_WORDS = f"Undercroft is written for vLLM {' and '.join(SERVED)}"


def own_version() -> str:
    """Of this library, as it is installed; empty if it is not."""
    try:
        return version("undercroft")
    except PackageNotFoundError:
        return ""


def doubt(engine_version: str) -> str | None:
    """One line to warn with if vLLM `engine_version` is not one we know; None for versions we do.

    A version without a number at its front, as of a build from source, is believed.
    """
    found = re.match(r"(\d+\.\d+)\.", engine_version + ".")
    if found is None or found[1] in SERVED:
        return None
    return f"{_WORDS}; this is {engine_version}, which it was not tested with"


def explain(error: ImportError) -> ImportError | ConfigError:
    """The error to raise when the adapter cannot be imported: one line if vLLM is to blame."""
    module = error.name or ""
    if module.partition(".")[0] != "vllm":
        return error
    if module == "vllm":
        return ConfigError(f"{_WORDS}, and no vLLM is installed here: install Undercroft beside it")
    try:
        here = str(import_module("vllm.version").__version__)
    except ImportError:
        here = "of unknown version"
    return ConfigError(
        f"{_WORDS}, and the one here ({here}) lacks something it needs ({error}): install "
        "one of those, or a release of Undercroft that is made for yours"
    )
