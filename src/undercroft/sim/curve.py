"""Hit ratios of a policy over capacities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from undercroft import plugins
from undercroft.errors import ConfigError
from undercroft.sim.hits import Hits
from undercroft.sim.lru_curve import lru_curve
from undercroft.sim.moment import Moment
from undercroft.sim.optimum import belady_curve, unbounded_row
from undercroft.sim.replay import make_policy, replay
from undercroft.sim.reuse import find_stretches
from undercroft.traces import Trace

__all__ = ["BOUNDS", "check_policy", "hit_curve"]

BOUNDS = ("belady", "unbounded")
"""Names beside those of policies: the optimum, which knows the future, and room for everything."""


def check_policy(name: str) -> None:
    """Whether `hit_curve` can be asked for `name`.

    Raises:
        UnknownPlugin: Neither a policy nor one of `BOUNDS`.
    """
    if name not in BOUNDS:
        plugins.find("policies", name)


def hit_curve(
    trace: Trace,
    policy: str,
    capacities: Sequence[int],
    *,
    num_warm: int = 0,
    on_capacity: Callable[[], None] | None = None,
) -> list[Hits]:
    """What a policy gets out of a trace at each capacity, one level alone.

    Prefix semantics (see `sim.replay`), a cold start, and a store that takes no time. `lru` takes
    one pass for all capacities, `belady` and `unbounded` are computed from the same few numbers;
    every other policy is replayed, the very class that an engine would run.

    Args:
        trace: The requests.
        policy: Name of a policy, or one of `BOUNDS`.
        capacities: In blocks, each > 0.
        num_warm: Requests at the beginning that are replayed, not counted.
        on_capacity: Called whenever one more capacity is done.

    Returns:
        One for each capacity, in the order given. `unbounded` holds everything at each.

    Raises:
        UnknownPlugin: There is no such policy.
        ConfigError: A capacity is not positive, or more requests are to be warm than there are.
    """
    check_policy(policy)
    if wrong := [capacity for capacity in capacities if capacity < 1]:
        raise ConfigError(f"a capacity is {wrong[0]} blocks; give 1 or more")
    if not 0 <= num_warm <= trace.num_requests:
        raise ConfigError(
            f"{num_warm} requests are to be warm, but the trace has {trace.num_requests}"
        )
    told = on_capacity or _nobody
    if policy == "unbounded":
        found = [unbounded_row(trace, num_warm=num_warm)] * len(capacities)
    elif policy == "belady":
        found = belady_curve(trace, find_stretches(trace), capacities, num_warm=num_warm)
    elif policy == "lru":
        found = lru_curve(trace, find_stretches(trace), capacities, num_warm=num_warm)
    else:
        found = []
        for capacity in capacities:
            moment = Moment()
            made = make_policy(policy, capacity, moment)
            found.append(replay(trace, made, capacity, moment=moment, num_warm=num_warm))
            told()
        return found
    for _ in capacities:
        told()
    return found


def _nobody() -> None:
    pass
