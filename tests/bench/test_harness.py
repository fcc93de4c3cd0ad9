"""The benchmark runner: its statistics, its control, its verdicts."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import run
from harness import AGAIN, Goal, Options, Row, Side, findings, interleave, ratio_of

ROOT = Path(__file__).parents[2]


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    """95 % or more of intervals hold the median of what the ratios are drawn from."""
    source = random.Random(7)
    num_held = 0
    for _ in range(1000):
        base = [1.0] * 9
        ours = [source.lognormvariate(0.0, 0.3) for _ in base]
        ratio = ratio_of(base, ours)
        assert ratio.low <= ratio.median <= ratio.high
        num_held += ratio.low <= 1.0 <= ratio.high
    assert 950 <= num_held <= 999


def test_few_pairs_give_their_whole_range() -> None:
    """With five pairs no 95 % interval of the median exists."""
    ratio = ratio_of([2.0, 2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 4.0, 0.5, 1.0])
    assert (ratio.low, ratio.median, ratio.high) == (0.5, 2.0, 4.0)
    assert "no difference" in str(ratio)
    assert "no difference" not in str(ratio_of([2.0] * 6, [1.0] * 6))


def test_sides_take_turns_in_both_orders() -> None:
    """Whoever goes first has no lasting advantage."""
    order: list[str] = []

    def side(name: str) -> Side:
        return lambda: order.append(name) or {"cost": 1.0}  # type: ignore[func-returns-value]

    rounds = interleave({name: side(name) for name in "abc"}, 4)
    assert "".join(order) == "abccbaabccba"
    assert len(rounds) == 4
    assert rounds[0] == {name: {"cost": 1.0} for name in "abc"}


class Fixed:
    """A case with given costs for each round."""

    name = "fixed"
    about = "made for tests"

    def __init__(self, costs: Mapping[str, list[float]], row: Row) -> None:
        self.costs, self.row = costs, row
        self.rounds = len(next(iter(costs.values())))

    def rows(self, options: Options) -> list[Row]:
        return [self.row]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        left = {name: list(costs) for name, costs in self.costs.items()}
        yield {name: (lambda n=name: {"store": left[n].pop(0)}) for name in left}


ROW = Row(
    "store",
    ("ours", "store"),
    ("stock", "store"),
    ("raw", "store"),
    amount=4.0,
    goals=[Goal(least=2.0), Goal(least=0.85, of_ceiling=True)],
)


@pytest.mark.parametrize(
    ("ours", "missed"),
    [(1.0, set()), (1.5, {">= 85 % of ceiling"}), (3.0, {">= 2x", ">= 85 % of ceiling"})],
)
def test_a_goal_that_is_missed_is_said(
    ours: float, missed: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Values are amount by cost; ratios say how many times as good; goals stand beside."""
    costs = {"ours": [ours] * 6, "stock": [4.0] * 6, "raw": [0.9] * 6}
    found = run._run(Fixed(costs, ROW), Options(tmp_path), None)
    row = found["rows"][0]
    assert row["ours"] == pytest.approx(4.0 / ours)
    assert row["ratio"][0] == pytest.approx(4.0 / ours)
    assert row["ceiling_ratio"] == pytest.approx(0.9 / ours)
    assert set(row["missed"]) == missed
    assert capsys.readouterr().out.count("MISSED") == len(missed)


def test_a_run_in_which_ours_differs_from_itself_is_void(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The control decides, in both directions, and small differences pass."""
    for again, void in ((1.0, False), (1.01, False), (1.2, True), (0.8, True)):
        costs = {"ours": [1.0] * 8, "ours" + AGAIN: [again] * 8, "stock": [4.0] * 8}
        case = Fixed(costs, Row("store", ("ours", "store"), ("stock", "store")))
        assert run._run(case, Options(tmp_path), None)["void"] is void
        assert ("VOID" in capsys.readouterr().out) is void


def test_the_worst_case_of_all_rounds_is_the_least() -> None:
    """What others took from one of them does not count."""
    row = Row("worst", ("ours", "worst"), scale=1e3, unit="ms", best=True, goals=[Goal(most=2.0)])
    rounds = [{"ours": {"worst": seconds}} for seconds in (0.005, 0.001, 0.009)]
    (found,) = findings([row], rounds)
    assert found.ours == pytest.approx(1.0)
    assert not found.missed


def test_a_value_that_has_to_be_reached() -> None:
    """In the row's unit, where more is better: just reached is reached."""
    row = Row("speed", ("ours", "s"), amount=2.0, unit="M/s", goals=[Goal(least_value=1.0)])
    (found,) = findings([row], [{"ours": {"s": 2.0}}])
    assert (found.ours, found.missed) == (1.0, [])
    (found,) = findings([row], [{"ours": {"s": 2.1}}])
    assert list(map(str, found.missed)) == [">= 1"]


def test_the_command_runs_real_cases(tmp_path: Path) -> None:
    """Ours and its peers, in small: every row is there, and the results file too."""
    results = tmp_path / "results.json"
    names = ["scheduler", "step", "disk", "reopen", "copies", "simulator"]
    command = [sys.executable, "bench/run.py", *names, "--quick", "--json", str(results)]
    command += ["--rounds", "1", "--path", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(results.read_text())
    assert list(told["cases"]) == names
    for name in names:
        rows = told["cases"][name]["rows"]
        assert rows
        assert all(row["ours"] > 0 for row in rows if row["unit"] != "ms")
    assert not list(tmp_path.glob("undercroft-bench-*"))
    assert told["host"]["versions"]["torch"]
    assert "stock:" in done.stdout


def test_a_wrong_name_is_told_with_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and nothing runs."""
    assert run.main(["no-such-case"]) == 2
    assert "scheduler" in capsys.readouterr().err
