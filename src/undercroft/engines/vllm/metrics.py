"""Our counters as vLLM metrics.

vLLM declares metrics in the API front end and fills them in the engine core, so the definitions
depend on nothing but the user's configuration. Values are plain `int` and `float`: anything else,
or an undeclared name, would stop the engine's output handler.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy
from undercroft.tiers.base import Bounded

__all__ = ["StepStats", "metric_definitions"]

_PREFIX = "vllm:undercroft_"

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lookups": ("Lookups of one chunk, by answer.", ("result",)),
    "lookup_misses": ("Lookups answered MISS, by reason.", ("reason",)),
    "stored_chunks": ("Chunks copied from the engine into host memory.", ()),
    "stored_bytes": ("Bytes copied from the engine into host memory.", ()),
    "loaded_chunks": ("Chunks copied from host memory into the engine.", ()),
    "loaded_bytes": ("Bytes copied from host memory into the engine.", ()),
    "promoted_chunks": ("Chunks read and verified from a lower level.", ("level",)),
    "promoted_bytes": ("Bytes read and verified from a lower level.", ("level",)),
    "cascaded_chunks": ("Chunks written to a lower level.", ("level",)),
    "cascaded_bytes": ("Bytes written to a lower level.", ("level",)),
    "evicted_chunks": ("Chunks that left a level by choice of its policy.", ("level",)),
    "dropped_chunks": (
        "Chunks that left a level, or never reached it, by fault.",
        ("level", "reason"),
    ),
    "declined_chunks": ("Chunks that were not let into a level, by reason.", ("level", "reason")),
    "resets": ("Times the whole cache was dropped on request.", ()),
    "broken_invariants": ("Faults of our own that were turned into misses.", ()),
}

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "resident_bytes": ("Bytes of a level that hold chunks.", ("level",)),
    "capacity_bytes": ("Bytes a level may hold.", ("level",)),
    "residency_ratio": ("Resident bytes over capacity, 0 to 1.", ("level",)),
    "pinned_chunks": ("Chunks of host memory that may not be evicted now.", ()),
    "waiting_restores": ("Requests that wait for chunks of a lower level.", ()),
    "moving_chunks": ("Chunks on their way to or from a lower level.", ()),
    "level_usable": ("1 if a lower level is asked at all, else 0.", ("level",)),
    "is_on": ("1 normally; 0 after a fault of our own, until the engine restarts.", ()),
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric this adapter may ever report."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, (text, labels) in _COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(text, labels)
    for name, (text, labels) in _GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(text, labels)
    return definitions


def _counters(hierarchy: Hierarchy) -> Iterator[tuple[str, tuple[str, ...], int]]:
    counters = hierarchy.counters
    yield "lookups", ("hit",), counters.lookup_hits
    yield "lookups", ("pending",), counters.lookup_pending
    yield "lookups", ("miss",), counters.lookup_misses.total()
    for name in ("stored_chunks", "stored_bytes", "loaded_chunks", "loaded_bytes", "resets"):
        yield name, (), getattr(counters, name)
    yield "broken_invariants", (), counters.broken_invariants
    for reason, count in counters.lookup_misses.items():
        yield "lookup_misses", (reason,), count
    for name in (
        "promoted_chunks",
        "promoted_bytes",
        "cascaded_chunks",
        "cascaded_bytes",
        "evicted_chunks",
    ):
        for level, count in getattr(counters, name).items():
            yield name, (level,), count
    for labels, count in counters.dropped_chunks.items():
        yield "dropped_chunks", labels, count
    for labels, count in counters.declined_chunks.items():
        yield "declined_chunks", labels, count


def _gauges(hierarchy: Hierarchy) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "is_on", (), 1
    used, capacity = hierarchy.pool.residency()
    yield from _level_gauges(LEVEL_0, used, capacity)
    yield "pinned_chunks", (), hierarchy.pool.slots.num_pinned
    yield "waiting_restores", (), hierarchy.restores.num_waiting
    yield "moving_chunks", (), len(hierarchy.restores) + len(hierarchy.cascade)
    for level in hierarchy.levels:
        yield "level_usable", (level.name,), int(level.usable)
        if isinstance(level.tier, Bounded):
            yield from _level_gauges(level.name, level.tier.used_bytes(), level.tier.capacity_bytes)


def _level_gauges(
    level: str, used: int, capacity: int
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "resident_bytes", (level,), used
    yield "capacity_bytes", (level,), capacity
    yield "residency_ratio", (level,), used / capacity if capacity else 0.0


class StepStats:
    """Turns totals into what changed since the last step. Threads: the scheduler's."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, *, is_off: bool = False) -> OffloadingConnectorStats | None:
        """What changed, or None. Cost: a few microseconds.

        Args:
            is_off: The hierarchy is broken: report what was counted, and nothing that has to be
                asked of it.
        """
        # Whatever can fail comes first: nothing may be marked as seen that is not reported.
        gauges = [("is_on", (), 0.0)] if is_off else list(_gauges(self._hierarchy))
        stats: OffloadingConnectorStats | None = None
        seen = self._seen
        for name, labels, total in _counters(self._hierarchy):
            delta = total - seen.get((name, labels), 0)
            if delta:
                seen[name, labels] = total
                stats = stats or OffloadingConnectorStats()
                stats.increase_counter(_PREFIX + name, delta, labels)
        for name, labels, value in gauges:
            if seen.get((name, labels)) != value:
                seen[name, labels] = value
                stats = stats or OffloadingConnectorStats()
                stats.set_gauge(_PREFIX + name, value, labels)
        return stats
