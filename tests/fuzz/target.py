"""One parser under atheris, until its time is over or it crashes; `run` starts it."""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["undercroft", "tests.fuzz.planted"]):
    from tests.fuzz.parsers import PARSERS, call, seeds
    from tests.fuzz.planted import PLANTED

_SPARE_BYTES = 1 << 30


def main() -> None:
    """The rest of the command line is libFuzzer's, its first word the folder of the corpus."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    parser = {**PARSERS, **PLANTED}[name]
    logging.disable(logging.CRITICAL)
    for number, seed in enumerate(seeds(parser)):
        (folder / f"seed-{number}").write_bytes(seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # beyond it: MemoryError, a crash
    atheris.Setup(
        [sys.argv[0], *sys.argv[2:], f"-max_len={parser.max_len}"],
        lambda data: call(parser, data),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
