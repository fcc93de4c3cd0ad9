"""The cases, one module each, in the order in which they run."""

from __future__ import annotations

from cases.scheduler import Scheduler
from harness import Case

CASES: tuple[Case, ...] = (Scheduler(),)
