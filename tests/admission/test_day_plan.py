"""A day's bytes go to the best classes, and last."""

import pytest

from undercroft.admission.day_plan import HOURS, DayPlan
from undercroft.admission.worth import NUM_CLASSES

HOUR_S = 3600.0
WORTH = [float(index) for index in range(NUM_CLASSES)]  # the last class is the best


def flat_days(num_hours: int, by_class: dict[int, int]) -> DayPlan:
    """So many hours with the same demand, and nothing spent."""
    plan = DayPlan(0.0)
    for hour in range(num_hours):
        plan.advance(hour * HOUR_S)
        for each, num_bytes in by_class.items():
            plan.offer(each, num_bytes)
    return plan


def test_the_best_come_in_whole_and_the_last_in_part() -> None:
    """Demand of 240 + 240 + 240 a day, 360 bytes: all of the best, half of the next."""
    plan = flat_days(30, {7: 10, 4: 10, 1: 10})
    shares = plan.shares(29 * HOUR_S, WORTH, left_bytes=360.0, budget_bytes=360.0)
    assert shares[7] == 1.0
    assert shares[4] == pytest.approx(0.5)
    assert shares[1] == 0.0


def test_classes_nobody_offers_follow_their_neighbours() -> None:
    """Better than what comes in: in. Worse than what stays out: out."""
    plan = flat_days(30, {4: 10})
    shares = plan.shares(29 * HOUR_S, WORTH, left_bytes=120.0, budget_bytes=120.0)
    assert shares == [0.0, 0.0, 0.0, 0.0, pytest.approx(0.5), 1.0, 1.0, 1.0]


def test_all_comes_in_while_the_budget_is_enough() -> None:
    """Nothing is refused for its own sake."""
    plan = flat_days(30, {7: 10, 0: 10})
    assert plan.shares(29 * HOUR_S, WORTH, 1000.0, 1000.0) == [1.0] * NUM_CLASSES


def test_what_was_spent_early_has_to_last() -> None:
    """Three quarters gone in this hour come back in 25: the rest is for 24."""
    plan = flat_days(30, {4: 10})
    plan.spend(90)
    shares = plan.shares(29 * HOUR_S, WORTH, left_bytes=30.0, budget_bytes=120.0)
    assert shares[4] == pytest.approx(30 / 240)


def test_what_others_spent_comes_back_evenly() -> None:
    """After a restart nobody knows when it was written."""
    plan = flat_days(30, {4: 10})
    shares = plan.shares(29 * HOUR_S, WORTH, left_bytes=0.0, budget_bytes=250.0)
    assert shares[4] == 1.0, "10 of 250 come back each hour"
    shares = plan.shares(29 * HOUR_S, WORTH, left_bytes=0.0, budget_bytes=125.0)
    assert shares[4] == pytest.approx(0.5)


def test_a_quiet_night_is_expected() -> None:
    """Demand in 12 hours of 24 only: those get the budget of the whole day."""
    plan = DayPlan(0.0)
    for hour in range(48):
        plan.advance(hour * HOUR_S)
        if hour % 24 < 12:
            plan.offer(4, 10)
    plan.advance(48 * HOUR_S)
    shares = plan.shares(48 * HOUR_S, WORTH, left_bytes=60.0, budget_bytes=60.0)
    assert shares[4] == pytest.approx(0.5)


def test_a_first_hour_is_taken_for_all() -> None:
    """Before a day is known, the rest of it is expected to be as what was seen."""
    plan = DayPlan(0.0)
    plan.offer(4, 10)
    assert plan.shares(60.0, WORTH, 120.0, 120.0)[4] == pytest.approx(0.5)
    plan.advance(2 * HOUR_S)
    plan.offer(4, 30)
    assert plan.shares(2 * HOUR_S, WORTH, 240.0, 240.0)[4] == pytest.approx(0.5)


def test_hours_pass_out_of_sight() -> None:
    """After a day nothing of the demand or the spending is left, however long nobody asked."""
    plan = flat_days(1, {4: 10})
    plan.spend(7)
    assert plan.spent_bytes == 7
    assert plan.advance((HOURS - 1) * HOUR_S) == HOURS - 1
    assert plan.spent_bytes == 7
    plan.advance(HOURS * HOUR_S)
    assert plan.spent_bytes == 0
    plan.spend(5)
    plan.advance(10_000 * HOUR_S)
    assert plan.spent_bytes == 0
    assert plan.shares(10_000 * HOUR_S, WORTH, 1.0, 1.0) == [1.0] * NUM_CLASSES
