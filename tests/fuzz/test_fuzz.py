"""No bytes on disk or in shared memory crash their parser or make it take memory without bound."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from undercroft.errors import KvError

from .parsers import HARD, PARSERS, Parser, call, seeds
from .planted import PLANTED
from .store import open_files

HUGE = [n.to_bytes(size, "little") for n in (2**60, 2**63 - 1, 2**31, 2**32 - 1) for size in (8,)]
PIECES = [*HUGE, b"\xff" * 8, bytes(8), b"[" * 64, b"9" * 64, b"\xff\xfe", b"\x00", b"1e999"]
FEW = {"store": 40, "machine-limits": 60, "index-followed": 60, "region-control": 80}


@st.composite
def mutated(draw: st.DrawFn, corpus: list[bytes], max_len: int) -> bytes:
    """A file that the code wrote, with a few changes."""
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=16))
        keep = draw(st.sampled_from(["over", "into", "cut", "drop"]))
        end = {"over": at + len(piece), "into": at, "cut": len(data), "drop": at + 8}[keep]
        data[at:end] = b"" if keep in ("cut", "drop") else piece
    return bytes(data[:max_len])


@contextmanager
def bounded(most_bytes: int) -> Iterator[None]:
    """What runs in here takes no more memory than that at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= most_bytes, f"{peak} bytes at once"


def fuzz(parser: Parser, num_examples: int, phases: Collection[Phase] = tuple(Phase)) -> None:
    corpus = seeds(parser)

    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        report_multiple_bugs=False,
    )
    @given(st.binary(max_size=256) | mutated(corpus, parser.max_len))
    def check(data: bytes) -> None:
        with bounded(parser.most_bytes):
            call(parser, data)

    check()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Damaged files are told of; thousands of them are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", PARSERS)
def test_what_the_code_wrote_is_read(name: str) -> None:
    """The corpus is what parsers accept: else they would only be fuzzed up to the first check."""
    parser = PARSERS[name]
    for seed in parser.corpus():
        parser.run(seed)


@pytest.mark.parametrize("name", PARSERS)
def test_no_bytes_crash_a_parser_or_take_memory(name: str) -> None:
    """Only documented errors come out; lengths are judged before memory is taken for them."""
    before = open_files()
    fuzz(PARSERS[name], FEW.get(name, 150))
    assert open_files() <= before


@pytest.mark.parametrize("name", [name for name, parser in PARSERS.items() if parser.is_text])
def test_what_is_hard_for_readers_of_text_crashes_none(name: str) -> None:
    """Nesting deeper than the stack, numbers of thousands of digits, halves of characters."""
    parser = PARSERS[name]
    for hard in HARD:
        for data in (hard, b"0::/" + hard, b"memory:" + hard, b"MemTotal: " + hard):
            with bounded(parser.most_bytes):
                call(parser, data)


@pytest.mark.parametrize("name", PARSERS)
def test_lengths_that_nobody_has_take_no_memory(name: str) -> None:
    """2^60 and its like at every place where a number may stand."""
    parser = PARSERS[name]
    step = 512 if name in ("store", "machine-limits", "index-followed") else 8
    for seed in parser.corpus()[:16]:
        for at in range(0, min(len(seed), 320), step):
            for huge in HUGE:
                with bounded(parser.most_bytes):
                    call(parser, seed[:at] + huge + seed[at + 8 :])


@pytest.mark.parametrize(
    ("name", "error"), [("planted-index", IndexError), ("planted-size", MemoryError)]
)
def test_a_planted_fault_is_found(name: str, error: type[Exception]) -> None:
    """The negative control: the same search finds a parser that believes what it reads."""
    with pytest.raises((error, OverflowError, AssertionError)):
        fuzz(PLANTED[name], 2000, (Phase.generate,))


def test_an_error_that_is_not_documented_is_a_crash() -> None:
    """And one that is, is not."""

    def fail(data: bytes) -> None:
        raise KvError("documented") if data else ValueError("not")

    parser = Parser(fail, lambda: [b""])
    call(parser, b"x")
    with pytest.raises(ValueError, match="not"):
        call(parser, b"")
