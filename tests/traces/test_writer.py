"""The compact format is written so that a reader who knows nothing of the writer finds it all."""

from __future__ import annotations

import io
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces.plain import read

from undercroft.errors import Bug
from undercroft.traces import load
from undercroft.traces.writer import CompactWriter, Line, write_trace


class Chopped(io.BytesIO):
    """Takes some bytes at a time, and after so many of them none."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        if self.tell() + 1 > self.most_bytes:
            raise OSError(28, "No space left on device")
        return super().write(data[: min(7, self.most_bytes - self.tell())])


def random_lines(rng: random.Random, count: int) -> list[Line]:
    lines, num_blocks, time_ms = [], 0, 0
    for _ in range(count):
        time_ms += rng.choice([0, 3, 10_000])
        num_new = rng.choice([0, 1, 2, 40])
        deepest = rng.randrange(-1, num_blocks)
        optional = {
            "session": rng.choice([-1, 0, 7]),
            "kind": rng.choice([0, 1, 3]),
            "num_lost": rng.choice([0, 0, 5]),
        }
        lines.append(
            Line(time_ms, rng.randrange(10**6), rng.randrange(10**4), deepest, num_new, **optional)
        )
        num_blocks += num_new
    return lines


def as_line(line: Line) -> dict[str, int]:
    said = {
        "t": line.time_ms,
        "in": line.input_tokens,
        "out": line.output_tokens,
        "p": line.deepest,
        "n": line.num_new,
    }
    said |= {"s": line.session} if line.session >= 0 else {}
    said |= {"k": line.kind} if line.kind else {}
    return said | ({"lost": line.num_lost} if line.num_lost else {})


@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 60), member_bytes=st.integers(1, 4000))
def test_what_is_written_is_read(seed: int, count: int, member_bytes: int) -> None:
    """Every field of every line, and totals that are right, wherever the members end."""
    lines = random_lines(random.Random(seed), count)
    file = io.BytesIO()
    writer = CompactWriter(
        file, block_tokens=256, fields={"name": "x", "k": "y"}, member_bytes=member_bytes
    )
    for line in lines:
        writer.add(line)
        if writer.is_due:
            writer.flush()
    writer.finish(num_lost=2)
    found = read(file.getvalue())
    assert found.lines == [as_line(line) for line in lines]
    assert found.header["block_tokens"] == 256
    assert (found.header["name"], found.header["k"]) == ("x", "y")
    assert found.header["format"] == "prefix-delta-v1"
    assert found.header["requests"] == count
    assert found.header["lost"] == found.num_lost + 2
    assert writer.num_bytes == len(file.getvalue())


@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 60))
def test_the_reader_of_ours_reads_it_and_a_trace_is_written_whole(seed: int, count: int) -> None:
    """What `load` makes of it, written again, is the same to the last number."""
    first, second = io.BytesIO(), io.BytesIO()
    writer = CompactWriter(first, block_tokens=256, fields={"name": "x"})
    for line in random_lines(random.Random(seed), count):
        writer.add(line._replace(num_lost=0))
    writer.finish()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl.gz"
        path.write_bytes(first.getvalue())
        trace = load(path)
    assert (trace.name, trace.block_tokens) == ("x", 256)
    assert trace.num_requests == writer.num_requests == count
    assert trace.num_references == writer.num_references
    write_trace(trace, second)
    assert read(second.getvalue()) == read(first.getvalue())


def test_it_can_be_read_at_any_time() -> None:
    """After each flush the file is whole, and its header says that it has not ended."""
    lines = random_lines(random.Random(1), 300)
    file = io.BytesIO()
    writer = CompactWriter(file, block_tokens=16)
    assert read(file.getvalue()).lines == []
    for number, line in enumerate(lines, 1):
        writer.add(line)
        if number % 37 == 0:
            assert len(read(file.getvalue()).lines) == number - 37
            assert writer.num_waiting == 37
            bound = writer.num_bytes + writer.most_waiting_bytes
            writer.flush()
            assert writer.num_bytes == len(file.getvalue()) <= bound
            found = read(file.getvalue())
            assert found.lines == [as_line(each) for each in lines[:number]]
            assert "requests" not in found.header
    writer.finish()
    writer.add(lines[-1])  # the end was not the end
    writer.finish()
    assert read(file.getvalue()).header["requests"] == 301


def test_short_writes_are_gone_on_with() -> None:
    """A file may take less than it is given."""
    file = Chopped()
    writer = CompactWriter(file, block_tokens=16)
    writer.add(Line(0, 100, 1, -1, 6))
    writer.finish()
    assert read(file.getvalue()).blocks == [[0, 1, 2, 3, 4, 5]]


def test_what_was_there_before_a_failed_write_is_whole() -> None:
    """Cut to `num_bytes`, a file on a full disk is a trace without its last lines."""
    lines = random_lines(random.Random(2), 2000)
    file = Chopped(most_bytes=9000)
    writer = CompactWriter(file, block_tokens=16, member_bytes=4000)
    num_written = 0

    def fill() -> None:
        nonlocal num_written
        for line in lines:
            writer.add(line)
            if writer.is_due:
                num_waiting = writer.num_waiting
                writer.flush()
                num_written += num_waiting

    with pytest.raises(OSError, match="No space"):
        fill()
    assert writer.num_waiting == 0
    file.truncate(writer.num_bytes)
    assert 0 < writer.num_bytes < 9000
    assert read(file.getvalue()).lines == [as_line(line) for line in lines[:num_written]]
    assert num_written > 50


@pytest.mark.parametrize(
    "line", [Line(0, 1, 1, 2, 0), Line(0, 1, 1, -2, 0), Line(0, 1, 1, 0, -1), Line(-1, 1, 1, 0, 1)]
)
def test_no_trace_is_written_that_cannot_be_read(line: Line) -> None:
    """A block that no line has, and a time that goes back, are bugs of whoever writes."""
    writer = CompactWriter(io.BytesIO(), block_tokens=16)
    writer.add(Line(0, 1, 1, -1, 2))
    with pytest.raises(Bug):
        writer.add(line)


def test_a_request_takes_some_twenty_bytes() -> None:
    """Whatever the length of its prefix: a day of traffic is a few megabytes."""
    rng, file, num_blocks = random.Random(3), io.BytesIO(), 0
    writer = CompactWriter(file, block_tokens=128)
    for number in range(20_000):
        num_new = rng.randrange(12)
        deepest = rng.randrange(num_blocks) if num_blocks else -1
        writer.add(Line(150 * number, rng.randrange(200_000), rng.randrange(900), deepest, num_new))
        num_blocks += num_new
        if writer.is_due:
            writer.flush()
    writer.finish()
    assert len(file.getvalue()) < 22 * 20_000
