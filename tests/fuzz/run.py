"""`make fuzz`: every parser for some seconds under atheris, after a check that it finds faults.

usage: python -m tests.fuzz.run SECONDS [NAME …]; crashes are kept in build/fuzz.
"""

from __future__ import annotations

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


def fuzz(name: str, seconds: int) -> tuple[bool, str]:
    """Whether it found nothing, and what it has to say."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="undercroft-fuzz-") as corpus:
        began = time.monotonic()
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
        took = time.monotonic() - began
    text = (done.stdout + done.stderr).decode(errors="replace")
    runs = re.findall(r"number_of_executed_units:\s*(\d+)|^#(\d+)", text, re.MULTILINE)
    count = max((int(a or b) for a, b in runs), default=0)
    covered = re.findall(r"cov: (\d+)", text)
    line = f"{name:<20} {took:5.0f} s {count:>9} inputs, {covered[-1] if covered else 0} edges"
    if done.returncode == 0:
        return True, f"{line}, 0 crashes"
    (KEPT / f"{name}.log").write_text(text)
    why = re.findall(r"^(\w*(?:Error|Exception|Bug)\b.*)", text, re.MULTILINE)
    return (
        False,
        f"{line}, CRASH: {why[-1] if why else f'exit {done.returncode}'} ({KEPT}/{name}.log)",
    )


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
