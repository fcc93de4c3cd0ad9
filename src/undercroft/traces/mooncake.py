"""The traces of Mooncake, JSON lines: `timestamp` ms, `input_length`, `output_length`, `hash_ids`.

Source: https://github.com/kvcache-ai/Mooncake, `FAST25-release/traces` and `mooncake_trace.jsonl`.
Each of a request's `hash_ids` stands for 512 tokens, the last one perhaps for fewer.
"""

from __future__ import annotations

import json

from undercroft.traces.base import Trace, TraceBuilder
from undercroft.traces.lines import Lines

__all__ = ["BLOCK_TOKENS", "Mooncake"]

BLOCK_TOKENS = 512


class Mooncake:
    """Reads Mooncake's format."""

    name = "mooncake"

    def matches(self, first_line: str) -> bool:
        """See `TraceReader.matches`: it has the two fields that it cannot do without."""
        try:
            fields = json.loads(first_line)
        except (ValueError, RecursionError):
            return False
        return isinstance(fields, dict) and fields.keys() >= {"timestamp", "hash_ids"}

    def read(self, lines: Lines) -> Trace:
        """See `TraceReader.read`."""
        builder = TraceBuilder(lines.path.name, BLOCK_TOKENS)
        for fields in lines.objects():
            keys = fields.get("hash_ids")
            if not isinstance(keys, list) or not all(type(key) is int for key in keys):
                raise lines.bad("'hash_ids' has to be a list of whole numbers")
            tokens = lines.whole(fields, "input_length")
            num_blocks = -(-tokens // BLOCK_TOKENS)
            if len(keys) > num_blocks:
                raise lines.bad(
                    f"there are {len(keys)} hash_ids, but {tokens} tokens of input are only "
                    f"{num_blocks} blocks of {BLOCK_TOKENS}"
                )
            with lines.judged():
                builder.add(
                    keys,
                    time_ms=lines.whole(fields, "timestamp"),
                    input_tokens=tokens,
                    output_tokens=lines.whole(fields, "output_length", 0),
                )
        return builder.build()
