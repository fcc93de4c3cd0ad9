"""A day's bytes for the chunks that return: bounded in every day, better than who comes first."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from tests.admission.shelf import (
    CHUNK_BYTES,
    DAY_S,
    PROMPT_CHUNKS,
    Shelf,
    make_requests,
    prompt,
    worst_day,
)

from undercroft.admission.always import Always
from undercroft.admission.base import Admission, Budgeting, Observing
from undercroft.admission.write_budget import WriteBudget
from undercroft.errors import ConfigError
from undercroft.testing.clock import ManualClock
from undercroft.testing.policy_suite import make_keys
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.ledger import Ledger

GIB = 1 << 30


def serve_days(make: Callable[[ManualClock], Admission], budget_bytes: int, seed: int) -> Shelf:
    """Five days of one-offs and returning prompts; who has no budget of its own is bounded."""
    clock = ManualClock(0.0)
    shelf = Shelf(make(clock), clock)
    may_write = 1 << 62 if isinstance(shelf.admission, WriteBudget) else budget_bytes
    for at_s, keys in make_requests(5, seed, every_s=120.0):
        shelf.serve(at_s, keys, may_write=may_write)
    return shelf


def test_is_what_the_seam_asks_for() -> None:
    """It is told of uses and of requests, and looks into the level's purse."""
    rule: Admission = WriteBudget("1GiB", clock=ManualClock())
    assert rule.name == "write_budget"
    assert isinstance(rule, Observing)
    assert isinstance(rule, Budgeting)


@pytest.mark.parametrize(
    ("budget_bytes", "least_gain"), [(GIB, 1.1), (2 * GIB, 1.2), (3 * GIB, 1.1), (8 * GIB, 1.0)]
)
def test_hits_more_than_first_come_first_served(budget_bytes: int, least_gain: float) -> None:
    """As many bytes a day, for what returns. Of a budget that is enough, nothing is kept back."""
    ours = serve_days(lambda clock: WriteBudget(budget_bytes, clock=clock), budget_bytes, seed=1)
    first_come = serve_days(lambda _: Always(), budget_bytes, seed=1)
    assert worst_day(first_come.writes) <= budget_bytes
    assert worst_day(ours.writes) <= budget_bytes
    assert ours.hit_ratio >= least_gain * first_come.hit_ratio
    assert 0.05 < first_come.hit_ratio < 0.9


def test_a_share_of_the_oracle() -> None:
    """With room for half of what returns it finds half of what could be found at all."""
    ours = serve_days(lambda clock: WriteBudget(2 * GIB, clock=clock), 2 * GIB, seed=2)
    all_in = serve_days(lambda _: Always(), 1 << 62, seed=2)
    assert ours.hit_ratio >= 0.5 * all_in.hit_ratio


@pytest.mark.parametrize("seed", range(4))
def test_no_day_has_more_than_the_budget(seed: int) -> None:
    """Wherever it begins: floods, pauses of hours and of days, chunks of all sizes."""
    clock, random = ManualClock(0.0), Random(seed)
    budget = 1 << 20
    rule = WriteBudget(budget, clock=clock)
    writes = []
    keys = make_keys(400)
    for _ in range(120):
        clock.advance(random.choice((1.0, 60.0, 3_000.0, 3_600.0, 40_000.0, 100_000.0)))
        rule.on_begin()
        for _ in range(random.choice((1, 5, 200))):
            num_bytes = random.choice((512, 4_096, 40_000))
            if rule.admit(random.choice(keys), num_bytes):
                writes.append((clock.now_s(), num_bytes))
    assert worst_day(writes) <= budget
    assert sum(num_bytes for _, num_bytes in writes) > 3 * budget


def test_the_days_bytes_last() -> None:
    """With three times as much on offer, no hour of any day goes without, and little is left."""
    budget = 3 * GIB // 2
    shelf = serve_days(lambda clock: WriteBudget(budget, clock=clock), budget, seed=3)
    hours = [num_bytes for hour, num_bytes in shelf.by_hour.items() if hour < 5 * 24]
    assert len(hours) == 5 * 24
    for day in range(5):
        used = sum(n for at_s, n in shelf.writes if day * DAY_S <= at_s < (day + 1) * DAY_S)
        assert 0.85 * budget <= used <= budget


def test_a_class_that_comes_in_in_part_does_so_by_prompts() -> None:
    """One-offs only, twice the budget: half of them are in, and each wholly or not at all."""
    clock = ManualClock(0.0)
    budget = 720 * PROMPT_CHUNKS * CHUNK_BYTES
    shelf = Shelf(WriteBudget(budget, clock=clock), clock)
    for number in range(2 * 1_440):
        shelf.serve(60.0 * (number + 1), prompt(number))
    late = [sum(k in shelf.kept for k in prompt(n)) for n in range(1_440, 2 * 1_440)]
    assert set(late) == {0, PROMPT_CHUNKS}
    assert 0.45 * 1_440 <= late.count(PROMPT_CHUNKS) <= 0.55 * 1_440


def test_without_requests_told_of_it_keeps_to_the_budget_all_the_same() -> None:
    """Whoever does not say where a request begins gets runs that a part of the budget pays for."""
    clock = ManualClock(0.0)
    rule = WriteBudget(1_000 * 4_096, clock=clock)
    keys = iter(make_keys(8 * 1_440))
    answers = []
    for _ in range(2 * 1_440):
        clock.advance(60.0)
        answers.append(rule.admit(next(keys), 4_096))
    assert 850 <= sum(answers[1_440:]) <= 1_000
    assert sum(a != b for a, b in pairwise(answers)) < 300, "in runs"


