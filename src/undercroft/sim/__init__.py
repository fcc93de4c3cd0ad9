"""Replay traces through the production policies: what would another policy, or size, have got?"""

from undercroft.sim.curve import BOUNDS, check_policy, hit_curve
from undercroft.sim.hits import Hits

__all__ = ["BOUNDS", "Hits", "check_policy", "hit_curve"]
