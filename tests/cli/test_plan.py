"""`undercroft plan` on the command line: tables, JSON, files, and what it says to a wrong word."""

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.rig import undercroft, undercroft_json
from tests.plan.traces import sessions
from undercroft.cli.main import main
from undercroft.sim import hit_curve
from undercroft.traces.writer import write_trace

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "dtype": "float16"}
TOKEN_BYTES = 2 * 2 * 2 * 4 * 2


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.jsonl.gz"
    with path.open("wb", buffering=0) as file:
        write_trace(sessions(30, 8), file)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


SIZES = ["--host", "32KiB..128KiB", "--disk", "0..1MiB"]


def test_json_has_every_number(trace, model, tmp_path):
    """What the simulator finds, in bytes of this model; and files that are there."""
    out = tmp_path / "out"
    found = undercroft_json(
        *("plan", "--trace", trace, "--model", model, *SIZES, "--policy", "lru,arc"),
        *("--endurance", "1DWPD", "--check", "--out", str(out)),
    )
    assert found["model"] == {
        "name": model,
        "layers": "2 of attention",
        "token_bytes": TOKEN_BYTES,
        "block_bytes": 16 * TOKEN_BYTES,
    }
    assert set(found["curves"]) == {"lru", "arc", "belady"}
    for policy, rows in found["curves"].items():
        sizes = [row["bytes"] for row in rows]
        assert sizes == [1024 * n for n in (32, 64, 128, 256, 512, 1024)]
        hits = hit_curve(sessions(30, 8), policy, [size // (16 * TOKEN_BYTES) for size in sizes])
        assert [row["hit_tokens"] for row in rows] == [each.hit_tokens for each in hits]
    assert len(found["levels"]) == 3 * 6
    assert found["command"][:3] == ["undercroft", "serve", model]
    advice, checked = found["advice"], found["checked"]
    ratio = advice["host_ratio"] + advice["disk_ratio"]
    assert checked["token_hit_ratio"] == pytest.approx(ratio, abs=0.03)
    files = [Path(name) for name in found["files"]]
    assert {file.name for file in files} >= {"plan.html", "hits.png", "levels.svg", "writes.png"}
    assert all(file.stat().st_size > 1000 for file in files)


def test_tables_and_a_command_that_serves(trace, model):
    """For people; the last line of the advice is accepted by `serve`."""
    done = undercroft("plan", "--trace", trace, "--model", model, *SIZES, "--policy", "lru")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    text = done.stdout
    assert "a-model: 2 of attention, float16: 64 bytes a token" in text
    assert "small: 240 requests in" in text
    assert "HOST MEMORY" in text
    assert "OPTIMUM" in text
    assert "TOGETHER" in text
    assert "costs 40 times as much" in text
    (line,) = (line.strip() for line in text.splitlines() if "undercroft serve" in line)
    printed = undercroft(*shlex.split(line)[1:], "--print", "--no-doctor")
    assert printed.returncode == 0, printed.stderr
    assert "--kv-transfer-config" in printed.stdout


def test_ranks_have_a_head_each(trace, model):
    """Two heads over two ranks are the same bytes; over four, twice as many."""
    sizes = ["--host", "128KiB", "--disk", "0", "--policy", "lru"]
    words = ("plan", "--trace", trace, "--model", model, *sizes, "--tensor-parallel-size")
    for num_ranks, times in (("2", 1), ("4", 2)):
        found = undercroft_json(*words, num_ranks)
        assert found["model"]["token_bytes"] == times * TOKEN_BYTES
    done = undercroft(*words, "3")
    assert done.returncode == 2
    assert "--tensor-parallel-size is 3, over which 2 KV heads do not share out" in done.stderr


def test_money_and_hosts_alone(trace):
    """Prices make columns; without a disk there is one table; bytes may be given by hand."""
    words = ["--bytes-per-token", "64", "--host", "32KiB,64KiB", "--disk", "0", "--policy", "lru"]
    prices = ["--prices", "host=4/GiB,disk=80/TiB,engine=2.5/h"]
    done = undercroft("plan", "--trace", trace, *words, *prices)
    assert done.returncode == 0, done.stderr
    assert "NET A MONTH" in done.stdout
    assert "DISK  " not in done.stdout
    assert "undercroft serve MODEL" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "by --model or by --bytes-per-token"),
        (["--model", "no/such"], "is not on this machine"),
        (["--bytes-per-token", "64", "--host", "0..1MiB"], "host memory is always there"),
        (["--bytes-per-token", "64", "--host", "1GiB..1MiB"], "which goes down"),
        (["--bytes-per-token", "64", "--policy", "lrru"], "did you mean 'lru'"),
        (["--bytes-per-token", "64", "--endurance", "lots"], "1DWPD"),
        (["--bytes-per-token", "64", "--prices", "free"], "engine=2.50/h"),
        (["--bytes-per-token", "64", "--years", "0"], "must be above 0"),
        (["--bytes-per-token", "64", "--tensor-parallel-size", "0"], "must be 1 or more"),
        (["--bytes-per-token", "64", "--host", "1"], "less than one block"),
        (["--bytes-per-token", "64", "--kv-cache-dtype", "fp9", "--model", "x"], "by --model or"),
    ],
)
def test_wrong_words(trace, words, message, capsys):
    """One line that says what to write, and code 2; nothing is replayed for long before."""
    assert main(["plan", "--trace", trace, *words]) == 2
    assert message in capsys.readouterr().err


def test_pictures_are_refused_before_the_work(trace, monkeypatch, capsys, tmp_path):
    """Who has no matplotlib learns that at once."""
    monkeypatch.setattr("undercroft.plan.pictures.find_spec", lambda _name: None)
    words = ["--bytes-per-token", "64", "--out", str(tmp_path / "out")]
    assert main(["plan", "--trace", "no-such-file", *words]) == 2
    assert "undercroft[plan]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
