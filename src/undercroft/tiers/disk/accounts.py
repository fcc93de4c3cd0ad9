"""What one disk tier may write: its ledger, if it has a budget, and when to look into it."""

from __future__ import annotations

import logging

from undercroft.clock import Clock
from undercroft.errors import TierUnavailable
from undercroft.log import SparingLog
from undercroft.tiers.base import Allowance
from undercroft.tiers.disk.buffers import PAGE_BYTES
from undercroft.tiers.disk.keeper import Keeper
from undercroft.tiers.disk.ledger import Ledger
from undercroft.tiers.disk.records import record_bytes

__all__ = ["Accounts"]

_INDEX_PAGES = 3
"""A slot's old entry is freed, the new one is written, and other processes are told."""

_LOG = logging.getLogger(__name__)


class Accounts:
    """The budget of one tier; without one, nothing is kept.

    Threads: `sync` and `close` any, they do I/O and raise nothing; the rest any, no I/O.
    """

    def __init__(self, name: str, keeper: Keeper, clock: Clock, budget_bytes: int | None) -> None:
        self._name = name
        self._keeper = keeper
        self._log = SparingLog(_LOG, clock)
        self._num_damaged = 0
        self._ledger: Ledger | None = None
        if budget_bytes is not None:
            self._ledger = Ledger(
                keeper.ground.files,
                keeper.ground.root.path,
                budget_bytes=budget_bytes,
                unix_s=getattr(clock, "unix_s", clock.now_s),
                now_s=clock.now_s,
            )

    def cost_bytes(self, num_bytes: int) -> int:
        """See `Budgeted.write_cost_bytes`."""
        cost = record_bytes(num_bytes) + _INDEX_PAGES * PAGE_BYTES
        if self._ledger is not None:
            self._ledger.expect(cost)
        return cost

    def allowance(self) -> Allowance | None:
        """See `Budgeted.allowance`."""
        return None if self._ledger is None else self._ledger.allowance()

    def sync(self) -> None:
        """Book what comes next, if it is due. What fails is tried again the next time."""
        ledger, keeper = self._ledger, self._keeper
        if ledger is None or not ledger.is_due or not keeper.attached:
            return
        try:
            if ledger.is_open:
                ledger.sync(may_create=False)
            if not ledger.is_open and not keeper.ground.root.read_only:
                self._open(ledger)
        except (OSError, TierUnavailable) as exc:
            self._log.warning("disk tier %r cannot book what it writes: %s", self._name, str(exc))
            return
        if ledger.num_damaged > self._num_damaged:
            self._num_damaged = ledger.num_damaged
            self._log.warning(
                "disk tier %r: the file `writes` is damaged; the day's write_budget counts as "
                "spent (remove the file to begin anew)",
                self._name,
            )

    def _open(self, ledger: Ledger) -> None:
        ground = self._keeper.ground
        with self._keeper.shape:
            if not self._keeper.attached:
                return
            with ground.root.locked():
                ground.look()
                room = ground.limits.capacity_bytes - ground.usage.planned_bytes
                ledger.sync(may_create=room >= PAGE_BYTES)

    def close(self) -> None:
        """Give back what is left."""
        if self._ledger is None:
            return
        try:
            self._ledger.close()
        except OSError as exc:
            self._log.warning("disk tier %r cannot book what it wrote: %s", self._name, str(exc))
