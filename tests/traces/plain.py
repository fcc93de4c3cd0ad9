"""The reader that the trace format's page describes, written anew: knows nothing of the writer."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Plain:
    """A trace: its header, its lines, and each request's blocks."""

    header: dict[str, Any]
    lines: list[dict[str, int]]
    blocks: list[list[int]]
    parents: list[int]

    @property
    def num_lost(self) -> int:
        return sum(line.get("lost", 0) for line in self.lines)


def read(source: bytes | Path) -> Plain:
    data = source if isinstance(source, bytes) else source.read_bytes()
    parents: list[int] = []
    found = Plain({}, [], [], parents)
    with gzip.open(io.BytesIO(data), "rt") as text:
        found.header = json.loads(next(text))
        for line in text:
            request = json.loads(line)
            blocks, block = [], request["p"]
            while block >= 0:
                blocks.append(block)
                block = parents[block]
            blocks.reverse()
            last = request["p"]
            for _ in range(request["n"]):
                parents.append(last)
                last = len(parents) - 1
                blocks.append(last)
            found.lines.append(request)
            found.blocks.append(blocks)
    if "requests" in found.header:
        assert found.header["requests"] == len(found.lines)
        assert found.header["unique_blocks"] == len(parents)
        assert found.header["block_refs"] == sum(map(len, found.blocks))
        assert found.header["lost"] >= found.num_lost
    return found
