"""`undercroft simulate`: tables, JSON, and what it says to a wrong word."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.rig import undercroft, undercroft_json
from tests.plan.traces import sessions
from tests.sim.paths import turns
from undercroft.cli.capacities import parse_capacities
from undercroft.cli.main import main
from undercroft.sim import LevelPlan, Service, simulate
from undercroft.traces import TraceBuilder
from undercroft.traces.writer import write_trace

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


def test_kinds_are_told_or_not(tmp_path):
    """To one level alone and to a hierarchy, by the same word."""
    path = tmp_path / "turns.jsonl"
    with path.open("wb", buffering=0) as file:
        write_trace(turns(1500, 1), file)
    found = {}
    for kinds in ("all", "none"):
        words = ("simulate", "--trace", str(path), "--policy", "hazard", "--kinds", kinds)
        (alone, *_) = undercroft_json(*words, "--capacity", "600blocks")["policies"]
        levels = ("--host", "600blocks", "--bytes-per-token", "1KiB")
        (both,) = undercroft_json(*words, *levels)["policies"]
        found[kinds] = [alone["rows"][0]["block_hit_ratio"], both["block_hit_ratio"]]
    for told, not_told in zip(found["all"], found["none"], strict=True):
        assert told > not_told + 0.05


CHATS = ["--bytes-per-token", "1KiB", "--host", "16blocks", "--disk", "200blocks"]


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl.gz"
    with path.open("wb", buffering=0) as file:
        write_trace(sessions(20, 6), file)
    return str(path)


def test_levels_in_json_are_what_the_hierarchy_counts(chats):
    """Every number of the report, by level; bytes and ratios beside them."""
    words = ("simulate", "--trace", chats, *CHATS, "--policy", "lru,arc", "--warm", "25%")
    found = undercroft_json(*words, "--disk-write", "1GB", "--prefill-tokens-per-s", "100")
    assert found["trace"]["num_warm_requests"] == 30
    assert [each["policy"] for each in found["policies"]] == ["lru", "arc"]
    service = Service(1e-4, 3e9, 1e9)
    for each in found["policies"]:
        plans = [LevelPlan("host", 16, each["policy"])]
        plans.append(LevelPlan("disk", 200, each["policy"], service=service))
        report = simulate(
            sessions(20, 6), plans, bytes_per_token=1024, prefill_tokens_per_s=100, num_warm=30
        )
        assert (
            each.items()
            >= {
                **{key: value for key, value in asdict(report).items() if key != "levels"},
                "block_hit_ratio": report.block_hit_ratio,
                "token_hit_ratio": report.token_hit_ratio,
                "saved_prefill_s": report.saved_prefill_s,
            }.items()
        )
        for told, level in zip(each["levels"], report.levels, strict=True):
            assert told == {
                **asdict(level),
                "capacity_bytes": level.capacity_blocks * 16384,
                "read_bytes": level.num_read * 16384,
                "written_bytes": level.num_written * 16384,
                "write_amplification": level.write_amplification,
            }
    disk = found["policies"][0]["levels"][1]
    assert min(disk[key] for key in ("hit_blocks", "num_read", "num_written")) > 0
    assert found["optimum"]["hit_blocks"] >= found["policies"][0]["levels"][0]["hit_blocks"]


def test_people_see_each_level(chats, capsys):
    """What is found, what is moved, what is waited for; levels and both together."""
    assert main(["simulate", "--trace", chats, *CHATS, "--policy", "lru"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["host: 16 blocks, 256 KiB", "disk: 200 blocks, 3.12 MiB"]
    cells = [line.split("  ")[0].split() + line.split()[1:2] for line in lines[4:9]]
    assert [row[-1] for row in cells] == ["LEVEL", "host", "disk", "together", "together"]
    text = "\n".join(lines)
    for title in ("BLOCK HITS", "TOKEN HITS", "BYTES", "SECONDS SAVED", "READ", "WRITTEN"):
        assert title in text
    for title in ("TIMES EACH", "EVICTED", "DECLINED", "WAITED FOR DISKS", "optimum"):
        assert title in text


def test_a_share_is_of_full_blocks_where_only_those_are_left(trace, capsys):
    """Of the trace's nine blocks one is partly filled."""
    words = ["simulate", "--trace", trace, "--bytes-per-token", "1KiB", "--host", "100%"]
    for more, told in (([], "host: 9 blocks"), (["--full-blocks"], "host: 8 blocks")):
        assert main([*words, *more]) == 0
        out = capsys.readouterr().out
        assert told in out
        assert "together" not in out


def test_a_terminal_is_shown_how_far_it_is(chats):
    """A step for each request and policy, through the hook of the simulation."""
    seen = []
    report = simulate(sessions(20, 6), [LevelPlan("host", 9)], on_request=lambda: seen.append(None))
    assert len(seen) == report.num_requests == 120


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--disk", "1%"], "say how large that is, by --host"),
        (["--host", "1%", "--capacity", "1%"], "--capacity is for one level alone"),
        (["--host", "1%"], "--bytes-per-token has to say"),
        ([*CHATS, "--policy", "belady"], "--policy belady knows the future"),
        ([*CHATS, "--policy", "lrv"], "did you mean 'lru'?"),
        ([*CHATS, "--admission", "alwys"], "did you mean 'always'?"),
        ([*CHATS, "--host", "1%,2%"], "--host is one capacity"),
        ([*CHATS, "--disk", "much"], "--disk 'much' is not a capacity"),
        ([*CHATS, "--disk-latency", "-1"], "--disk-latency not below it"),
        ([*CHATS, "--disk-read", "fast"], "--disk-read is 'fast', which is not a size"),
    ],
)
def test_wrong_levels_are_named(chats, words, what, capsys):
    """Code 2, and one line that says what to write."""
    assert main(["simulate", "--trace", chats, *words]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--disk-read", "1GB"),
        ("--disk-write", "1GB"),
        ("--disk-latency", "1"),
        ("--admission", "frequency"),
        ("--prefill-tokens-per-s", "1"),
    ],
)
def test_nobody_thinks_that_one_level_alone_had_a_disk(chats, flag, value, capsys):
    """What would be ignored is refused; what says nothing new is not."""
    words = ["simulate", "--trace", chats, "--capacity", "50%"]
    assert main([*words, flag, value]) == 2
    assert f"{flag} is for the whole hierarchy" in capsys.readouterr().err
    assert main([*words, "--admission", "always"]) == 0
