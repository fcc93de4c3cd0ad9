"""Small trace files for tests."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from undercroft.traces import Trace, TraceBuilder

HEADER = {"format": "prefix-delta-v1", "name": "small", "block_tokens": 16}


def write(path: Path, lines: Iterable[object], *, zipped: bool = False) -> Path:
    """Each of `lines` as JSON, text as it is."""
    text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines)
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def trace_of(requests: Iterable[Sequence[object]], block_tokens: int = 16) -> Trace:
    """Requests one second apart, their blocks by any keys, root first."""
    builder = TraceBuilder("made", block_tokens)
    for number, keys in enumerate(requests):
        builder.add(keys, time_ms=1000 * number)
    return builder.build()
