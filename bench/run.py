"""Run benchmarks: ours and its peers side by side, in one run.

    python bench/run.py                     every case
    python bench/run.py disk scheduler      some
    python bench/run.py --list              which there are
    python bench/run.py disk --against stock --rounds 15 --json results.json

Exit status: 0; 1 if a case was void, because ours differed from itself; 2 for wrong usage. A goal
that was missed is marked `MISSED`, and is no error: the machine may be busy, the goals are for a
quiet one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
from cases import CASES


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.list:
        for case in CASES:
            print(f"{case.name:12} {case.about}")
        return 0
    known = {case.name: case for case in CASES}
    wrong = [name for name in args.cases if name not in known]
    if wrong:
        print(f"no case is called {wrong[0]}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    options = harness.Options(Path(args.path), args.rounds, args.quick, args.chunks)
    told: dict[str, Any] = {"host": harness.host(), "cases": {}}
    num_void = 0
    for name in args.cases or known:
        case_told = _run(known[name], options, args.against)
        num_void += case_told["void"]
        told["cases"][name] = case_told
        if args.json:
            args.json.write_text(json.dumps(told, indent=1))
    return 1 if num_void else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--against", metavar="BASE", help="only rows against this side")
    parser.add_argument("--rounds", type=int, help="how often each side runs")
    parser.add_argument("--quick", action="store_true", help="see that it runs; no speeds")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="in the large indexes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser.parse_args(argv)


def _run(case: harness.Case, options: harness.Options, against: str | None) -> dict[str, Any]:
    rounds = options.rounds or (2 if options.quick else case.rounds)
    print(f"{case.name}: {case.about}; {rounds} rounds", flush=True)

    def progress(number: int) -> None:
        if sys.stderr.isatty():
            print(f"\r  round {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)

    with case.sides(options) as sides:
        measured = harness.interleave(sides, rounds, progress)
    if sys.stderr.isatty():
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    rows = case.rows(options)
    void = _is_void(rows, measured)
    shown = [row for row in rows if not against or row.base_name == against]
    found = list(harness.findings(shown, measured))
    for line in _table(found):
        print(line)
    if void:
        print(f"  VOID: ours differs from itself in {void}; run it again on a quieter machine")
    print(flush=True)
    return {
        "rounds": rounds,
        "void": bool(void),
        "rows": [finding.as_json() for finding in found],
        "measured": measured,
    }


def _is_void(rows: Sequence[harness.Row], measured: Sequence[dict[str, Any]]) -> str:
    """What the control shows a difference in; nothing, if all is well."""
    for name in {row.ours for row in rows if row.base}:
        side, cost = name
        again = side + harness.AGAIN
        if again not in measured[0] or len(measured) < 6:
            continue
        ratio = harness.ratio_of(
            [r[side][cost] for r in measured], [r[again][cost] for r in measured]
        )
        if ratio.differs and not 0.97 <= ratio.median <= 1.03:
            return f"{cost} ({ratio})"
    return ""


def _table(found: Sequence[harness.Finding]) -> list[str]:
    lines = [f"  {'':44} {'ours':>14} {'base':>14}  ratio (>1: ours is better)"]
    for one in found:
        row = one.row
        base = f"{_number(one.base)} {row.unit}" if one.base is not None else ""
        text = f"  {row.what:44} {_number(one.ours) + ' ' + row.unit:>14} {base:>14}"
        if row.base:
            text += f"  {row.base_name}: {one.ratio}"
        if one.ceiling_ratio is not None:
            text += f"  {one.ceiling_ratio * 100:.0f} % of {row.ceiling_name}"
        if row.goals:
            missed = set(map(str, one.missed))
            goals = [f"{g} MISSED" if str(g) in missed else f"{g}" for g in row.goals]
            text += f"  (goal {', '.join(goals)})"
        lines.append(text)
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
