"""Replay traces through the production policies: what would another policy, or size, have got?"""

from undercroft.sim.curve import BOUNDS, check_policy, hit_curve
from undercroft.sim.hits import Hits
from undercroft.sim.levels import LevelPlan, simulate
from undercroft.sim.report import LevelReport, Report
from undercroft.sim.size_tier import Service

__all__ = [
    "BOUNDS",
    "Hits",
    "LevelPlan",
    "LevelReport",
    "Report",
    "Service",
    "check_policy",
    "hit_curve",
    "simulate",
]
