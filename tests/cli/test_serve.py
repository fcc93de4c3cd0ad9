"""`undercroft serve`, up to where vLLM would start."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.rig import undercroft, undercroft_json
from undercroft.cli.main import main

WORDS = ["--host", "32MiB", "--disk", "/nvme/kv:1TiB"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["M", "--host", "8EiB"], "is not a size"),
        (["M", "--host", "32G"], "which is unclear"),
        (["M", "--host", "lots", "--port", "8001"], "host is missing"),
        (["M", "--host", "1GiB", "--host", "2GiB"], "keep one"),
        (["M", "--host", "1GiB", "--set", "host=2GiB"], "given twice"),
        (["M", "--host", "1GiB", "--disk", "/nvme/kv"], "such as /nvme/kv:1TiB"),
        (["M", "--host", "1GiB", "--disk", "/nvme/kv:lots"], "is not a size"),
        (["M", "--host", "1GiB", "--disk", "/a:1GiB", "--disk", "/a:1GiB"], "two tiers"),
        (["M", "--host", "1GiB", "--set", "polcy=lru"], "did you mean 'policy'"),
        (["M", "--host", "1GiB", "--set", "policy=lfu"], "no policies plug-in is called 'lfu'"),
        (["M", "--host", "1GiB", "--kv-transfer-config", "{}"], "which write it"),
        (["M", "--kv-transfer-config", "{"], "is not JSON"),
        (["M", "--kv-transfer-config", "[" * 100_000], "is not JSON"),
        (["M", "--kv-transfer-config", '{"kv_connector_extra_config": 3}'], "must be an object"),
        (["M", "--kv-transfer-config", "{}", "--kv_transfer_config={}"], "given 2 times"),
        (["M", "--host", "1GiB", "--kv-transfer-config.kv_role", "kv_both"], "as a whole"),
        (["M", "--host", "1GiB", "--kv_transfer_config.engine_id=x"], "as a whole"),
        (["M", "--host", "9" * 5000], "more than any machine has"),
        (["M", "--host", "1GiB", "--set", f"tiers={'[' * 100_000}"], "not JSON"),
        (["--max-model-len", "4096", "M", "--host", "1GiB"], "before vLLM's options"),
        ([], "required: MODEL"),
    ],
)
def test_wrong_words_are_refused_at_once(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to write, exit code 2; vLLM is not even looked at."""
    try:
        code = main(["serve", *words])
    except SystemExit as exc:
        code = int(exc.code or 0)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert line in err


def test_what_cannot_work_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """More memory than there is: doctor's line, exit code 1, at once."""
    words = ["serve", "M", "--host", "900TiB", "--disk", f"{tmp_path}:64MiB"]
    done = undercroft(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error    memory  host is 900 TiB" in done.stderr
    assert "bounded by" in done.stderr
    assert "error: vLLM is not started: doctor found 1 error, see above" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_print_is_the_command_that_would_run(tmp_path: Path) -> None:
    """`--print` shows it, and `--json` gives it to programs; nothing is started or looked at."""
    words = ["M", "--host", "32GiB", "--disk", "/nvme/kv:1TiB", "--disk", "/sata/kv:4TiB"]
    words += ["--set", "policy=arc", "--port", "8001", "--host", "0.0.0.0", "-tp", "1"]
    shown = undercroft_json("serve", *words, "--print")
    extra = {
        "policy": "arc",
        "host": "32GiB",
        "tiers": [
            {"type": "disk", "path": "/nvme/kv", "capacity": "1TiB"},
            {"type": "disk", "path": "/sata/kv", "capacity": "4TiB"},
        ],
    }
    assert shown["kv_transfer_config"] == {
        "kv_connector": "UndercroftConnector",
        "kv_connector_module_path": "undercroft.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    command = shown["command"]
    serve = command.index("serve")
    assert command[serve + 1 : -2] == ["M", "--port", "8001", "-tp", "1", "--host", "0.0.0.0"]
    assert command[-2] == "--kv-transfer-config"
    assert json.loads(command[-1]) == shown["kv_transfer_config"]


def test_the_printed_command_is_for_a_shell() -> None:
    """What `--print` shows can be pasted: the same words as in JSON."""
    shown = undercroft_json("serve", "M", *WORDS, "--print")
    text = undercroft("serve", "M", *WORDS, "--print").stdout
    assert shlex.split(text) == shown["command"]


def test_a_transfer_config_of_ones_own_is_passed_on() -> None:
    """A user who has written the JSON gets doctor and start with it, unchanged."""
    own = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "UndercroftSpec", "host": "1GiB"},
    }
    for flag in (
        ["--kv-transfer-config", json.dumps(own)],
        [f"--kv-transfer-config={json.dumps(own)}"],
    ):
        shown = undercroft_json("serve", "M", *flag, "--print")
        assert shown["kv_transfer_config"] == own
        assert shown["command"].count("--kv-transfer-config") == 1


def test_all_that_follows_two_dashes_is_vllms() -> None:
    """Even what looks like ours."""
    shown = undercroft_json("serve", "M", "--host", "1GiB", "--print", "--", "--host", "h")
    command = shown["command"]
    assert command[command.index("M") + 1 : -2] == ["--host", "h"]


def test_keys_of_vllm_are_written_as_what_they_are() -> None:
    """vLLM takes the text "false" for true, so `--set` writes booleans and numbers."""
    words = ["--set", "canonical_layout=false", "--set", "blocks_per_chunk=4"]
    shown = undercroft_json("serve", "M", "--host", "1GiB", *words, "--print")
    extra = shown["kv_transfer_config"]["kv_connector_extra_config"]
    assert (extra["canonical_layout"], extra["blocks_per_chunk"]) == (False, 4)
