"""The cases, one module each, in the order in which they run."""

from __future__ import annotations

from cases.copies import Copies
from cases.disk import Disk
from cases.reopen import Reopen
from cases.scheduler import Scheduler
from cases.step import Step
from harness import Case

CASES: tuple[Case, ...] = (Scheduler(), Step(), Disk(), Reopen(), Copies())
