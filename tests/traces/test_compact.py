"""The compact format: what is read, and each way in which a line can be wrong."""

import gzip

import pytest
from trace_files import HEADER, write

from undercroft.errors import BadTrace
from undercroft.traces import load

COUNTS = {"requests": 3, "unique_blocks": 5, "block_refs": 8}
REQUESTS = [
    {"t": 0, "in": 48, "out": 9, "p": -1, "n": 3},
    {"t": 0, "in": 40, "p": 1, "n": 1, "s": 4, "k": 3},
    {"t": 70, "in": 48, "out": 2, "p": 0, "n": 1},
]


@pytest.mark.parametrize("zipped", [False, True])
def test_reads_requests_and_header(tmp_path, zipped):
    """Plain or gzip, whatever its name says."""
    trace = load(write(tmp_path / "x.txt", [HEADER | COUNTS, *REQUESTS], zipped=zipped))
    assert (trace.name, trace.block_tokens) == ("small", 16)
    assert list(trace.iter_blocks()) == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert trace.times_ms.tolist() == [0, 0, 70]
    assert trace.sessions.tolist() == [-1, 4, -1]
    assert trace.kinds.tolist() == [0, 3, 0]
    assert trace.input_tokens.tolist() == [48, 40, 48]
    assert trace.output_tokens.tolist() == [9, 0, 2]


def test_a_header_may_say_little(tmp_path):
    """512 tokens a block, the file's name, and no counts to compare with."""
    trace = load(write(tmp_path / "bare.jsonl", [{"format": "prefix-delta-v1"}, "", *REQUESTS]))
    assert (trace.name, trace.block_tokens, trace.num_references) == ("bare.jsonl", 512, 8)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "list, not a JSON object"),
        ("9" * 5000, "not JSON"),
        ({"t": 1, "in": 1, "p": 0}, "'n' is missing"),
        ({"t": 1, "in": 1, "p": 0, "n": None}, "'n' is missing"),
        ({"t": "1", "in": 1, "p": 0, "n": 1}, "'t' is '1', not a whole number"),
        ({"t": 1, "in": 1.5, "p": 0, "n": 1}, "'in' is 1.5, not"),
        ({"t": 1, "in": True, "p": 0, "n": 1}, "'in' is True, not"),
        ({"t": 1, "in": 1, "p": 4, "n": 1}, "'p' is 4, but there are only 4 blocks"),
        ({"t": 1, "in": 1, "p": -2, "n": 1}, "'p' is -2, but must be -1 to"),
        ({"t": 1, "in": 1, "p": 0, "n": -1}, "'n' is -1, but must be 0 to"),
        ({"t": 1, "in": 1, "p": 0, "n": 1 << 30}, "1073741824 new blocks"),
        ({"t": -1, "in": 1, "p": 0, "n": 1}, "'t' is -1"),
        ({"t": 1, "in": 1 << 63, "p": 0, "n": 1}, "'in' is 9223372036854775808, but"),
        ({"t": 1, "in": 10**400, "p": 0, "n": 1}, "'in' is too large, but"),
        ({"t": 1, "in": 1, "p": 0, "n": 1, "k": 1 << 20}, "a number is too large"),
        ({"t": 1, "in": 1, "out": -1, "p": 0, "n": 1}, "'out' is -1"),
        ({"t": 1, "in": 1, "p": 0, "n": 1, "s": -2}, "'s' is -2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, what):
    """File, number of the line, and what is wrong; nothing is guessed."""
    path = write(tmp_path / "wrong.jsonl", [HEADER, *REQUESTS[:2], line])
    with pytest.raises(BadTrace) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}, line 4: ")
    assert what in str(raised.value)


def test_times_do_not_go_back(tmp_path):
    """A policy that learns waiting times would learn nonsense."""
    path = write(tmp_path / "back.jsonl", [HEADER, REQUESTS[2] | {"p": -1}, "", REQUESTS[0]])
    with pytest.raises(BadTrace, match=r"back.jsonl, line 4: its time, 0 ms, is before 70 ms"):
        load(path)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_header_have_to_be_right(tmp_path, name):
    """A file that was cut at a line's end is found out."""
    path = write(tmp_path / "cut.jsonl", [HEADER | COUNTS, *REQUESTS[:-1]])
    with pytest.raises(BadTrace, match=r"cut.jsonl, line 3: the file ends here with 2 requests"):
        load(path)
    path = write(path, [HEADER | {name: COUNTS[name] + 1}, *REQUESTS])
    with pytest.raises(BadTrace, match=f"line 4: .* {COUNTS[name]} {name}, .*{COUNTS[name] + 1}"):
        load(path)


@pytest.mark.parametrize("num_missing", [1, 9, 40])
def test_a_truncated_gzip_is_an_error_and_no_shorter_trace(tmp_path, num_missing):
    """Wherever it was cut."""
    path = write(tmp_path / "x.gz", [HEADER, *REQUESTS], zipped=True)
    path.write_bytes(path.read_bytes()[:-num_missing])
    with pytest.raises(BadTrace, match=r"x.gz, line \d: the compressed data end early"):
        load(path, "compact")


def test_damaged_gzip_is_an_error(tmp_path):
    """Its own checksum is looked at."""
    path = write(tmp_path / "x.gz", [HEADER, *REQUESTS], zipped=True)
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadTrace, match=r"line \d: the compressed data .* are damaged.*CRC"):
        load(path)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ({"format": "prefix-delta-v2"}, "'prefix-delta-v2'; this reads prefix-delta-v1"),
        (HEADER | {"block_tokens": 0}, "'block_tokens' is 0, but must be 1"),
        (HEADER | {"requests": "3"}, "'requests' is '3', not a whole number"),
    ],
)
def test_a_wrong_header_is_named(tmp_path, header, what):
    """Line 1; a later version is not read as this one."""
    path = write(tmp_path / "x.jsonl", [header, *REQUESTS])
    with pytest.raises(BadTrace, match=f"x.jsonl, line 1: .*{what}"):
        load(path)


def test_text_that_is_none_is_an_error(tmp_path):
    """Not UTF-8; a line without end."""
    path = tmp_path / "x.jsonl"
    head = gzip.decompress(write(path, [HEADER], zipped=True).read_bytes())
    path.write_bytes(head + b'{"t": "\xff"}\n')
    with pytest.raises(BadTrace, match="line 2: it is not UTF-8"):
        load(path)
    path.write_bytes(gzip.compress(head + b" " * (17 << 20)))
    with pytest.raises(BadTrace, match="line 2: it is longer than 16 MiB"):
        load(path)
