"""The compact format, `prefix-delta-v1`: one JSON object a line, the first a header.

The header has `format`, and may have `name`, `block_tokens` (512), and the counts `requests`,
`unique_blocks` and `block_refs`, which then have to be right. Each line after it is a request, in
order of arrival: `t` ms since the start, `in` and `out` tokens, `p` the deepest block that an
earlier request had (-1: none), `n` how many new blocks follow it, and perhaps `s`, a session's
number, and `k`, a kind, whose meaning the header tells. New blocks are numbered in order of first
appearance. See docs/reference/traces.md.
"""

from __future__ import annotations

import json
from typing import Any

from undercroft.traces.base import Trace, TraceBuilder
from undercroft.traces.lines import Lines

__all__ = ["DEFAULT_BLOCK_TOKENS", "FORMAT", "Compact"]

FORMAT = "prefix-delta-v1"
DEFAULT_BLOCK_TOKENS = 512
_COUNTS = {
    "requests": "num_requests",
    "unique_blocks": "num_blocks",
    "block_refs": "num_references",
}


class Compact:
    """Reads the compact format."""

    name = "compact"

    def matches(self, first_line: str) -> bool:
        """See `TraceReader.matches`: the header says so, in whatever version."""
        try:
            header = json.loads(first_line)
        except (ValueError, RecursionError):
            return False
        return isinstance(header, dict) and str(header.get("format", "")).startswith("prefix-delta")

    def read(self, lines: Lines) -> Trace:
        """See `TraceReader.read`."""
        objects = lines.objects()
        header = next(objects, None)
        if header is None:
            raise lines.bad("the file is empty; it has to begin with a header")
        if header.get("format") != FORMAT:
            raise lines.bad(f"the header's format is {header.get('format')!r}; this reads {FORMAT}")
        counts = {name: lines.whole(header, name) for name in _COUNTS if name in header}
        block_tokens = lines.whole(header, "block_tokens", DEFAULT_BLOCK_TOKENS, least=1)
        builder = TraceBuilder(str(header.get("name", lines.path.name)), block_tokens)
        for fields in objects:
            _add(builder, lines, fields)
        trace = builder.build()
        for name, count in counts.items():
            found = getattr(trace, _COUNTS[name])
            if found != count:
                raise lines.bad(
                    f"the file ends here with {found} {name}, but its header says {count}: it was "
                    "cut off or changed"
                )
        return trace


def _add(builder: TraceBuilder, lines: Lines, fields: dict[str, Any]) -> None:
    deepest = lines.whole(fields, "p", least=-1)
    if deepest >= builder.num_blocks:
        raise lines.bad(f"'p' is {deepest}, but there are only {builder.num_blocks} blocks so far")
    with lines.judged():
        builder.add_path(
            deepest,
            lines.whole(fields, "n"),
            time_ms=lines.whole(fields, "t"),
            input_tokens=lines.whole(fields, "in"),
            output_tokens=lines.whole(fields, "out", 0),
            session=lines.whole(fields, "s", -1, least=-1),
            kind=lines.whole(fields, "k", 0),
        )
