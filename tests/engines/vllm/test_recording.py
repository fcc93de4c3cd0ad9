"""What the real connector tells is recorded: of stock's, and of ours, which knows more."""

import re

import pytest
from rig import running
from shapes import Group, prompt
from vllm import SamplingParams
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request, RequestStatus

from tests.traces.plain import read
from undercroft.clock import SystemClock
from undercroft.engines.vllm.connector import UndercroftConnector
from undercroft.engines.vllm.recording import KINDS, kind_of, told_kind
from undercroft.traces.recorder import Recorder

HOST = {"host": "4MiB"}
NO_SPEC = {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}
HYBRID = (Group(kept=False), Group(), Group(num_layers=1, window=64))


def recorded(folder, connector=None, *, extra=None, prompts, **kwargs):
    """The trace of some prompts, and what was counted."""
    extra = {**HOST, "record": str(folder), "record_block_tokens": 32, **(extra or {})}
    with running(extra, connector=connector, **kwargs) as rig:
        for tokens, num_decode in prompts:
            rig.run(tokens, num_decode=num_decode)
        rig.settle()
        results = rig.hierarchy.counters.recorded_requests
    (file,) = folder.glob("trace-*.jsonl.gz")
    return read(file), results


PROMPTS = [
    (prompt(1, 100), 0),
    (prompt(1, 100), 40),
    ([*prompt(1, 70), *prompt(2, 60)], 0),
    (prompt(3, 20), 0),
]
BLOCKS = [[0, 1, 2], [0, 1, 2], [0, 1, 3, 4], []]


def test_with_our_connector_all_is_exact(tmp_path):
    """Tokens of prompts and answers, how it ended, and the blocks of the prompt alone."""
    found, results = recorded(tmp_path, UndercroftConnector, prompts=PROMPTS)
    assert found.blocks == BLOCKS
    assert [line["in"] for line in found.lines] == [100, 100, 130, 20]
    assert [line["out"] for line in found.lines] == [0, 40, 0, 0]
    assert [line["k"] for line in found.lines] == [5, 5, 5, 5]
    assert found.header["k"] == KINDS
    assert re.search(r"bit 0: the model ended it itself;.* 1 stop, 2 length, 3 abort", KINDS)
    assert found.header["block_tokens"] == 32
    assert results["written"] == 4
    assert results.total() == 4


@pytest.mark.parametrize(
    ("status", "stop_reason", "told", "number"),
    [
        (RequestStatus.FINISHED_STOPPED, None, 1, 1),
        (RequestStatus.FINISHED_STOPPED, "###", 0, 1),
        (RequestStatus.FINISHED_LENGTH_CAPPED, None, 0, 2),
        (RequestStatus.FINISHED_ABORTED, None, 0, 3),
        (RequestStatus.RUNNING, None, 0, 0),
    ],
)
def test_a_replay_hears_what_the_engine_told(status, stop_reason, told, number):
    """The two lowest bits, which are all that `hazard` looks at; why it ended is above them."""
    request = Request("r", [1, 2], SamplingParams(max_tokens=4), None)
    request.status, request.stop_reason = status, stop_reason
    assert told_kind(request) == told
    assert kind_of(request) & 3 == told
    assert kind_of(request) >> 2 == number


def test_with_stocks_connector_tokens_are_in_whole_chunks(tmp_path):
    """The same blocks; neither how it ended nor its session."""
    found, _ = recorded(tmp_path, prompts=PROMPTS, extra=NO_SPEC)
    assert found.blocks == BLOCKS
    assert [line["in"] for line in found.lines] == [96, 96, 128, 16]
    assert [line["out"] for line in found.lines] == [0, 32, 0, 0]
    assert all(set(line) == {"t", "in", "out", "p", "n"} for line in found.lines)


