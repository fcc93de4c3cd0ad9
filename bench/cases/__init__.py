"""The cases, one module each, in the order in which they run."""

from __future__ import annotations

from cases.copies import Copies
from cases.disk import Disk
from cases.engine import EngineCase
from cases.first_token import FirstToken
from cases.policies import Policies
from cases.reopen import Reopen
from cases.scheduler import Scheduler
from cases.step import Step
from harness import Case

CASES: tuple[Case, ...] = (
    Scheduler(),
    Step(),
    Policies(),
    Disk(),
    Reopen(),
    Copies(),
    EngineCase(),
    FirstToken("first_token", "tiny", 1),
    FirstToken("first_token_2", "tiny", 2),
    FirstToken("first_token_smollm2", "demo", 2),
)
