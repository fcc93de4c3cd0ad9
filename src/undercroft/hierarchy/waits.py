"""How long a request is kept waiting for lower levels, and what for.

Chunks that a late read leaves out cut the prefix. Groups walked from the root have what they need
for a shorter one; a window or a state at another cut has to be read first. So the end of a wait is
kept in reserve for that: reads are late when it begins, not when it ends.
"""

from __future__ import annotations

from undercroft.hierarchy.cut import has_window
from undercroft.hierarchy.request import Request

__all__ = ["MOST_DEADLINES", "RESERVE_RATIO", "Waits"]

MOST_DEADLINES = 4
"""However slow a tier is predicted to be, reads may take no more than so many deadlines: what it
showed may have been a hiccup, and recomputing would have been quicker by then."""
RESERVE_RATIO = 0.25
"""Of a wait, what is kept for windows at a shorter cut. A wait is at least twice what its reads are
predicted to take, so most of what comes at all comes before."""


class Waits:
    """Deadlines of requests. Threads: the scheduler's.

    Args:
        deadline_s: How long a request may be kept waiting, at least; twice the predicted time of
            its reads if that is longer, but no more than `MOST_DEADLINES` of these.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        # By group: where the shortest prefix ever waited for ends. At it there is no shorter cut.
        self._least_ends: dict[object, int] = {}

    def begin(self, request: Request, now_s: float) -> None:
        """`request` begins to wait for lower levels, unless it did before."""
        if request.deadline_s is None:
            request.deadline_s = now_s + self.deadline_s
            request.admit_by_s = now_s + self.deadline_s / 2
            request.num_promoted_before = -1
            request.reserve_s, request.is_late = 0.0, False

    def is_over(self, request: Request, now_s: float) -> bool:
        """Whether `request` waits for nothing any more."""
        if request.deadline_s is None or now_s < request.deadline_s:
            return False
        if not (request.is_late and request.reserve_s):
            return True
        # A step was so long that only now it shows what is late.
        request.deadline_s = now_s + request.reserve_s
        return False

    def is_late(self, request: Request, now_s: float) -> bool:
        """Whether to cut off what is on its way for `request`; asked when something is."""
        if request.deadline_s is None or request.is_late:
            return False
        return request.reserve_s > 0.0 and request.deadline_s - request.reserve_s <= now_s

    def mind_reserve(self, request: Request, now_s: float) -> None:
        """Once a step, its lookups done: set time aside; when something was late, use it."""
        if request.is_late and request.reserve_s:
            request.deadline_s = max(request.deadline_s or 0.0, now_s + request.reserve_s)
            request.reserve_s = 0.0
        elif request.num_promoted_before < 0 and not request.is_late:
            request.reserve_s = self._reserve(request, self.deadline_s)

    def extend(self, request: Request, predicted_s: float | None, now_s: float) -> float:
        """By when reads that start now are late.

        The deadline moves only if the last reads brought something and nothing was late, else a
        tier that fails slowly would keep a request waiting once per chunk it has.

        Args:
            request: Who waits.
            predicted_s: What its reads will take; None: none was started.
            now_s: The time.
        """
        has_moved = len(request.promoted) > request.num_promoted_before and not request.is_late
        if request.deadline_s is None or (predicted_s is not None and has_moved):
            request.num_promoted_before = len(request.promoted)
            most_s = MOST_DEADLINES * self.deadline_s
            wait_s = min(most_s, max(self.deadline_s, 2 * (predicted_s or 0.0)))
            request.deadline_s = now_s + wait_s
            request.reserve_s = self._reserve(request, wait_s)
        return request.deadline_s - request.reserve_s

    def _reserve(self, request: Request, wait_s: float) -> float:
        if not request.queued or not has_window(request) or self._is_least(request):
            return 0.0
        return RESERVE_RATIO * wait_s

    def _is_least(self, request: Request) -> bool:
        """Whether one chunk is asked for, and it is the first: all a request of one chunk has.

        A window of one chunk at the end of a long prefix looks the same but for where it ends.
        """
        if len(request.walks) != 1:
            return False
        ((group, walk),) = request.walks.items()
        if len(walk.keys) != 1:
            return False
        end = request.position_of(walk.keys[0])
        if end is None:
            return False
        least = self._least_ends[group] = min(end, self._least_ends.get(group, end))
        return end == least
