"""Which chunks a day's budget is to go to: the most useful ones, and so many that it lasts.

Demand is remembered by hour and class for a day, and expected to come again. Over each of the next
1, 2, ... 24 hours there is what is left of the budget, and what comes back: bytes count for 24 to
25 hours after they were written. The best classes come in whole, the last one for which there is
room in part, and the tightest of the 24 horizons decides. So busy hours get more than quiet ones,
and an early flood does not leave the rest of the day without.
"""

from __future__ import annotations

from collections.abc import Sequence

from undercroft.admission.worth import NUM_CLASSES

__all__ = ["HOURS", "DayPlan"]

HOURS = 25
"""Of which at least 24 are whole: no day has more than the budget, wherever it begins."""

_HOUR_S = 3600.0


class DayPlan:
    """Demand and spending by the hour, and the shares that follow from them.

    Args:
        now_s: The time.

    Memory: 2 kB. Threads: one. Cost: O(1); `shares` some 100 us.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._hour = int(now_s // _HOUR_S)
        self._offered = [[0.0] * NUM_CLASSES for _ in range(HOURS)]
        self._spent = [0.0] * HOURS

    @property
    def spent_bytes(self) -> float:
        """In this hour and the 24 before it."""
        return sum(self._spent)

    def advance(self, now_s: float) -> int:
        """Hours that have begun since the last call."""
        hour = int(now_s // _HOUR_S)
        num_hours = max(0, hour - self._hour)
        for each in range(min(HOURS, num_hours)):
            index = (hour - each) % HOURS
            self._offered[index] = [0.0] * NUM_CLASSES
            self._spent[index] = 0.0
        self._hour = max(self._hour, hour)
        return num_hours

    def offer(self, its_class: int, num_bytes: int) -> None:
        """A chunk of that class wants to come in."""
        self._offered[self._hour % HOURS][its_class] += num_bytes

    def spend(self, num_bytes: int) -> None:
        """It came in."""
        self._spent[self._hour % HOURS] += num_bytes

    def shares(
        self, now_s: float, worth: Sequence[float], left_bytes: float, budget_bytes: float
    ) -> list[float]:
        """Of each class the share to let in, 0 to 1.

        Args:
            now_s: The time.
            worth: Of each class.
            left_bytes: Of the budget, now.
            budget_bytes: Of any day.
        """
        order = sorted(range(NUM_CLASSES), key=lambda each: -worth[each])
        # What others spent, or this process before it was restarted: nobody knows when.
        unknown = max(0.0, budget_bytes - left_bytes - self.spent_bytes)
        demand, room = [0.0] * NUM_CLASSES, left_bytes
        shares = [1.0] * NUM_CLASSES
        for hour in range(HOURS - 1):
            index = (self._hour - HOURS + 1 + hour) % HOURS  # the same hour of yesterday
            room += self._spent[index] + unknown / HOURS
            for each, expected in enumerate(self._expected(now_s, index)):
                demand[each] += expected
            _lower(shares, order, demand, room)
        return shares

    def _expected(self, now_s: float, index: int) -> list[float]:
        """Demand in an hour of which this is the index, of each class."""
        known_s = now_s - self._began_s
        if known_s >= (HOURS - 1) * _HOUR_S:
            return self._offered[index]
        scale = _HOUR_S / max(_HOUR_S, known_s)
        return [scale * sum(row[each] for row in self._offered) for each in range(NUM_CLASSES)]


def _lower(shares: list[float], order: Sequence[int], demand: Sequence[float], room: float) -> None:
    """Lower `shares` to what there is room for, the first of `order` first."""
    for each in order:
        if room <= 0:
            shares[each] = 0.0
        elif demand[each] > room:
            shares[each] = min(shares[each], room / demand[each])
        room -= demand[each]
