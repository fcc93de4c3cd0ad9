"""Spend a day's write budget on the chunks that are most likely to be used again."""

from __future__ import annotations

from undercroft.admission.base import Purse
from undercroft.admission.day_plan import DayPlan
from undercroft.admission.sightings import MAX_TRACKED, Sightings
from undercroft.admission.worth import NUM_CLASSES, Worth
from undercroft.clock import Clock
from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey
from undercroft.settings.sizes import parse_size

__all__ = ["WriteBudget"]

_PLAN_S = 60.0
_PLAN_SHARE = 256
"""A plan is also made anew when this part of the budget was offered since, ..."""
_PLAN_CHUNKS = 64
"""... and at least so many chunks."""
_DEBT_SHARE = 64
"""What comes in in part comes in by whole requests, as half a prompt helps nobody, as long as no
more than this part of the budget is too much or too little."""


class WriteBudget:
    """Admits by how often a chunk was seen, so strictly that the day's budget lasts.

    The bound itself is the level's: a disk tier's `write_budget`, which is kept in its directory.
    A level that keeps none, host memory for one, gets it from here; it begins anew at a start.

    Args:
        budget: Bytes a day, for a level that keeps no budget itself.
        max_tracked: Keys whose sights are remembered, the latest seen.
        clock: Time.
        num_replicas: Processes that share the level's budget; each plans with its part.
        level_budget_bytes: The level's own.

    Raises:
        ConfigError: There are two budgets, or none; a number is not sensible.

    Memory: 8 to 16 bytes a tracked key, at once. Threads: one. Cost: 3 us a chunk, amortized.
    """

    name = "write_budget"

    def __init__(
        self,
        budget: object = None,
        max_tracked: int = MAX_TRACKED,
        *,
        clock: Clock,
        num_replicas: int = 1,
        level_budget_bytes: int | None = None,
    ) -> None:
        if budget is None and level_budget_bytes is None:
            raise ConfigError(
                "admission write_budget has nothing to spend: give a disk tier a write_budget, "
                'such as "500GiB" a day; for another level write it into the admission, as `budget`'
            )
        if budget is not None and level_budget_bytes is not None:
            raise ConfigError(
                "admission write_budget spends the tier's write_budget: leave `budget` out"
            )
        self._budget_bytes = (
            None if budget is None else parse_size(budget, "budget of admission write_budget")
        )
        self._sightings = Sightings(max_tracked, "admission write_budget")
        self._clock = clock
        self._num_replicas = num_replicas
        self._purse: Purse | None = None
        self._worth = Worth()
        self._plan = DayPlan(clock.now_s())
        self._shares = [1.0] * NUM_CLASSES
        self._planned_s = float("-inf")
        self._offered_since = 0
        self._credit = 0.0  # of what comes in in part
        self._begins = True
        self._is_in = False

    def open(self, purse: Purse) -> None:
        """See `admission.base.Budgeting`."""
        if self._budget_bytes is not None and purse.is_kept:
            raise ConfigError(
                "admission write_budget: this tier keeps a budget itself, over restarts; write it "
                "as the tier's write_budget, and leave `budget` out"
            )
        if self._budget_bytes is None and purse.day_bytes() is None:
            raise ConfigError(
                "admission write_budget: this tier takes a write_budget, but does not say what is "
                "left of it; write `budget` into the admission in its place"
            )
        self._purse = purse

    def admit(self, key: ChunkKey, num_bytes: int) -> bool:
        """Whether the chunk is among the best that the budget is enough for."""
        its_class = self._worth.see(self._sightings.see(key))
        cost = self._purse.cost_bytes(num_bytes) if self._purse is not None else num_bytes
        self._advance()
        self._plan.offer(its_class, cost)
        self._offered_since += cost
        left, budget = self._day_bytes()
        if self._is_due(cost, budget):
            self._make_plan(left, budget)
        if not self._is_worth_it(self._shares[its_class], cost, budget / _DEBT_SHARE):
            return False
        if left < cost:
            return self._budget_bytes is None  # the level refuses it, and says why
        self._plan.spend(cost)
        return True

    def on_begin(self) -> None:
        """See `admission.base.Observing`."""
        self._begins = True

    def on_use(self, key: ChunkKey) -> None:
        """It counts as a sight: what was let in shows what is worth to let in."""
        self._worth.see(self._sightings.see(key))

    def _advance(self) -> None:
        num_hours = self._plan.advance(self._clock.now_s())
        if num_hours:
            self._worth.fade(num_hours)

    def _day_bytes(self) -> tuple[float, float]:
        """What is left of this process's part of the budget, and that part."""
        if self._budget_bytes is not None:
            return self._budget_bytes - self._plan.spent_bytes, float(self._budget_bytes)
        day = self._purse.day_bytes() if self._purse is not None else None
        if day is None:
            return 0.0, 0.0
        left, budget = day
        return left / self._num_replicas, budget / self._num_replicas

    def _is_due(self, cost: int, budget: float) -> bool:
        enough = max(budget / _PLAN_SHARE, _PLAN_CHUNKS * cost)
        return self._offered_since >= enough or self._clock.now_s() - self._planned_s >= _PLAN_S

    def _make_plan(self, left: float, budget: float) -> None:
        self._planned_s = self._clock.now_s()
        self._offered_since = 0
        self._shares = self._plan.shares(self._planned_s, self._worth.expected_uses(), left, budget)

    def _is_worth_it(self, share: float, cost: int, most_debt: float) -> bool:
        if share >= 1.0 or share <= 0.0:
            return share > 0.0
        self._credit += share * cost
        if self._begins or abs(self._credit) > most_debt:
            self._begins = False
            self._is_in = self._credit > 0
        if self._is_in:
            self._credit -= cost
        return self._is_in
