"""Requests become numbers in a file, by a thread that the scheduler never waits for."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.traces.plain import Plain, read

from undercroft.clock import SystemClock
from undercroft.traces import recorder as module
from undercroft.traces.parts import Parts, Recorded
from undercroft.traces.recorder import RESULTS, Recorder, Told

CHUNK, BLOCK = 16, 32


class Clock(SystemClock):
    """Real, and a second further with each request."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.added_s


class Rig:
    """A recorder, and what its files hold."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder, self.clock, self.results = folder, Clock(), Counter[str]()
        self.parts = Parts(
            folder, max_bytes=1 << 20, block_tokens=BLOCK, clock=self.clock, results=self.results
        )
        self.recorder = Recorder(
            self.parts,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            clock=self.clock,
            results=self.results,
            **more,
        )
        self.ends: dict[str, dict[bytes, int]] = {}

    def start(self) -> Rig:
        self.recorder.start()
        return self

    def come(self, name: str, *tokens: int, group: bytes = b"") -> None:
        self.clock.added_s += 1
        self.ends[name] = ends_of(*tokens, group=group)
        self.recorder.came(name, self.ends[name])

    def run(self, name: str, *tokens: int, told: Told | None = None) -> None:
        """A request that comes, runs and ends."""
        self.come(name, *tokens)
        self.recorder.began([name])
        if told:
            self.recorder.tell(name, told)
        self.recorder.ended(name)

    def close(self, seconds: float = 60) -> Plain:
        self.recorder.close(SystemClock().now_s() + self.clock.added_s + seconds)
        (file,) = self.folder.glob("trace-*")
        return read(file)


def ends_of(*tokens: int, group: bytes = b"") -> dict[bytes, int]:
    """Keys of whole chunks as an engine makes them: each names its whole prefix."""
    ends: dict[bytes, int] = {}
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        ends[hashlib.sha256(repr(tokens[:end]).encode()).digest() + group] = end
    return ends


def prompt(label: int, num_tokens: int) -> list[int]:
    return [label * 1000 + index for index in range(num_tokens)]


def test_requests_become_lines(tmp_path: Path) -> None:
    """In blocks of whole chunks; what two requests share has one number."""
    rig = Rig(tmp_path).start()
    rig.run("a", *prompt(1, 100))
    rig.run("b", *prompt(1, 70), *prompt(2, 60))
    rig.run("c", *prompt(1, 100))
    rig.run("d", *prompt(3, 20))
    found = rig.close()
    assert found.blocks == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2], []]
    assert [line["in"] for line in found.lines] == [96, 128, 96, 16]
    assert [line["t"] // 1000 for line in found.lines] == [0, 1, 2, 3]
    assert rig.results == {**dict.fromkeys(RESULTS, 0), "written": 4}


def test_generated_tokens_are_no_part_of_the_prompt(tmp_path: Path) -> None:
    """Their chunks come while it runs: they are counted as output, in whole chunks."""
    rig = Rig(tmp_path).start()
    rig.come("a", *prompt(1, 70))
    rig.recorder.began(["a"])
    rig.ends["a"].update(ends_of(*prompt(1, 170)))
    rig.recorder.ended("a")
    rig.run("b", *prompt(1, 170))
    found = rig.close()
    assert found.blocks == [[0, 1], [0, 1, 2, 3, 4]]
    assert [(line["in"], line["out"]) for line in found.lines] == [(64, 96), (160, 0)]


def test_what_the_engine_tells_is_exact(tmp_path: Path) -> None:
    """Tokens, session and kind; also where a chunk came before it began to run."""
    rig = Rig(tmp_path).start()
    rig.come("a", *prompt(1, 170))
    rig.recorder.began(["a"])
    rig.recorder.tell("a", Told(67, 105, session=b"anna", kind=1))
    rig.recorder.ended("a")
    found = rig.close()
    assert found.blocks == [[0, 1]]
    assert found.lines == [{"t": 0, "in": 67, "out": 105, "p": -1, "n": 2, "s": 0, "k": 1}]


def test_an_engine_that_stops_has_ended_what_it_told_of(tmp_path: Path) -> None:
    """vLLM says so a step later, which may never come; what still runs is not recorded."""
    rig = Rig(tmp_path).start()
    for name in "ab":
        rig.come(name, *prompt(1, 64))
        rig.recorder.began([name])
    rig.recorder.tell("b", Told(64, 3))
    assert [line["out"] for line in rig.close().lines] == [3]


def test_one_group_tells_the_prefixes(tmp_path: Path) -> None:
    """The others' keys name the same, and ends within a chunk are none of a block."""
    rig = Rig(tmp_path, is_ours=lambda key: key.endswith(b"-1")).start()
    rig.come("a", *prompt(1, 64), group=b"-0")
    rig.ends["a"] |= ends_of(*prompt(1, 96), group=b"-1")
    rig.ends["a"] |= {b"a tail" + b"-1": 100}
    rig.recorder.began(["a"])
    rig.recorder.ended("a")
    found = rig.close()
    assert found.blocks == [[0, 1, 2]]
    assert found.lines[0]["in"] == 96


