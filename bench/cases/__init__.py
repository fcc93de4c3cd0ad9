"""The cases, one module each, in the order in which they run."""

from __future__ import annotations

from cases.copies import Copies
from cases.disk import Disk
from cases.engine import EngineCase
from cases.engine_step import EngineStep
from cases.first_token import FirstToken
from cases.hazard import HazardCase
from cases.policies import Policies
from cases.record import Record
from cases.reopen import Reopen
from cases.restore import Restore
from cases.scheduler import Scheduler
from cases.simulator import Simulator
from cases.step import Step
from harness import Case

CASES: tuple[Case, ...] = (
    Scheduler(),
    Step(),
    Policies(),
    Simulator(),
    HazardCase(),
    Record(),
    Disk(),
    Reopen(),
    Restore(),
    Copies(),
    EngineCase(),
    EngineStep("engine_step", "tiny", 16, 1 << 20, 1000),
    EngineStep("engine_step_small", "tiny", 4, 256 << 10, 1000),
    EngineStep("engine_step_smollm2", "smollm2", 1, 30 * 3 * 64 * 2 * 4 * 32, 200),
    FirstToken("first_token", "tiny", 1),
    FirstToken("first_token_2", "tiny", 2),
    FirstToken("first_token_smollm2", "demo", 2),
)
