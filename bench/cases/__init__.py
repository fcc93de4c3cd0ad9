"""The cases, one module each, in the order in which they run."""

from __future__ import annotations

from cases.disk import Disk
from cases.engine import EngineCase
from cases.policies import Policies
from cases.scheduler import Scheduler
from harness import Case

CASES: tuple[Case, ...] = (Scheduler(), Policies(), Disk(), EngineCase())
