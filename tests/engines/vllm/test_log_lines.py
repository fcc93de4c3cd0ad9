"""Our lines are found among vLLM's, by our name, unless the user logs in a way of their own."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from undercroft.engines.vllm.log_lines import log_where_vllm_logs


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What vLLM's handler writes; loggers are as before afterwards."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    ours, theirs = logging.getLogger("undercroft"), logging.getLogger("vllm")
    for logger in (ours, theirs):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
    ours.handlers, theirs.handlers = [], [handler]
    ours.propagate = True  # else pytest gives it handlers of its own
    theirs.setLevel(logging.INFO)
    yield stream
    ours.manager._clear_cache()


def test_lines_carry_our_name_and_place_once(written: io.StringIO) -> None:
    """Level, file and text of the line; the name even if two specs are made in one process."""
    log_where_vllm_logs()
    log_where_vllm_logs()
    logger = logging.getLogger("undercroft.hierarchy.level")
    logger.warning("tier %s is gone", "disk")
    logger.debug("not at this level")
    assert written.getvalue() == "WARNING [test_log_lines.py] undercroft: tier disk is gone\n"


def test_the_users_own_handlers_stay(written: io.StringIO) -> None:
    """Who configured the logger `undercroft` gets the lines as they are, and nobody else does."""
    mine = io.StringIO()
    ours = logging.getLogger("undercroft")
    ours.addHandler(logging.StreamHandler(mine))
    ours.propagate = False
    log_where_vllm_logs()
    logging.getLogger("undercroft.tiers").warning("%d bytes", 7)
    assert mine.getvalue() == "7 bytes\n"
    assert written.getvalue() == ""
