"""`undercroft simulate`: tables, JSON, and what it says to a wrong word."""

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.rig import undercroft, undercroft_json
from undercroft.cli.main import main
from undercroft.cli.simulate import parse_capacities
from undercroft.traces import TraceBuilder

LINES = [
    {"format": "prefix-delta-v1", "name": "small", "block_tokens": 16},
    {"t": 0, "in": 64, "p": -1, "n": 4},
    {"t": 1, "in": 40, "p": 1, "n": 1},
    {"t": 2, "in": 64, "p": -1, "n": 4},
    {"t": 3, "in": 64, "p": 3, "n": 0},
]
"""Blocks 0 1 2 3; 0 1 4 (partly filled); 5 6 7 8; 0 1 2 3."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(x)}\n" for x in LINES).encode()))
    return str(path)


def test_json_has_every_count(trace):
    """By policy and capacity; the bounds are rows like others."""
    found = undercroft_json(
        "simulate",
        "--trace",
        trace,
        "--policy",
        "lru,arc",
        "--capacity",
        "50%,100%,64KiB",
        "--bytes-per-token",
        "1KiB",
    )
    assert found["trace"] == {
        "path": trace,
        "name": "small",
        "num_requests": 4,
        "num_blocks": 9,
        "num_references": 15,
        "block_tokens": 16,
        "num_warm_requests": 0,
    }
    rows = {
        each["policy"]: [
            (r["capacity"], r["capacity_blocks"], r["capacity_bytes"], r["hit_blocks"])
            for r in each["rows"]
        ]
        for each in found["policies"]
    }
    sizes = [("50%", 4, 65536), ("100%", 9, 147456), ("64KiB", 4, 65536)]
    assert rows == {
        "lru": [(*size, hits) for size, hits in zip(sizes, (2, 6, 2), strict=True)],
        "arc": [(*size, hits) for size, hits in zip(sizes, (4, 6, 4), strict=True)],
        "belady": [(*size, hits) for size, hits in zip(sizes, (6, 6, 6), strict=True)],
        "unbounded": [("50%", 9, 65536, 6), ("100%", 9, 147456, 6), ("64KiB", 9, 65536, 6)],
    }
    assert all(each["cpu_s"] >= 0 < each["references_per_s"] for each in found["policies"])
    (row, *_) = found["policies"][0]["rows"]
    assert row["token_hit_ratio"] == 32 / 232
    assert row["block_hit_ratio"] == 2 / 15


def test_people_see_tables(trace, capsys):
    """Policies as asked for, then the bounds; blocks, then tokens; no line is too long."""
    capacities = "1blocks,20%,3blocks,40%,5blocks,60%,7blocks,100%"
    words = ["simulate", "--trace", trace, "--policy", "belady, arc,lru,arc"]
    assert main([*words, "--capacity", capacities]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 4 requests, 9 blocks of 16 tokens, 15 references"
    assert [line.split("  ")[0] for line in lines[2:14]] == [
        *("BLOCK HITS", "blocks", "arc", "lru", "belady", "unbounded", ""),
        *("TOKEN HITS", "blocks", "arc", "lru", "belady"),
    ]
    assert lines[3].split() == ["blocks", "1", "1", "3", "3", "5", "5", "7"]
    assert lines[7].split()[1::2] == ["40.00"] * 7
    assert max(map(len, lines)) < 80
    assert any(line.split()[:2] == ["blocks", "9"] for line in lines)


def test_a_warm_start_and_full_blocks(trace):
    """Counted is what comes after; what is partly filled is left out."""
    words = ("simulate", "--trace", trace, "--capacity", "100%")
    found = undercroft_json(*words, "--warm", "75%", "--full-blocks")
    assert found["trace"]["num_warm_requests"] == 3
    assert (found["trace"]["num_blocks"], found["trace"]["num_references"]) == (8, 14)
    lru = found["policies"][0]["rows"][0]
    assert (lru["num_requests"], lru["num_references"], lru["hit_blocks"]) == (1, 4, 4)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--policy", "lrv"), "no policies plug-in is called 'lrv': did you mean 'lru'?"),
        (("--policy", ""), "no policies plug-in is called ''"),
        (("--capacity", "much"), "--capacity 'much' is not a capacity: give a share"),
        (("--capacity", "50%,"), "--capacity '' is not a capacity"),
        (("--capacity", "-1%"), "--capacity '-1%' is not a capacity"),
        (("--capacity", "1%"), "'1%' is less than one block of the trace, which has 9 of 16"),
        (("--capacity", "0blocks"), "'0blocks' is less than one block"),
        (("--capacity", "64GiB"), "is a size, so --bytes-per-token has to say"),
        (("--bytes-per-token", "x"), "--bytes-per-token is 'x', which is not a size"),
        (("--warm", "0.1"), "--warm is '0.1', which is no percentage"),
        (("--warm", "101%"), "a trace has no more than 100%"),
        (("--format", "mooncak"), "did you mean 'mooncake'?"),
    ],
)
def test_wrong_words_are_named(trace, words, what, capsys):
    """Code 2, and one line that says what to write."""
    given = ["simulate", "--trace", trace, "--capacity", "50%"]
    assert main([*given, "=".join(words)]) == 2
    assert what in capsys.readouterr().err


def test_a_wrong_file_is_named(trace, tmp_path):
    """Code 3 where there is none, 1 where a line is wrong: file, line and why."""
    done = undercroft("simulate", "--trace", str(tmp_path / "none.gz"))
    assert done.returncode == 3
    assert "none.gz" in done.stderr
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(LINES[0])}\n{json.dumps(LINES[1] | {'p': 7})}\n")
    done = undercroft("simulate", "--trace", str(path))
    assert done.returncode == 1
    assert f"{path}, line 2: 'p' is 7, but there are only 0 blocks" in done.stderr
    path.write_text("hello\n")
    done = undercroft("simulate", "--trace", str(path))
    assert done.returncode == 1
    assert "line 1: no format is known that begins so" in done.stderr


def test_shares_are_rounded_down_and_not_by_accident():
    """7 % of 100 blocks are 7, whatever binary fractions make of it."""
    builder = TraceBuilder("t", 16)
    builder.add(range(100), time_ms=0)
    trace = builder.build()
    for percent in range(1, 101):
        (capacity,) = parse_capacities(f"{percent}%", trace, None)
        assert capacity.num_blocks == percent
    (capacity,) = parse_capacities("2.99%", trace, None)
    assert capacity.num_blocks == 2
