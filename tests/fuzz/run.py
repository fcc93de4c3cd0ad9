"""`make fuzz`: every parser for some seconds under atheris, after a check that it finds faults.

usage: python -m tests.fuzz.run SECONDS [NAME …]; crashes are kept in build/fuzz.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .parsers import PARSERS
from .planted import PLANTED

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"
_CONTROL_S = 60
_PROCESS_S = 60
"""A search goes on in a new process after so long, from the inputs found so far. Code that atheris
instruments keeps memory at each call where it compares NumPy's numbers (the same calls
without it keep none): in minutes that reaches the bound for a parser that takes too much."""


def fuzz(name: str, seconds: int) -> tuple[bool, str]:
    """Whether it found nothing, and what it has to say."""
    KEPT.mkdir(parents=True, exist_ok=True)
    count, covered, is_quiet = 0, 0, True
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="undercroft-fuzz-") as corpus:
        while is_quiet and (left_s := math.ceil(began + seconds - time.monotonic())) > 0:
            is_quiet, text = _search(name, corpus, min(left_s, _PROCESS_S))
            runs = re.findall(r"number_of_executed_units:\s*(\d+)|^#(\d+)", text, re.MULTILINE)
            count += max((int(a or b) for a, b in runs), default=0)
            covered = max(covered, *map(int, re.findall(r"cov: (\d+)", text)), 0)
    took_s = time.monotonic() - began
    line = f"{name:<20} {took_s:5.0f} s {count:>9} inputs, {covered} edges"
    if is_quiet:
        return True, f"{line}, 0 crashes"
    log = KEPT / f"{name}.log"
    log.write_text(text)
    why = re.findall(r"^(\w*(?:Error|Exception|Bug)\b.*)", text, re.MULTILINE)
    return False, f"{line}, CRASH: {why[-1] if why else 'see the log'} ({log})"


def _search(name: str, corpus: str, seconds: int) -> tuple[bool, str]:
    """One process's part: whether it found nothing, and what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.target", name, corpus),
            f"-max_total_time={seconds}",
            f"-artifact_prefix={KEPT}/{name}-",
            *("-rss_limit_mb=4096", "-timeout=60", "-print_final_stats=1"),
        ],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")


def main() -> int:
    """0 if no parser crashed, and every planted fault was found."""
    seconds, names = int(sys.argv[1]), sys.argv[2:] or list(PARSERS)
    wrong = 0
    for name in PLANTED:
        is_quiet, line = fuzz(name, min(seconds, _CONTROL_S))
        print(f"[fuzz] {line}" + (": NOT FOUND, though planted" if is_quiet else " (planted)"))
        wrong += is_quiet
    for name in names:
        is_quiet, line = fuzz(name, seconds)
        print(f"[fuzz] {line}", flush=True)
        wrong += not is_quiet
    print(f"[fuzz] {len(names)} parsers, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
