"""The one log line at start: what was decided, in the words of the settings."""

from __future__ import annotations

from collections.abc import Iterator

from undercroft.engines.assemble import Geometry, tokens_that_fit
from undercroft.hierarchy.hierarchy import Hierarchy
from undercroft.hierarchy.level import Level
from undercroft.settings import Settings, TierSettings, format_bytes
from undercroft.tiers.base import Bounded, Described

__all__ = ["start_line"]


def start_line(settings: Settings, geometry: Geometry, hierarchy: Hierarchy) -> str:
    """Each level with its bound, what fits into it, and how it is run."""
    levels = {level.name: level for level in hierarchy.levels}
    parts = [f"host {_room(geometry, settings.host_bytes)}, {settings.policy}"]
    parts += [_below(tier, geometry, levels.get(tier.name)) for tier in settings.tiers]
    return "; ".join(parts)


def _room(geometry: Geometry, num_bytes: int) -> str:
    tokens = tokens_that_fit(geometry, num_bytes)
    return f"{format_bytes(num_bytes)}, about {tokens} tokens of this model"


def _below(settings: TierSettings, geometry: Geometry, level: Level | None) -> str:
    where = settings.options.get("path")
    name = f"{settings.name} ({settings.type}{f' at {where}' if where else ''})"
    if level is None:
        return f"{name} left out"
    return f"{name} {', '.join(_decided(settings, geometry, level))}"


def _decided(settings: TierSettings, geometry: Geometry, level: Level) -> Iterator[str]:
    if isinstance(level.tier, Bounded):
        yield _room(geometry, level.tier.capacity_bytes)
    yield settings.policy
    if settings.admission != "always":
        yield f"admission {settings.admission}"
    yield f"{level.transfers.num_threads} threads"
    if isinstance(level.tier, Described):
        yield level.tier.describe()
