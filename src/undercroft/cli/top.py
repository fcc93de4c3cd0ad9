"""`undercroft top`: what the cache of a running vLLM does, from its `/metrics`."""

from __future__ import annotations

import argparse
import http.client
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from undercroft.cli.exposition import Reading, parse
from undercroft.cli.output import (
    Column,
    CommandFailed,
    Exit,
    Output,
    Subparsers,
    add_command,
    output_for,
    printable,
)
from undercroft.clock import SystemClock
from undercroft.errors import ConfigError
from undercroft.settings import format_bytes

__all__ = ["LevelView", "MissView", "View", "add_parser", "draw", "fetch", "run", "view_of"]

_PREFIX = "vllm:undercroft_"
_DEFAULT_URL = "http://127.0.0.1:8000/metrics"
_HOST = "host"
_NO_LEVEL = "none"
_DEADLINE_S = 5.0
_MAX_PAGE_BYTES = 16 << 20
_BAR_CELLS = 20

_DESCRIPTION = """\
Shows, anew every interval: for each level what it holds and may hold, and the bandwidth into it and
out of it; the share of lookups that were hits; what waits; the prefill time saved. Ctrl-C ends it.
With --json or --once it looks for one interval, prints, and ends; exit code 1: the cache is off."""


@dataclass(frozen=True, slots=True)
class LevelView:
    """One level; a number is None where the engine does not tell it.

    Args:
        name: `host`, or a tier's name.
        resident_bytes: Held, or about to be.
        capacity_bytes: May be held.
        in_bytes_per_s: Stored into host memory, or written to a lower level.
        out_bytes_per_s: Loaded from host memory, or read from a lower level.
        evicted_chunks_per_s: Left by choice of the level's policy.
        num_queued: Chunks that wait to be moved to or from it.
        is_usable: False while a lower level is left alone after failures.
    """

    name: str
    resident_bytes: float | None
    capacity_bytes: float | None
    in_bytes_per_s: float | None
    out_bytes_per_s: float | None
    evicted_chunks_per_s: float | None
    num_queued: float | None
    is_usable: bool


