"""Mooncake's JSON lines."""

import pytest
from trace_files import write

from undercroft.errors import BadTrace
from undercroft.traces import load

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [46, 49]},
    {"timestamp": 30, "input_length": 600, "output_length": 1, "hash_ids": [49, 48]},
]


def test_reads_requests(tmp_path):
    """Ids become blocks; the same id after another one is another block."""
    trace = load(write(tmp_path / "m.jsonl", LINES))
    assert (trace.name, trace.block_tokens) == ("m.jsonl", 512)
    assert list(trace.iter_blocks()) == [[0, 1, 2], [0, 3], [4, 5]]
    assert trace.times_ms.tolist() == [0, 0, 30]
    assert trace.output_tokens.tolist() == [52, 7, 1]
    assert trace.tokens_in(trace.lengths).tolist() == [1100, 1024, 600]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hash_ids": None}, "'hash_ids' has to be a list"),
        ({"hash_ids": ["a"]}, "'hash_ids' has to be a list of whole numbers"),
        ({"hash_ids": [True, 2]}, "'hash_ids' has to be a list of whole numbers"),
        ({"hash_ids": [1, 2, 3]}, "3 hash_ids, but 600 tokens of input are only 2 blocks"),
        ({"input_length": None}, "'input_length' is missing"),
        ({"timestamp": 0.5}, "'timestamp' is 0.5"),
        ({"output_length": "x"}, "'output_length' is 'x'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, what):
    """File, line, and what is wrong with it."""
    path = write(tmp_path / "m.jsonl", [*LINES[:2], LINES[2] | change])
    with pytest.raises(BadTrace, match=f"m.jsonl, line 3: .*{what}"):
        load(path)


def test_times_do_not_go_back(tmp_path):
    """As with every format."""
    path = write(tmp_path / "m.jsonl", [LINES[2], LINES[0]])
    with pytest.raises(BadTrace, match="line 2: its time, 0 ms, is before 30 ms"):
        load(path)
