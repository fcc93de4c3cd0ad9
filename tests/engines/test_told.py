"""What ranks tell the scheduler is bounded, and anything else is one documented error."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import pytest

from undercroft.engines.told import MAX_TOLD_BYTES, pack, parse_note, unpack
from undercroft.errors import ConfigError

SAID = {"stored": "canonical", "why": "", "is_less": False, "layers": [["a", "b"]]}


def test_what_is_told_is_heard() -> None:
    """Both ways, whole."""
    assert unpack(pack(SAID)) == SAID
    assert parse_note(1, pack(SAID)) == SAID


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        pack(SAID)[:-4],
        zlib.compress(b"[]"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b'{"a":' * 100_000),
        zlib.compress(b"{" + b" " * (64 << 20) + b"}"),
        zlib.compress(b"9" * 5000),
        zlib.compress(b"\xff\xfe"),
    ],
    ids=["none", "noise", "cut", "list", "deep", "deep object", "bomb", "number", "no text"],
)
def test_anything_else_is_refused_and_takes_little_memory(data: bytes) -> None:
    """A note of some KiB can unpack to gigabytes, and JSON can be deeper than the stack."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"\w"):
        unpack(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_TOLD_BYTES
    with pytest.raises(ConfigError, match="rank 3 does not say what it stores"):
        parse_note(3, data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": [[["a"]]]},
        {"layers": {"a": 1}},
        {"layers": [1]},
        {"why": 7},
        {"stored": []},
        {"stored": "another"},
    ],
)
def test_a_note_of_another_shape_names_the_rank(wrong: dict[str, object]) -> None:
    """Right JSON, wrong content."""
    with pytest.raises(ConfigError, match="rank 2 does not say"):
        parse_note(2, zlib.compress(json.dumps({**SAID, **wrong}).encode()))


def test_too_much_is_not_told() -> None:
    """The side that says it fails, rather than the one that would read it."""
    with pytest.raises(ConfigError, match="can be"):
        pack({"a": "x" * MAX_TOLD_BYTES})
