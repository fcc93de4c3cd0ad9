from undercroft.policies.base import EvictionPolicy
from undercroft.policies.hazard import Hazard
from undercroft.testing.policy_suite import PolicySuite


class TestHazard(PolicySuite):
    def make(self, capacity_chunks: int) -> EvictionPolicy:
        return Hazard(capacity_chunks)
