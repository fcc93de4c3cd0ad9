"""What a policy does while one-offs pass through a full level."""

from undercroft.policies.base import EvictionPolicy
from undercroft.testing.policy_suite import make_keys

__all__ = ["pass_one_offs"]


def pass_one_offs(policy: EvictionPolicy, num_keys: int) -> None:
    """Bring so many keys, numbered from 50 on, once each; after 50 each takes another's place."""
    for number, key in enumerate(make_keys(num_keys, start=50)):
        if number >= 50:
            policy.on_evict(next(policy.victims()))
        policy.on_insert(key)