def test_a_chunk_that_is_not_known_ends_the_prefix(tmp_path: Path) -> None:
    """What lies beyond a gap hangs in the air: nobody knows below what."""
    rig = Rig(tmp_path).start()
    rig.come("a", *prompt(1, 160))
    rig.ends["a"] = {key: end for key, end in rig.ends["a"].items() if end != 64}
    rig.recorder.came("a", rig.ends["a"])
    rig.recorder.began(["a"])
    rig.recorder.ended("a")
    assert rig.close().blocks == [[0]]


def test_what_never_ran_is_not_there(tmp_path: Path) -> None:
    """Aborted in the queue, or unknown."""
    rig = Rig(tmp_path).start()
    rig.come("a", *prompt(1, 64))
    rig.recorder.ended("a")
    rig.recorder.ended("nobody")
    rig.recorder.tell("nobody", Told(1, 1))
    rig.recorder.began(["nobody"])
    rig.run("b", *prompt(1, 64))
    found = rig.close()
    assert len(found.lines) == 1
    assert "lost" not in found.lines[0]


def test_lines_are_in_the_order_of_arrival(tmp_path: Path) -> None:
    """Whoever ends first; and the last to end is in the right place, too."""
    rig = Rig(tmp_path).start()
    names = [str(number) for number in range(40)]
    for number, name in enumerate(names):
        rig.come(name, *prompt(1, 32 * (number + 1)))
    rig.recorder.began(names)
    random.Random(4).shuffle(names)
    for name in names:
        rig.recorder.ended(name)
    found = rig.close()
    assert [len(blocks) for blocks in found.blocks] == list(range(1, 41))
    assert [line["n"] for line in found.lines] == [1] * 40


