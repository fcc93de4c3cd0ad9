"""`undercroft top`, on a page that a real vLLM gave, over real HTTP."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.rig import environment, undercroft, undercroft_json
from undercroft.cli import top
from undercroft.cli.exposition import Reading, parse
from undercroft.cli.output import CommandFailed
from undercroft.cli.top import fetch, view_of

PAGE = (Path(__file__).parents[1] / "data" / "metrics" / "vllm_0_32.txt").read_text()
PREFIX = "vllm:undercroft_"


def reading(text: str, taken_s: float = 0.0) -> Reading:
    return Reading(parse(text), PREFIX, taken_s)


def after(text: str, **changes: str) -> str:
    """The page, with other values for some samples: `name` or `name{part of the labels`."""
    lines = []
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        for start, new in changes.items():
            if line.startswith(PREFIX + start):
                value = new
        lines.append(f"{head} {value}")
    return "\n".join(lines)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves pages in turn, the last one for ever; gives the address."""
    running: list[ThreadingHTTPServer] = []

    def start(*pages: str, status: int = 200) -> str:
        left = list(pages)

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/metrics"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_once_shows_what_a_real_page_says(serve: Callable[..., str]) -> None:
    """Both levels with what they hold; ratios since the start; no rates without an interval."""
    shown = undercroft_json("top", "--url", serve(PAGE), "--interval", "0")
    host, disk = shown["levels"]
    assert (host["name"], host["resident_bytes"], host["capacity_bytes"]) == (
        "host",
        1310720,
        32 * 1024**2,
    )
    assert (disk["name"], disk["capacity_bytes"], disk["is_usable"]) == ("disk", 64 * 1024**2, True)
    assert host["in_bytes_per_s"] is None
    assert shown["hit_ratio"] == shown["hit_ratio_since_start"] == pytest.approx(20 / 21)
    assert shown["misses"] == [{"level": "none", "reason": "absent", "num_misses": 1}]
    text = undercroft("top", "--url", serve(PAGE), "--once", "--interval", "0.1").stdout
    assert "1.25 MiB" in text
    assert "95.2%" in text
    assert "\x1b" not in text


def test_rates_are_about_the_interval() -> None:
    """What grew in between, over the seconds in between; hits likewise."""
    later = after(PAGE, stored_bytes_total="11310720", loaded_bytes_total="1310720")
    later = after(later, **{'lookups_total{engine="0",model_name="tiny",result="miss"': "4.0"})
    later = after(later, **{'lookups_total{engine="0",model_name="tiny",result="hit"': "21.0"})
    later = after(later, cascaded_bytes_total="3310720", evicted_chunks_total="5")
    view = view_of(reading(later, 14.0), reading(PAGE, 10.0))
    host, disk = view.levels
    assert (host.in_bytes_per_s, host.out_bytes_per_s) == (2_500_000, 0)
    assert (disk.in_bytes_per_s, disk.out_bytes_per_s) == (500_000, 0)
    assert view.hit_ratio == 1 / 4
    assert view.hit_ratio_since_start == 21 / 25


def test_an_engine_that_started_anew_is_not_negative() -> None:
    """Counters that fell belong to a new engine: all they say is new."""
    younger = after(PAGE, stored_bytes_total="2000")
    view = view_of(reading(younger, 2.0), reading(PAGE, 0.0))
    assert view.levels[0].in_bytes_per_s == 1000


def test_several_engines_are_added_up() -> None:
    """Data parallel replicas: bytes add up, one unusable level or broken cache shows."""
    other = PAGE.replace('engine="0"', 'engine="1"')
    broken = after(other, level_usable="0.0", is_on="0.0")
    view = view_of(reading(f"{PAGE}\n{broken}"), None)
    host, disk = view.levels
    assert (host.resident_bytes, host.capacity_bytes) == (2 * 1310720, 64 * 1024**2)
    assert not disk.is_usable
    assert not view.is_on