@pytest.mark.parametrize("connector", [UndercroftConnector, None])
def test_groups_share_their_prefixes(tmp_path, connector):
    """Full attention and a window: one prefix each, whatever the window has given up."""
    prompts = [(prompt(1, 512), 0), ([*prompt(1, 256), *prompt(5, 256)], 0)]
    found, _ = recorded(tmp_path, connector, prompts=prompts, groups=HYBRID)
    assert found.blocks == [list(range(16)), [*range(8), *range(16, 24)]]


def test_blocks_are_whole_chunks(tmp_path):
    """32 tokens are asked for, and chunks have 48."""
    extra = {"blocks_per_chunk": 3}
    found, _ = recorded(tmp_path, UndercroftConnector, prompts=[(prompt(1, 150), 0)], extra=extra)
    assert found.header["block_tokens"] == 48
    assert found.blocks == [[0, 1, 2]]


def test_an_aborted_request_is_recorded_if_it_ran(tmp_path):
    """One that never began to run is not."""
    extra = {**HOST, "record": str(tmp_path), "record_block_tokens": 32}
    with running(extra, connector=UndercroftConnector) as rig:
        queued = rig.submit(prompt(1, 64))
        rig.abort(queued)
        ran = rig.submit(prompt(2, 64), num_decode=9)
        rig.step()
        rig.abort(ran)
        rig.settle()
        rig.run(prompt(3, 64))
    (file,) = tmp_path.glob("trace-*")
    assert [line["k"] for line in read(file).lines] == [12, 5]


def test_nothing_is_recorded_unasked(tmp_path, monkeypatch):
    """No recorder, no thread, no file."""
    monkeypatch.chdir(tmp_path)
    with running(HOST, connector=UndercroftConnector) as rig:
        rig.run(prompt(1, 100))
        assert rig.manager.recording is None
        assert not rig.hierarchy.counters.recorded_requests
    assert list(tmp_path.iterdir()) == []


def test_a_vllm_that_keeps_keys_elsewhere_is_not_recorded(tmp_path, monkeypatch):
    """It is served, and the requests are counted as not told."""
    extra = {**HOST, "record": str(tmp_path)}
    with running(extra, connector=UndercroftConnector) as rig:
        came = rig.manager.recording.came
        monkeypatch.setattr(
            rig.manager.recording, "came", lambda context: came(ReqContextWithout(context.req_id))
        )
        rig.run(prompt(1, 100))
        assert rig.run(prompt(1, 100)).num_hit_tokens == 96
        assert rig.hierarchy.counters.recorded_requests["not_told"] == 2
    assert list(tmp_path.iterdir()) == []


class ReqContextWithout(ReqContext):
    def __init__(self, req_id):
        super().__init__(req_id)
        del self._offload_key_positions


@pytest.mark.parametrize("verb", ["came", "began", "tell", "ended"])
def test_a_fault_in_the_recorder_is_no_fault_of_the_engine(tmp_path, monkeypatch, verb, caplog):
    """Requests are served on, the cache stays on, and one line says that nothing is recorded."""

    def fail(*_args, **_kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(Recorder, verb, fail)
    extra = {**HOST, "record": str(tmp_path)}
    with running(extra, connector=UndercroftConnector) as rig:
        rig.run(prompt(1, 100))
        assert rig.run(prompt(1, 100)).num_hit_tokens == 96
        assert not rig.manager.is_off
    assert caplog.text.count("fault while recording; ") == 1


def test_a_place_that_cannot_be_written_to_is_no_fault_of_the_engine(tmp_path, caplog):
    """It starts, serves, and says once that it does not record."""
    place = tmp_path / "file"
    place.write_text("x")
    with running({**HOST, "record": str(place)}, connector=UndercroftConnector) as rig:
        rig.run(prompt(1, 100))
        assert rig.run(prompt(1, 100)).num_hit_tokens == 96
        recorder = rig.manager.recording._recorder
        recorder.close(SystemClock().now_s() + 60)
        assert rig.hierarchy.counters.recorded_requests["not_written"] == 2
    assert caplog.text.count("requests are not recorded") == 1
