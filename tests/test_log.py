"""A fault that lasts does not fill the log."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from undercroft.log import SparingLog
from undercroft.testing.clock import ManualClock

LOGGER = logging.getLogger("sparing")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_one_line_a_minute_and_kind(caplog: pytest.LogCaptureFixture, clock: ManualClock) -> None:
    """The first passes; then one a minute that counts what was left out, whatever it said."""
    log = SparingLog(LOGGER, clock)
    for number in range(120):
        log.warning("chunk %d is bad", number)
        clock.advance(1)
    assert [record.getMessage() for record in caplog.records] == [
        "chunk 0 is bad",
        "chunk 60 is bad (and 59 times more since the last such line)",
    ]


def test_kinds_do_not_silence_each_other(
    caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """Another text is another kind; a kind that was quiet for a minute says nothing of others."""
    log = SparingLog(LOGGER, clock)
    log.warning("one %s", "a")
    log.warning("two")
    log.warning("one %s", "b")
    clock.advance(60)
    log.warning("two")
    assert [record.getMessage() for record in caplog.records] == ["one a", "two", "two"]


def test_a_line_names_where_it_was_written(
    caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """The record points at the caller, and carries the traceback if asked to."""
    try:
        Path("/nowhere/gone").read_bytes()
    except OSError:
        SparingLog(LOGGER, clock).warning("failed", with_traceback=True)
    (record,) = caplog.records
    assert record.filename == "test_log.py"
    assert record.levelno == logging.WARNING
    assert "gone" in caplog.text


def test_threads_share_the_minute(caplog: pytest.LogCaptureFixture, clock: ManualClock) -> None:
    """However many threads meet the fault at once, it is one line."""
    log = SparingLog(LOGGER, clock)
    threads = [threading.Thread(target=log.warning, args=("down",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1
    clock.advance(60)
    log.warning("down")
    assert "7 times more" in caplog.text
