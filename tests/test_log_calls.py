"""Every log call of the library is rate-limited, or here with the reason why it is rare."""

import ast
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "undercroft"
LEVELS = {"info", "warning", "error", "exception", "critical", "log"}
ONCE = "once in a process's life"
SEEN = {
    "tier %s is left out: %s": ONCE,
    "disk tier %r: threads move its chunks: %s": ONCE,
    "fault while looking at pages": ONCE,
    "internal fault, the cache is off until": ONCE,
    "fault while shutting down": ONCE,
    "the mover has broken down": ONCE,
    "%s": ONCE,
    "ready: key space %s": ONCE,
    "undercroft: %s": ONCE,
    "a copy of KV cache did not end within": ONCE,
    "this build of vLLM has no batched copy": ONCE,
    "vLLM's kernel for small pages is not used": ONCE,
    "host memory cannot be registered": ONCE,
    "host memory could not be registered": ONCE,
    "host memory: %d of %d bytes are registered": ONCE,
    "host memory: all %d bytes are registered": ONCE,
    "the device is broken, KV cache is not copied any more": ONCE,
    "fault while looking ahead; this engine does so no more": ONCE,
    "fault while looking at a step; its prefill speed is not known": ONCE,
    "fault while reading a request's keys; eviction learns less": ONCE,
    "fault while recording; requests are not recorded any more": ONCE,
    "drafter: %s": ONCE,
    "this engine does not tell its configuration": ONCE,
    "this engine's configuration cannot be read": ONCE,
    "fault in the self-check; it says no more": ONCE,
    "weights may be replaced while this engine runs": ONCE,
    "this vLLM has settings that are not known": ONCE,
    "canonical_layout was asked for": ONCE,
    "keep_across_sleep: a sleep or pause": ONCE,
    "the engine ends, and tier %s %s": ONCE,
    "nothing was served from the cache": "one for each cause, of which there are nine",
    "tier %s is left alone for now": "one a minute, by its own clock",
    "tier %s works again": "one for each of the line before",
    "a bug in tier %r; further ones": "the first only",
    "host memory of engine %s stays": ONCE,
    "removed %s, left by a dead start": "one for each dead start",
    "removed %s, the region of a dead engine": "one for each engine",
    "tier %r failed to close: %r": ONCE,
    "disk tier %r closed unflushed: %s": ONCE,
    "disk tier %r: a file could not be closed: %s": ONCE,
    "policy %s of a level of %d chunks finds less": "the first time only",
    "disk tier %r starts without its disk: %s": ONCE,
}


def plain_calls() -> list[str]:
    """The text of each call of a plain logger, which nothing limits."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        if name == "log.py" or name.startswith(("cli/", "testing/")):
            continue  # the limiter itself; processes that people start to read what they say
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            logger = node.func.value
            if node.func.attr in LEVELS and isinstance(logger, ast.Name) and logger.id == "_LOG":
                text = node.args[0]
                found.append(str(text.value) if isinstance(text, ast.Constant) else ast.dump(text))
    return found


def test_whatever_may_come_again_and_again_is_limited() -> None:
    """A new plain call has to say here why it cannot fill a log; else it is for `SparingLog`."""
    calls = plain_calls()
    assert len(calls) >= 15, "the pattern finds no calls"

    def known(call: str, text: str) -> bool:
        return call == text or (text != "%s" and call.startswith(text))

    assert not [call for call in calls if not any(known(call, text) for text in SEEN)]
    assert not [text for text in SEEN if not any(known(call, text) for call in calls)]


def test_every_logger_goes_by_one_name() -> None:
    """So that the test above sees all of them."""
    loggers = 0
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] in {"cli", "testing"}:
            continue
        lines = [line for line in path.read_text().splitlines() if "getLogger(__name__)" in line]
        assert all(line == "_LOG = logging.getLogger(__name__)" for line in lines), path
        loggers += len(lines)
        assert "logging.warning(" not in path.read_text()
    assert loggers >= 10