def test_misses_are_told_by_level_and_reason(serve: Callable[..., str]) -> None:
    """What no level has names none; else the level is named. The most frequent comes first."""
    more = "".join(
        f'\n{PREFIX}lookup_misses_total{{engine="0",level="{level}",reason="{reason}"}} {number}'
        for level, reason, number in (
            ("none", "absent", 2),
            ("disk", "deadline", 7),
            ("disk", "unavailable", 0),
            ("host", "deadline", 5),
        )
    )
    view = view_of(reading(PAGE + more), None)
    assert [(miss.level, miss.reason, miss.num_misses) for miss in view.misses] == [
        ("disk", "deadline", 7),
        ("host", "deadline", 5),
        ("none", "absent", 3),
    ]
    done = undercroft("top", "--url", serve(PAGE + more), "--once", "--interval", "0")
    assert "misses: 7 deadline (disk), 5 deadline (host), 3 absent" in done.stdout


def test_newer_metrics_are_used_where_they_are() -> None:
    """Seconds saved and queues are shown by engines that tell them."""
    more = (
        f'\n{PREFIX}saved_prefill_seconds_total{{level="host"}} 3.5'
        f'\n{PREFIX}saved_prefill_seconds_total{{level="disk"}} 1.5'
        f'\n{PREFIX}waiting_chunks{{level="disk"}} 7'
        f'\n{PREFIX}queued_chunks{{level="disk",op="write"}} 2\n'
    )
    view = view_of(reading(PAGE + more, 2.0), reading(PAGE, 0.0))
    assert (view.saved_prefill_s, view.saved_prefill_s_in_interval) == (5.0, 5.0)
    assert view.levels[1].num_queued == 9
    assert view_of(reading(PAGE), None).saved_prefill_s is None


def test_what_is_saved_is_not_told_before_it_is_known() -> None:
    """After a restart hits wait for a price: no `0.0 s` beside hits, but a zero without any."""
    saved = f'\n{PREFIX}saved_prefill_seconds_total{{level="host"}} 0\n'
    without = "\n".join(line for line in PAGE.splitlines() if "hit_tokens" not in line)
    hits = f'{PREFIX}hit_tokens_total{{level="host"}} 64\n'
    assert view_of(reading(without + saved + hits), None).saved_prefill_s is None
    assert view_of(reading(without + saved), None).saved_prefill_s == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a 1", ("a", {}, 1.0)),
        ("a{} 1e3 1234567", ("a", {}, 1000.0)),
        ('a:b{x="1", y="2",} +Inf', ("a:b", {"x": "1", "y": "2"}, float("inf"))),
        (r'a{p="C:\\x\"y\n}z"} 2', ("a", {"p": 'C:\\x"y\n}z'}, 2.0)),
    ],
)
def test_the_text_format_is_understood(
    line: str, expected: tuple[str, dict[str, str], float]
) -> None:
    """Labels with commas, quotes, escapes and braces; timestamps; special numbers."""
    (sample,) = parse(f"# HELP a b\n\n{line}\nnot a sample\nx y z\n")
    assert (sample.name, dict(sample.labels), sample.value) == expected


