"""How fast, and how much a day, a level may be written to: flash wears out by what is written."""

from __future__ import annotations

from undercroft.clock import Clock
from undercroft.errors import ConfigError
from undercroft.tiers.base import Budgeted, Tier

__all__ = ["Spending"]

_BURST_S = 1.0


class Spending:
    """The budgets of one level. A write that is too early waits; one that is too much is refused.

    The rate is a token bucket of one second, or of one chunk where that is more. The day's budget
    is the tier's, see `Budgeted`; writes that are under way count as spent here.

    Args:
        tier: Whose medium; if it is not `Budgeted`, a chunk costs its own bytes, and there is no
            day's budget.
        rate_bytes: A second, by this process; None: as fast as it goes.
        largest_bytes: Of a chunk.
        clock: Time.

    Raises:
        ConfigError: Not even one chunk is within the budget.

    Threads: the scheduler's. Cost: O(1), some 2 us.
    """

    def __init__(
        self, tier: Tier, *, rate_bytes: int | None, largest_bytes: int, clock: Clock
    ) -> None:
        self._budgeted = tier if isinstance(tier, Budgeted) else None
        self._clock = clock
        self._rate_bytes = rate_bytes
        self._most_bytes = max((rate_bytes or 0) * _BURST_S, float(self.cost_bytes(largest_bytes)))
        self._there_bytes = self._most_bytes
        self._counted_s = clock.now_s()
        self._under_way_bytes = 0
        allowance = self._budgeted.allowance() if self._budgeted else None
        self._has_budget = allowance is not None
        if allowance is not None and allowance.budget_bytes < self.cost_bytes(largest_bytes):
            raise ConfigError(
                f"the write budget of tier {tier.name} is {allowance.budget_bytes} bytes a day, "
                f"but one chunk costs {self.cost_bytes(largest_bytes)}: raise it or leave it out",
                tier=tier.name,
            )

    @property
    def is_kept(self) -> bool:
        """Whether the tier can keep a budget; see `admission.base.Purse`."""
        return self._budgeted is not None

    def day_bytes(self) -> tuple[int, int] | None:
        """What is left of the day's budget, and the budget; None if there is none."""
        allowance = self._budgeted.allowance() if self._has_budget and self._budgeted else None
        if allowance is None:
            return None
        return allowance.day_left_bytes - self._under_way_bytes, allowance.budget_bytes

    def cost_bytes(self, num_bytes: int) -> int:
        """What a chunk of `num_bytes` costs."""
        return self._budgeted.write_cost_bytes(num_bytes) if self._budgeted else num_bytes

    def is_too_early(self, num_bytes: int) -> bool:
        """Whether a chunk has to wait: it may be written before long."""
        if self._rate_bytes is not None:
            self._refill(self._rate_bytes)
            if self._there_bytes < self.cost_bytes(num_bytes):
                return True
        return self._lacks(num_bytes, is_spent=False)

    def is_too_much(self, num_bytes: int) -> bool:
        """Whether the day's budget is spent."""
        return self._lacks(num_bytes, is_spent=True)

    def _lacks(self, num_bytes: int, *, is_spent: bool) -> bool:
        if not self._has_budget or self._budgeted is None:
            return False
        allowance = self._budgeted.allowance()
        return (
            allowance is not None
            and allowance.is_spent is is_spent
            and allowance.left_bytes - self._under_way_bytes < self.cost_bytes(num_bytes)
        )

    def _refill(self, rate_bytes: int) -> None:
        now_s = self._clock.now_s()
        gained = (now_s - self._counted_s) * rate_bytes
        self._there_bytes = min(self._most_bytes, self._there_bytes + gained)
        self._counted_s = now_s

    def begin(self, num_bytes: int) -> None:
        """A chunk is on its way."""
        cost = self.cost_bytes(num_bytes)
        self._under_way_bytes += cost
        self._there_bytes -= cost

    def end(self, num_bytes: int) -> None:
        """Its write has ended, well or not."""
        self._under_way_bytes -= self.cost_bytes(num_bytes)
