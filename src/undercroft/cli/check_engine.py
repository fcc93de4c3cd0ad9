"""What `doctor` finds out about the engine: in a process of its own, as importing it is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from undercroft.cli.findings import Finding, error, fine, note, warning
from undercroft.cli.flags import Asked
from undercroft.engines.assemble import Geometry, tokens_that_fit
from undercroft.errors import ConfigError
from undercroft.hierarchy.slots import slot_bytes_for
from undercroft.identity import key_hash, weights_fingerprint
from undercroft.settings import Settings, check_sizes, format_bytes

__all__ = ["check_engine", "check_model", "check_names", "geometry_of", "look_at"]

_DEADLINE_S = 300.0
_OUR_ERROR = f"{ConfigError.__module__}.{ConfigError.__name__}: "


def look_at(words: Sequence[str]) -> Mapping[str, Any]:
    """Look at vLLM in a process of its own.

    Args:
        words: What would follow `vllm serve`; empty to look at the installation only.

    Returns:
        What `engines.vllm.preview` found; `{"failed": line}` if it could not run.
    """
    if find_spec("vllm") is None:
        return {
            "failed": f"vLLM is not installed in this Python environment ({sys.prefix}): install "
            f"undercroft beside vLLM, or run the command of its environment"
        }
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "undercroft.engines.vllm.preview", *words],
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"vLLM could not be looked at within {_DEADLINE_S:g} s"}
    try:
        found: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"failed": f"vLLM cannot be used here: {tail[0].removeprefix(_OUR_ERROR)}"}
    return found


def check_engine(look: Mapping[str, Any]) -> Iterator[Finding]:
    """Version and platform, from `look_at`."""
    if "failed" in look:
        yield error("engine", look["failed"])
        return
    version, device = look["version"], look["device"]
    facts = {"version": version, "device": device}
    if look["doubt"]:
        yield warning("engine", look["doubt"], **facts)
    if look["device_served"]:
        yield fine("engine", f"vLLM {version} on its {device} platform", **facts)
    else:
        yield error(
            "engine",
            f"vLLM {version} runs on its {device} platform, whose KV cache this version does not "
            f"move yet; run without undercroft there",
            **facts,
        )


def check_model(
    asked: Asked, settings: Settings | None, look: Mapping[str, Any]
) -> Iterator[Finding]:
    """What a start with this model and these options would meet.

    Args:
        asked: The command line; its model is not None.
        settings: None if they are wrong; that is told elsewhere.
        look: From `look_at`, with the model.
    """
    if "failed" in look:
        return
    if look.get("refused"):
        yield error("model", look["refused"])
        return
    facts = {k: look[k] for k in ("dtype", "block_tokens", "max_model_tokens", "replicas")}
    yield fine(
        "model",
        f"{asked.model}: {look['dtype']}, {look['block_tokens']} tokens a block, up to "
        f"{look['max_model_tokens']} tokens a request",
        **facts,
    )
    if not look["prefix_caching"]:
        yield error(
            "model",
            "prefix caching is off for this model and these options, so nothing would ever be "
            "found; leave --no-enable-prefix-caching out, or run without undercroft",
        )
    if settings is None:
        return
    if settings.tiers and look.get("shutdown_timeout_s") == 0:
        yield note(
            "model",
            "told to end, vLLM kills its engine at once, and chunks on their way to the disk are "
            "lost: --shutdown-timeout 10 gives them, and running requests, the time",
        )
    geometry = geometry_of(look)
    if geometry is None:
        why = look.get("unforeseen", "vLLM does not say")
        yield note("model", f"how many tokens fit is known only after the model is loaded: {why}")
        return
    yield from _check_fit(settings, geometry, facts["max_model_tokens"])


def geometry_of(look: Mapping[str, Any]) -> Geometry | None:
    """The model's chunks as foreseen, or None."""
    chunk = look.get("chunk")
    if not chunk:
        return None
    return Geometry([chunk["bytes"]], [chunk["tokens"]], group_of=lambda _key: 0)


def _check_fit(settings: Settings, geometry: Geometry, max_tokens: int) -> Iterator[Finding]:
    try:
        check_sizes(settings, [slot_bytes_for(n) for n in geometry.chunk_bytes])
    except ConfigError as exc:
        yield error("model", exc)
        return
    chunk_bytes, chunk_tokens = geometry.chunk_bytes[0], geometry.tokens_per_chunk[0]
    levels = [("host", settings.host_bytes)]
    levels += [(t.name, t.capacity_bytes) for t in settings.tiers if t.capacity_bytes is not None]
    fits = {name: tokens_that_fit(geometry, size) for name, size in levels}
    shown = ", ".join(f"{name} about {tokens:,} tokens" for name, tokens in fits.items())
    facts = {"tokens": fits, "chunk_bytes": chunk_bytes, "chunk_tokens": chunk_tokens}
    words = (
        f"{shown}; a chunk is {format_bytes(chunk_bytes)}, {chunk_tokens} tokens "
        f"({format_bytes(chunk_bytes // chunk_tokens)} a token)"
    )
    if fits["host"] < max_tokens:
        yield warning(
            "model",
            f"{words}: one request of {max_tokens:,} tokens does not fit into host memory, so the "
            f"end of such a prompt is recomputed; raise host",
            **facts,
        )
    else:
        yield fine("model", words, **facts)


def check_names(
    asked: Asked, settings: Settings | None, look: Mapping[str, Any]
) -> Iterator[Finding]:
    """What chunks are filed under: whether replicas and restarts will find them.

    Args:
        asked: The command line.
        settings: None if they are wrong.
        look: From `look_at`.
    """
    algorithm = look.get("hash_algorithm")
    hashed = key_hash(algorithm, os.environ)
    if hashed.note:
        yield warning("keys", hashed.note, algorithm=algorithm)
    elif "PYTHONHASHSEED" in os.environ:
        yield note(
            "keys",
            "PYTHONHASHSEED is set and seeds the block hashes: replicas share chunks only if all "
            "have the same value, across restarts too",
            algorithm=algorithm,
        )
    else:
        yield fine(
            "keys",
            f"block hashes ({algorithm or 'sha256 unless you choose another'}) are the same in "
            f"every process: replicas and restarts share chunks, no PYTHONHASHSEED needed",
            algorithm=algorithm,
        )
    if asked.model is None:
        return
    fingerprint = weights_fingerprint(
        asked.model,
        model_id=settings.model_id if settings else None,
        revision=look.get("revision"),
        environ=os.environ,
    )
    facts = {"weights_kind": fingerprint.kind, "weights": fingerprint.value}
    if fingerprint.note:
        yield warning("namespace", fingerprint.note, **facts)
    else:
        words = {
            "model_id": "the weights are what model_id says they are",
            "files": "the weights are known by their content",
            "snapshot": "the weights are known by their commit in the hub cache",
        }
        yield fine(
            "namespace",
            f"{words[fingerprint.kind]} ({fingerprint.value[:40]}); engines that share chunks need "
            f"the same model, KV dtype, block size and vLLM version",
            **facts,
        )