@dataclass(frozen=True, slots=True)
class MissView:
    """Lookups that missed in one way.

    Args:
        level: Where; `none` if no level has the chunk.
        reason: As in the metrics.
        num_misses: How many.
    """

    level: str
    reason: str
    num_misses: float


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is shown.

    Args:
        interval_s: What rates and `hit_ratio` are about; None: since the engine started, and then
            there are no rates.
        levels: Nearest first.
        hit_ratio: Lookups answered HIT over HIT and MISS; None without lookups in the interval.
        hit_ratio_since_start: The same, over all of the engine's life.
        misses: How many in the interval, by where and why, most first.
        num_pinned: Chunks of host memory that may not be evicted now.
        num_waiting_restores: Requests that wait for chunks of a lower level.
        num_moving: Chunks on their way to or from a lower level.
        saved_prefill_s: Estimated engine time saved since the start; None while there were hits and
            the engine has not yet seen how long it computes a token.
        saved_prefill_s_in_interval: The same, in the interval.
        is_on: False after a fault of our own.
    """

    interval_s: float | None
    levels: tuple[LevelView, ...]
    hit_ratio: float | None
    hit_ratio_since_start: float | None
    misses: tuple[MissView, ...]
    num_pinned: float | None
    num_waiting_restores: float | None
    num_moving: float | None
    saved_prefill_s: float | None
    saved_prefill_s_in_interval: float | None
    is_on: bool


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "top",
        "watch levels, hits, bandwidth and queues of a running vLLM",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--url", default=_DEFAULT_URL, help=f"where the metrics are (default: {_DEFAULT_URL})"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how often to look, and what rates are about (default: 2); 0 with --once: no rates",
    )
    parser.add_argument("--once", action="store_true", help="look for one interval, print, and end")


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    once = args.once or args.json
    least_s = 0.0 if once else 0.1
    if not (math.isfinite(args.interval) and args.interval >= least_s):
        raise ConfigError(f"--interval is {args.interval}, but must be at least {least_s} seconds")
    before = _read(args.url, output)
    if once:
        now = before
        if args.interval:
            output.clock.sleep(args.interval)
            now = _read(args.url, output)
        view = view_of(now, before if args.interval else None)
        output.data({"url": args.url, **asdict(view)})
        draw(output, view, args.url)
        return Exit.FINE if view.is_on else Exit.PROBLEM
    with suppress(KeyboardInterrupt), _screen(output):
        _watch(args.url, args.interval, before, output)
    return Exit.FINE


def _watch(url: str, interval_s: float, before: Reading, output: Output) -> None:
    """Draw anew every interval, until interrupted. A server that is away is waited for."""
    _clear(output)
    draw(output, view_of(before, None), url)
    output.stdout.flush()
    while True:
        output.clock.sleep(interval_s)
        try:
            now = _read(url, output)
        except CommandFailed as exc:
            _clear(output)
            output.say(output.paint(str(exc), "red"))
            output.stdout.flush()
            continue
        _clear(output)
        draw(output, view_of(now, before), url)
        output.stdout.flush()
        before = now


def _read(url: str, output: Output) -> Reading:
    text = fetch(url)
    if _PREFIX not in text:
        raise CommandFailed(
            f"{url} answers, but has no metrics of undercroft: is vLLM running with it "
            f"(`undercroft serve`)?",
            Exit.PROBLEM,
        )
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIX))
    return Reading(parse(lines), _PREFIX, output.clock.now_s())


def fetch(url: str) -> str:
    """The page at `url`.

    Raises:
        ConfigError: Not an HTTP address.
        CommandFailed: No answer, or another one than 200.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"--url is {url!r}: {exc}; it must be like {_DEFAULT_URL}") from exc
    makers: dict[str, Callable[..., http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    if parts.scheme not in makers or not parts.hostname:
        raise ConfigError(f"--url is {url!r}, but must be like {_DEFAULT_URL}")
    path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
    connection = makers[parts.scheme](parts.hostname, port, timeout=_DEADLINE_S)
    try:
        connection.request("GET", path, headers={"Accept": "text/plain"})
        answer = connection.getresponse()
        body = _body(answer)
    except (OSError, http.client.HTTPException, UnicodeError) as exc:
        raise CommandFailed(
            f"no answer from {url}: {str(exc) or type(exc).__name__}; is vLLM running there? "
            f"(--url says where)",
            Exit.UNREACHABLE,
        ) from exc
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise CommandFailed(f"{url} answers {answer.status} {answer.reason}", Exit.UNREACHABLE)
    return body.decode("utf-8", errors="replace")


def _body(answer: http.client.HTTPResponse) -> bytes:
    """All of it, within the deadline.

    Raises:
        OSError: It came too slowly, or was too long, or the server went away in the midst of it.
    """
    clock = SystemClock()
    ends_s = clock.now_s() + _DEADLINE_S
    parts: list[bytes] = []
    num_bytes = 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_PAGE_BYTES:
            raise OSError(f"the page has more than {_MAX_PAGE_BYTES >> 20} MiB")
        if clock.now_s() > ends_s:
            raise TimeoutError(f"the page did not come within {_DEADLINE_S:.0f} s")
    if answer.length:
        raise ConnectionError(f"the page ended {answer.length} bytes too early")
    return b"".join(parts)


def view_of(now: Reading, before: Reading | None) -> View:
    """What to show.

    Args:
        now: The last reading.
        before: An earlier one, for rates; None for none.
    """
    interval_s = None if before is None else max(now.taken_s - before.taken_s, 1e-6)
    names = now.values_of("capacity_bytes", "level") + now.values_of("level_usable", "level")
    names = sorted(dict.fromkeys(names), key=lambda name: name != _HOST)
    saved = "saved_prefill_seconds_total"
    is_unpriced = now.find(saved) == 0 and bool(now.find("hit_tokens_total"))
    return View(
        interval_s=interval_s,
        levels=tuple(_level(name, now, before, interval_s) for name in names),
        hit_ratio=_hit_ratio(now, before),
        hit_ratio_since_start=_hit_ratio(now, None),
        misses=_misses(now, before),
        num_pinned=now.find("pinned_chunks"),
        num_waiting_restores=now.find("waiting_restores"),
        num_moving=now.find("moving_chunks"),
        saved_prefill_s=None if is_unpriced else now.find(saved),
        saved_prefill_s_in_interval=None if before is None else now.grown(saved, before),
        is_on=now.find("is_on", combine=min) != 0,
    )


def _level(name: str, now: Reading, before: Reading | None, interval_s: float | None) -> LevelView:
    def rate(counter: str, labels: dict[str, str]) -> float | None:
        grown = now.grown(counter, before, labels)
        return None if interval_s is None else (grown or 0.0) / interval_s

    is_host = name == _HOST
    this = {"level": name}
    moved = {} if is_host else this
    queued = [now.find(metric, this) for metric in ("waiting_chunks", "queued_chunks")]
    told = [number for number in queued if number is not None]
    return LevelView(
        name=name,
        resident_bytes=now.find("resident_bytes", this),
        capacity_bytes=now.find("capacity_bytes", this),
        in_bytes_per_s=rate("stored_bytes_total" if is_host else "cascaded_bytes_total", moved),
        out_bytes_per_s=rate("loaded_bytes_total" if is_host else "promoted_bytes_total", moved),
        evicted_chunks_per_s=rate("evicted_chunks_total", this),
        num_queued=sum(told) if told else None,
        is_usable=now.find("level_usable", this, combine=min) != 0,
    )


def _misses(now: Reading, before: Reading | None) -> tuple[MissView, ...]:
    name = "lookup_misses_total"
    found = []
    for level in now.values_of(name, "level"):
        for reason in now.values_of(name, "reason"):
            grown = now.grown(name, before, {"level": level, "reason": reason})
            if grown:
                found.append(MissView(level, reason, grown))
    return tuple(sorted(found, key=lambda miss: -miss.num_misses))


def _hit_ratio(now: Reading, before: Reading | None) -> float | None:
    hits = now.grown("lookups_total", before, {"result": "hit"}) or 0.0
    misses = now.grown("lookups_total", before, {"result": "miss"}) or 0.0
    return hits / (hits + misses) if hits + misses else None


# --- drawing ---


def draw(output: Output, view: View, url: str) -> None:
    """One screen, for people."""
    about = "since the start" if view.interval_s is None else f"over {view.interval_s:.1f} s"
    state = output.paint("on", "green") if view.is_on else output.paint("OFF", "red", "bold")
    output.say(f"{output.paint('undercroft', 'bold')} {state}  {url}  rates {about}")
    if not view.is_on:
        output.say("a fault of undercroft turned the cache off; see the engine's log")
    output.say()
    if not view.levels:
        output.say("no request has come yet")
        return
    output.table(
        [
            Column("level"),
            Column("held", "right"),
            Column("of", "right"),
            Column(""),
            Column("in", "right"),
            Column("out", "right"),
            Column("evicted", "right"),
            Column("queue", "right"),
            Column(""),
        ],
        [_level_row(output, level) for level in view.levels],
    )
    output.say()
    output.say(
        f"hits     {_ratio(view.hit_ratio)} of lookups ({_ratio(view.hit_ratio_since_start)} "
        f"since the start){_misses_text(view)}"
    )
    output.say(
        f"host     {_count(view.num_pinned)} chunks pinned, {_count(view.num_moving)} on their "
        f"way, {_count(view.num_waiting_restores)} requests waiting for a lower level"
    )
    if view.saved_prefill_s is not None:
        lately = view.saved_prefill_s_in_interval
        more = "" if lately is None else f" ({lately:.1f} s of it now)"
        output.say(f"saved    about {view.saved_prefill_s:,.1f} s of prefill{more}")


def _level_row(output: Output, level: LevelView) -> list[str]:
    held, capacity = level.resident_bytes, level.capacity_bytes
    bar = ""
    if held is not None and capacity:
        filled = round(min(1.0, held / capacity) * _BAR_CELLS)
        bar = output.paint("#" * filled, "cyan") + "." * (_BAR_CELLS - filled)
    evicted = level.evicted_chunks_per_s
    return [
        level.name,
        "-" if held is None else format_bytes(int(held)),
        "-" if capacity is None else format_bytes(int(capacity)),
        bar,
        _rate(level.in_bytes_per_s),
        _rate(level.out_bytes_per_s),
        "-" if evicted is None else f"{evicted:,.0f}/s",
        _count(level.num_queued),
        "" if level.is_usable else output.paint("left alone", "red"),
    ]


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "-"
    in_gb = bytes_per_s / 1e9
    return f"{in_gb:.2f} GB/s" if in_gb >= 1 else f"{1000 * in_gb:.1f} MB/s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _misses_text(view: View) -> str:
    told = ((miss, "" if miss.level == _NO_LEVEL else f" ({miss.level})") for miss in view.misses)
    shown = ", ".join(f"{_count(miss.num_misses)} {miss.reason}{where}" for miss, where in told)
    return f"; misses: {printable(shown)}" if shown else ""


def _clear(output: Output) -> None:
    if output.can_redraw:
        output.stdout.write("\x1b[H\x1b[J")


@contextmanager
def _screen(output: Output) -> Iterator[None]:
    """A screen of its own on a terminal, given back at the end."""
    if not output.can_redraw:
        yield
        return
    output.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        output.stdout.write("\x1b[?25h\x1b[?1049l")
        output.stdout.flush()