def test_one_that_runs_for_ever_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are written once there are many, and it comes after them when it ends."""
    monkeypatch.setattr(module, "_MAX_HELD", 10)
    rig = Rig(tmp_path).start()
    rig.come("long", *prompt(9, 32))
    rig.recorder.began(["long"])
    for number in range(50):
        rig.run(str(number), *prompt(number, 32))
    until = time.monotonic() + 60
    while len(rig.recorder._held) != 10 or rig.recorder._waiting:
        assert time.monotonic() < until
        time.sleep(0.01)
    rig.recorder.ended("long")
    found = rig.close()
    assert len(found.lines) == 51
    times = [line["t"] for line in found.lines]
    assert times == sorted(times)
    assert rig.results["written"] == 51


def test_a_file_has_numbers_only(tmp_path: Path) -> None:
    """No key, whole, cut or hashed, no name of a session or a request: fields and integers."""
    rig = Rig(tmp_path).start()
    for number in range(30):
        rig.run(
            f"request-of-anna-{number}",
            *prompt(number % 3, 64 + 32 * number),
            told=Told(64 + 32 * number, 3, session=b"session-of-anna", kind=0),
        )
    keys = [key for ends in rig.ends.values() for key in ends]
    rig.close()
    (file,) = tmp_path.glob("trace-*")
    text = gzip.decompress(file.read_bytes())
    for secret in (b"anna", b"session-", *keys):
        for form in (secret, secret.hex().encode(), secret[:8].hex().encode()):
            assert form not in text
            assert form not in file.read_bytes()
    for line in text.splitlines()[1:]:
        request = json.loads(line)
        assert set(request) <= {"t", "in", "out", "p", "n", "s", "k"}
        assert all(type(value) is int and abs(value) < 10**6 for value in request.values())
    marks = {rig.parts._numbers._mark(key) for key in keys}
    assert not [mark for mark in marks if str(mark).encode() in text]


class Hung:
    """A disk on which nothing ends until it is told to."""

    def __init__(self, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.is_in = threading.Event(), threading.Event()
        add = parts.add

        def hanging(request: Recorded) -> None:
            self.is_in.set()
            assert self.may_go_on.wait(120)
            add(request)

        monkeypatch.setattr(parts, "add", hanging)


def test_a_disk_that_hangs_costs_requests_and_never_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded; each request is written or lost, and the file says how many are."""
    monkeypatch.setattr(module, "_MAX_WAITING", 100)
    rig = Rig(tmp_path)
    hung = Hung(rig.parts, monkeypatch)
    rig.start()
    rig.run("first", *prompt(1, 64))
    assert hung.is_in.wait(60)
    slowest_s = 0.0
    for number in range(1000):
        begun = time.perf_counter()
        rig.run(str(number), *prompt(1, 64))
        slowest_s = max(slowest_s, time.perf_counter() - begun)
    assert slowest_s < 1
    assert rig.results["queue_full"] == 900
    assert len(rig.recorder._waiting) == 100
    begun = time.perf_counter()
    rig.recorder.close(rig.clock.now_s() + 0.2)
    assert time.perf_counter() - begun < 30
    hung.may_go_on.set()
    found = rig.close()
    assert rig.results["written"] == len(found.lines) == 101
    assert found.header["lost"] == found.num_lost == 900
    assert [line["lost"] for line in found.lines if "lost" in line] == [900]


def test_what_waits_is_bounded_in_keys_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few very long prompts hold as much memory as many short ones."""
    monkeypatch.setattr(module, "_MAX_WAITING_KEYS", 40)
    rig = Rig(tmp_path)
    hung = Hung(rig.parts, monkeypatch)
    rig.start()
    rig.run("first", *prompt(1, 16 * 50))  # longer than all that may wait: alone it may
    assert hung.is_in.wait(60)
    for number in range(10):
        rig.run(str(number), *prompt(1, 16 * 15))
    hung.may_go_on.set()
    assert rig.results["queue_full"] == 8
    assert len(rig.close().lines) == 3


def test_a_fault_of_ours_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, counted and marked; the next request is recorded."""
    rig = Rig(tmp_path)
    add, faults = rig.parts.add, [True, True, False]

    def failing(request: Recorded) -> None:
        if faults.pop(0):
            raise KeyError("a bug")
        add(request)

    monkeypatch.setattr(rig.parts, "add", failing)
    rig.start()
    for name in "abc":
        rig.run(name, *prompt(1, 64))
    found = rig.close()
    assert [line["lost"] for line in found.lines] == [2]
    assert rig.results["not_written"] == 2
    assert "fault while recording requests" in caplog.text


def test_requests_that_nobody_describes_are_counted(tmp_path: Path) -> None:
    """They are missing, and the file says so."""
    rig = Rig(tmp_path).start()
    rig.recorder.not_told()
    rig.run("a", *prompt(1, 64))
    assert rig.close().lines[0]["lost"] == 1
    assert rig.results["not_told"] == 1


def test_nothing_is_made_before_the_first_request(tmp_path: Path) -> None:
    """An engine that serves nobody leaves no file."""
    rig = Rig(tmp_path / "t").start()
    rig.recorder.close(rig.clock.now_s() + 60)
    rig.recorder.close(rig.clock.now_s() + 60)
    assert not (tmp_path / "t").exists()
