"""Make the recorder that the settings ask for. Knows no engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from undercroft.clock import Clock
from undercroft.settings import Settings
from undercroft.traces.parts import Parts
from undercroft.traces.recorder import Recorder

__all__ = ["recorder_for"]


def recorder_for(
    settings: Settings,
    tokens_per_chunk: Sequence[int],
    key_ends: Sequence[bytes],
    *,
    clock: Clock,
    results: Counter[str],
    kinds: str,
) -> Recorder | None:
    """A recorder that has not started yet; None if nothing is to be recorded.

    Prefixes are told by the group with the smallest chunks: any group's keys name them.

    Args:
        settings: Where to and how much.
        tokens_per_chunk: Of each group.
        key_ends: How each group's keys end.
        clock: Time.
        results: See `Recorder`.
        kinds: What the engine's kinds of requests mean.
    """
    if settings.record is None:
        return None
    chunk_tokens = min(tokens_per_chunk)
    key_end = key_ends[tokens_per_chunk.index(chunk_tokens)]
    block_tokens = -(-settings.record_block_tokens // chunk_tokens) * chunk_tokens
    parts = Parts(
        Path(settings.record).expanduser(),
        max_bytes=settings.record_max_bytes,
        block_tokens=block_tokens,
        clock=clock,
        results=results,
        kinds=kinds,
    )
    return Recorder(
        parts,
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        clock=clock,
        results=results,
        is_ours=(lambda key: key.endswith(key_end)) if len(key_ends) > 1 else None,
    )