class LedgerPurse:
    """What a disk tier's ledger says, kept in its file."""

    is_kept = True

    def __init__(self, root: Path, budget_bytes: int, clock: ManualClock) -> None:
        class Counting(Files):
            written_bytes = 0

        self.files = Counting()
        self.ledger = Ledger(
            self.files,
            str(root),
            budget_bytes=budget_bytes,
            unix_s=clock.now_s,
            now_s=clock.now_s,
        )
        self.ledger.sync(may_create=True)

    def cost_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def day_bytes(self) -> tuple[int, int]:
        allowance = self.ledger.allowance()
        return allowance.day_left_bytes, allowance.budget_bytes

    def write(self, num_bytes: int) -> bool:
        """As the level does: only within what the ledger allows."""
        self.ledger.sync(may_create=False)
        if self.ledger.allowance().left_bytes < num_bytes:
            return False
        self.files.written_bytes += num_bytes
        return True


def test_a_tiers_budget_carries_over_restarts(tmp_path: Path) -> None:
    """Every seven hours a new process, with a new admission: the day's bound holds, the day's
    bytes are used, and still more is hit than by who comes first."""
    budget, results = 2 * GIB, {}
    for name in ("ours", "first_come"):
        root = tmp_path / name
        root.mkdir()
        clock = ManualClock(0.0)
        shelf, purse, until_s = Shelf(Always(), clock), None, 0.0
        kept_for_good: set[bytes] = set()
        for at_s, keys in make_requests(4, seed=4, every_s=120.0):
            if at_s >= until_s:
                until_s += 7 * 3_600.0
                if purse is not None:
                    purse.ledger.close()
                purse = LedgerPurse(root, budget, clock)
                if name == "ours":
                    shelf.admission = WriteBudget(clock=clock, level_budget_bytes=budget)
                    shelf.admission.open(purse)
            kept_before = set(shelf.kept)
            shelf.serve(at_s, keys)
            for key in keys:
                if key in shelf.kept and key not in kept_before and not purse.write(CHUNK_BYTES):
                    shelf.kept.remove(key)
            kept_for_good |= shelf.kept
        purse.ledger.close()
        results[name] = shelf.hit_ratio, len(kept_for_good) * CHUNK_BYTES
    assert results["ours"][1] <= 4 * budget
    assert results["ours"][1] >= 0.7 * 4 * budget
    assert results["ours"][0] >= 1.1 * results["first_come"][0]


class FixedPurse:
    """Says what it is told to."""

    def __init__(self, day: tuple[int, int] | None, *, is_kept: bool) -> None:
        self.day, self.is_kept = day, is_kept

    def cost_bytes(self, num_bytes: int) -> int:
        return 2 * num_bytes

    def day_bytes(self) -> tuple[int, int] | None:
        return self.day


def test_the_level_says_that_its_budget_is_spent() -> None:
    """What is worth it is let in here, and refused, with its reason, by the level."""
    rule = WriteBudget(clock=ManualClock(), level_budget_bytes=1_000)
    rule.open(FixedPurse((1, 1_000), is_kept=True))
    assert any(rule.admit(key, 100) for key in make_keys(20))


def test_replicas_share_a_budget() -> None:
    """Each of four plans with a quarter of the bytes."""
    answers = []
    for num_replicas in (1, 4):
        clock = ManualClock(0.0)
        rule = WriteBudget(clock=clock, level_budget_bytes=2_000_000, num_replicas=num_replicas)
        rule.open(FixedPurse((2_000_000, 2_000_000), is_kept=True))
        keys = iter(make_keys(3_000))
        num = 0
        for _ in range(2_880):
            clock.advance(30.0)
            rule.on_begin()
            num += rule.admit(next(keys), 500)
        answers.append(num)
    assert answers[1] < answers[0] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has nothing to spend: give a disk tier a write_budget"),
        ({"budget": "1GiB", "level_budget_bytes": 5}, "spends the tier's write_budget"),
        ({"budget": "1 parsec"}, "budget of admission write_budget"),
        ({"budget": 0}, "budget of admission write_budget is 0"),
        ({"budget": "1GiB", "max_tracked": 0}, "max_tracked is 0"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, object], message: str) -> None:
    """One line that says what is wrong and what to write."""
    with pytest.raises(ConfigError, match=message):
        WriteBudget(clock=ManualClock(), **options)  # type: ignore[arg-type]


def test_a_level_that_keeps_a_budget_is_not_given_a_second() -> None:
    """A disk tier's has to be its own, as it holds over restarts; another's has to be told."""
    with pytest.raises(ConfigError, match="write it as the tier's write_budget"):
        WriteBudget("1GiB", clock=ManualClock()).open(FixedPurse(None, is_kept=True))
    with pytest.raises(ConfigError, match="does not say what is left"):
        WriteBudget(clock=ManualClock(), level_budget_bytes=5).open(FixedPurse(None, is_kept=False))


def test_asking_is_cheap() -> None:
    """Some microseconds a chunk, planning included; the bound is for a busy machine."""
    rule = WriteBudget("1GiB", clock=ManualClock())
    keys = make_keys(5_000)
    best_s = 1.0
    for _ in range(3):
        start_s = time.thread_time()
        for key in keys:
            rule.admit(key, 1 << 20)
        best_s = min(best_s, time.thread_time() - start_s)
    assert best_s / len(keys) < 25e-6