def test_what_is_not_there_is_said(serve: Callable[..., str]) -> None:
    """No server, another answer, no undercroft, an address that is none: one line, its own code."""
    for words, code, line in (
        (["--url", "http://127.0.0.1:1/metrics"], 3, "no answer from"),
        (["--url", serve("x", status=404)], 3, "answers 404"),
        (["--url", serve("vllm:num_requests_running 1\n")], 1, "no metrics of undercroft"),
        (["--url", "127.0.0.1:8000"], 2, "must be like"),
        (["--interval", "-1"], 2, "--interval"),
    ):
        done = undercroft("top", "--once", *words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert line in done.stderr
        assert done.stderr.count("\n") == 1


def test_before_the_first_request_there_is_nothing_to_show(serve: Callable[..., str]) -> None:
    """An engine that has declared its metrics and counted nothing is no error."""
    declared = "\n".join(line for line in PAGE.splitlines() if line.startswith("#"))
    done = undercroft("top", "--once", "--interval", "0", "--url", serve(declared))
    assert (done.returncode, done.stderr) == (0, "")
    assert "no request has come yet" in done.stdout


def test_a_cache_that_is_off_is_a_problem(serve: Callable[..., str]) -> None:
    """Scripts see it in the exit code."""
    done = undercroft("top", "--once", "--interval", "0", "--url", serve(after(PAGE, is_on="0.0")))
    assert done.returncode == 1
    assert "OFF" in done.stdout


def test_on_a_terminal_it_redraws_until_interrupted(serve: Callable[..., str]) -> None:
    """Screen after screen on a screen of its own, which Ctrl-C gives back; exit code 0."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "undercroft", "top", "--interval", "0.2", "--url", serve(PAGE)],
        env=environment(TERM="xterm"),
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    with process:
        os.close(theirs)
        seen = b""
        try:
            while seen.count(b"\x1b[H\x1b[J") < 3:
                seen += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            while b"\x1b[?1049l" not in seen:
                seen += os.read(ours, 65536)
            assert process.wait(timeout=100) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
            os.close(ours)
    assert seen.startswith(b"\x1b[?1049h")
    assert b"disk" in seen
    assert b"\x1b[36m" in seen, "no colours"


NO_NUMBERS = ("NaN", "+Inf", "-Inf", "1e999")


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_left_out(serve: Callable[..., str], value: str) -> None:
    """No fault, and JSON that others can read too."""
    url = serve(re.sub(r" [-+0-9.e]+$", f" {value}", PAGE, flags=re.MULTILINE))
    assert undercroft("top", "--once", "--interval", "0", "--url", url).returncode == 0
    done = undercroft("top", "--json", "--interval", "0", "--url", url)
    json.loads(done.stdout, parse_constant=pytest.fail)


def test_names_from_the_server_cannot_move_the_cursor(serve: Callable[..., str]) -> None:
    """Nor colour anything."""
    url = serve(PAGE.replace('level="disk"', 'level="\x1b[31m\x1b[2Jdisk"'))
    assert "\x1b" not in undercroft("top", "--once", "--interval", "0", "--url", url).stdout


def test_a_page_that_ends_too_early_is_no_answer(raw_server: Callable[[bytes], str]) -> None:
    """Half of the metrics would look like a cache that does nothing."""
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PAGE.encode())}\r\n\r\n"
    url = raw_server(head.encode() + PAGE.encode()[:-100])
    done = undercroft("top", "--once", "--interval", "0", "--url", url)
    assert done.returncode == 3
    assert "100 bytes too early" in done.stderr


def test_a_page_that_drips_is_not_waited_for(
    raw_server: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for all of it."""
    monkeypatch.setattr(top, "_DEADLINE_S", 1.0)
    with pytest.raises(CommandFailed, match="did not come within"):
        fetch(raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000, pause_s=0.02))


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://[::1", f"http://{'a' * 300}:1/", "ftp://x", "http://"]
)
def test_a_bad_address_is_no_fault(url: str) -> None:
    """Wrong usage, or nobody there."""
    done = undercroft("top", "--once", "--url", url)
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr


@pytest.fixture
def raw_server() -> Iterator[Callable[..., str]]:
    """Answers with these very bytes, one by one with pauses if told so, and hangs up."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve_raw(answer: bytes, pause_s: float = 0.0) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer_all() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(65536)
                        if not pause_s:
                            connection.sendall(answer)
                            continue
                        for byte in answer:
                            connection.sendall(bytes([byte]))
                            time.sleep(pause_s)

        threads.append(threading.Thread(target=answer_all, daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    yield serve_raw
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def test_a_dumb_terminal_gets_no_escapes(serve: Callable[..., str]) -> None:
    """One screen below the other, without moving the cursor."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "undercroft", "top", "--interval", "0.1", "--url", serve(PAGE)],
        env=environment(TERM="dumb"),
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while seen.count(b"rates") < 3:
                seen += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=100) == 0
        finally:
            process.kill()
            os.close(ours)
    assert b"\x1b" not in seen
