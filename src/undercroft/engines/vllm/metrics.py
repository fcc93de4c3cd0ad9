"""Our counters as vLLM metrics.

vLLM declares metrics in the API front end and fills them in the engine core, so the definitions
depend on nothing but the user's configuration. Values are plain `int` and `float`: anything else,
or an undeclared name, would stop the engine's output handler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from undercroft.engines.vllm.self_check import CAUSES, RESULTS
from undercroft.engines.vllm.tally import Pace
from undercroft.hierarchy.breaker import BreakerState
from undercroft.hierarchy.counters import NO_LEVEL, Counters, Samples
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy
from undercroft.hierarchy.level import Level
from undercroft.tiers.base import Bounded, Budgeted, MovedElsewhere
from undercroft.traces.recorder import RESULTS as RECORDED

__all__ = [
    "DECLINE_REASONS",
    "DROP_REASONS",
    "MISS_REASONS",
    "PREFIX",
    "StepStats",
    "metric_definitions",
]

PREFIX = "vllm:undercroft_"

MISS_REASONS = {
    NO_LEVEL: ("absent",),
    LEVEL_0: ("deadline",),
    "below": (
        "deadline",
        "evicted_again",
        "not_restored",
        "read_failed",
        "too_slow",
        "unavailable",
    ),
}
DECLINE_REASONS = {
    LEVEL_0: ("before_reset", "full", "not_admitted"),
    "below": (
        "backpressure",
        "before_reset",
        "evicted_before_its_turn",
        "not_admitted",
        "queue_full",
        "unavailable",
        "write_budget",
    ),
}
DROP_REASONS = {
    LEVEL_0: ("copy_failed", "load_failed"),
    "below": (
        "closed",
        "corrupt",
        "formattoonew",
        "full",
        "given_up",
        "timeout",
        "unavailable",
        "vanished",
    ),
}
_RESULTS = ("hit", "pending", "miss")
_STATES = {state: state.value.replace(" ", "_") for state in BreakerState}
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lookups": ("Lookups of one chunk, by answer.", ("result",)),
    "lookup_misses": ("Lookups answered MISS, by where and why.", ("level", "reason")),
    "requests": ("Requests that began to run, by what became of their lookups.", ("result",)),
    "skipped_restores": (
        "Restores cut or given up, as computing was predicted to be quicker.",
        ("level",),
    ),
    "self_check_warnings": ("Warnings that nothing is served, by cause.", ("cause",)),
    "hit_chunks": ("Chunks that requests went on to load, by where they were.", ("level",)),
    "hit_tokens": ("Prompt tokens not computed because of them.", ("level",)),
    "saved_prefill_seconds": (
        "Estimated engine time that computing those tokens would have taken.",
        ("level",),
    ),
    "stored_chunks": ("Chunks copied from the engine into host memory.", ()),
    "stored_bytes": ("Bytes copied from the engine into host memory.", ()),
    "loaded_chunks": ("Chunks copied from host memory into the engine.", ()),
    "loaded_bytes": ("Bytes copied from host memory into the engine.", ()),
    "promoted_chunks": ("Chunks read and verified from a lower level.", ("level",)),
    "promoted_bytes": ("Bytes read and verified from a lower level.", ("level",)),
    "cascaded_chunks": ("Chunks written to a lower level.", ("level",)),
    "cascaded_bytes": ("Bytes written to a lower level.", ("level",)),
    "written_bytes": (
        "Bytes written to a level's medium, headers, indexes and deletes included.",
        ("level",),
    ),
    "evicted_chunks": ("Chunks that left a level by choice of its policy.", ("level",)),
    "dropped_chunks": (
        "Chunks that left a level, or never reached it, by fault.",
        ("level", "reason"),
    ),
    "declined_chunks": ("Chunks that were not let into a level, by reason.", ("level", "reason")),
    "transfer_retries": ("Tries of a read, write or delete beyond its first.", ("level",)),
    "late_transfers": ("Reads and writes that came back after their deadline.", ("level",)),
    "breaker_openings": ("Times a level was left alone after failures.", ("level",)),
    "tier_bugs": ("Times a tier broke one of our invariants.", ("level",)),
    "mover_deaths": ("Processes that moved a level's bytes and ended unasked.", ("level",)),
    "recorded_requests": (
        "Requests that ended while a trace was recorded, by what became of their lines.",
        ("result",),
    ),
    "resets": ("Times the whole cache was dropped on request.", ()),
    "broken_invariants": ("Faults of our own that were turned into misses.", ()),
}

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "resident_bytes": ("Bytes of a level that hold chunks.", ("level",)),
    "capacity_bytes": ("Bytes a level may hold.", ("level",)),
    "residency_ratio": ("Resident bytes over capacity, 0 to 1.", ("level",)),
    "pinned_chunks": ("Chunks of a level that may not be evicted now.", ("level",)),
    "waiting_restores": ("Requests that wait for chunks of a lower level.", ()),
    "moving_chunks": ("Chunks on their way to or from a lower level.", ()),
    "waiting_chunks": ("Chunks whose turn to be copied down to a level has not come.", ("level",)),
    "queued_chunks": ("Chunks that wait for a mover thread.", ("level", "op")),
    "queued_write_bytes": ("Bytes of the writes that wait for a mover thread.", ("level",)),
    "max_queued_write_bytes": ("The bound on them.", ("level",)),
    "write_budget_bytes": ("What may be written to a level in a day, by all engines.", ("level",)),
    "write_budget_left_bytes": ("What is left of it now.", ("level",)),
    "running_transfers": ("Reads, writes and deletes that a mover thread is in.", ("level",)),
    "mover_process_up": (
        "1 if a process of the level's own moves its bytes, 0 if the engine's threads do.",
        ("level",),
    ),
    "stuck_threads": ("Mover threads that are in a call past its deadline.", ("level",)),
    "breaker_state": ("1 for the state that a level's breaker is in.", ("level", "state")),
    "level_usable": ("1 if a lower level is asked at all, else 0.", ("level",)),
    "prefill_seconds_per_token": ("Running estimate of what a prompt token costs.", ()),
    "is_on": ("1 normally; 0 after a fault of our own, until the engine restarts.", ()),
}

_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "store_seconds": ("From a store's plan to its end, seconds.", ()),
    "load_seconds": ("From a load's plan to its end, seconds.", ()),
    "restore_wait_seconds": (
        "From a request's first wait for a lower level to its load, seconds.",
        (),
    ),
    "promote_seconds": ("Of one chunk read from a level, waiting included, seconds.", ("level",)),
    "cascade_seconds": ("Of one chunk written to a level, waiting included, seconds.", ("level",)),
}

_BY_LEVEL = (
    "hit_chunks",
    "hit_tokens",
    "saved_prefill_seconds",
    "promoted_chunks",
    "promoted_bytes",
    "cascaded_chunks",
    "cascaded_bytes",
    "evicted_chunks",
    "skipped_restores",
)
_PLAIN = (
    "stored_chunks",
    "stored_bytes",
    "loaded_chunks",
    "loaded_bytes",
    "resets",
    "broken_invariants",
)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric this adapter may ever report."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, (text, labels) in _COUNTERS.items():
        definitions[PREFIX + name] = OffloadingCounterMetadata(text, labels)
    for name, (text, labels) in _GAUGES.items():
        definitions[PREFIX + name] = OffloadingGaugeMetadata(text, labels)
    for name, (text, labels) in _HISTOGRAMS.items():
        definitions[PREFIX + name] = OffloadingHistogramMetadata(text, labels, _SECONDS)
    return definitions


_Reading: TypeAlias = tuple[str, tuple[str, ...], float]
"""The name without prefix, label values, and the total or the value now."""


def _counters(hierarchy: Hierarchy) -> Iterator[_Reading]:
    counters = hierarchy.counters
    yield "lookups", ("hit",), counters.lookup_hits
    yield "lookups", ("pending",), counters.lookup_pending
    yield "lookups", ("miss",), counters.lookup_misses.total()
    for name in _PLAIN:
        yield name, (), getattr(counters, name)
    for name in ("lookup_misses", "dropped_chunks", "declined_chunks"):
        reasons: Mapping[tuple[str, str], int] = getattr(counters, name)
        for labels, count in reasons.items():
            yield name, labels, count
    for name in _BY_LEVEL:
        totals: Mapping[str, float] = getattr(counters, name)
        for level, total in totals.items():
            yield name, (level,), total
    for name in ("requests", "recorded_requests"):
        results: Mapping[str, int] = getattr(counters, name)
        for result, count in results.items():
            yield name, (result,), count
    for cause, count in counters.self_check_warnings.items():
        yield "self_check_warnings", (cause,), count
    for below in hierarchy.levels:
        yield from _level_counters(below)


def _level_counters(each: Level) -> Iterator[_Reading]:
    label, transfers = (each.name,), each.transfers
    yield "transfer_retries", label, transfers.num_retries
    yield "late_transfers", label, transfers.num_late
    yield "breaker_openings", label, transfers.breaker.num_opened
    yield "tier_bugs", label, transfers.num_bugs
    if isinstance(each.tier, MovedElsewhere):
        yield "mover_deaths", label, each.tier.mover_deaths()
    if isinstance(each.tier, Budgeted):
        yield "written_bytes", label, each.tier.written_bytes()


def _zeros(hierarchy: Hierarchy) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every counter that may come to be: a rate sees a first event only if there was a zero."""
    yield from (("lookups", (result,)) for result in _RESULTS)
    yield from (("requests", (result,)) for result in RESULTS)
    yield from (("self_check_warnings", (cause,)) for cause in CAUSES)
    yield from (("recorded_requests", (result,)) for result in RECORDED)
    yield from (("lookup_misses", (NO_LEVEL, reason)) for reason in MISS_REASONS[NO_LEVEL])
    yield from ((name, ()) for name in _PLAIN)
    levels = [level.name for level in hierarchy.levels]
    for each in hierarchy.levels:
        if isinstance(each.tier, MovedElsewhere):
            yield "mover_deaths", (each.name,)
    for level in (LEVEL_0, *levels):
        place = LEVEL_0 if level == LEVEL_0 else "below"
        yield from (("lookup_misses", (level, reason)) for reason in MISS_REASONS[place])
        yield from (("dropped_chunks", (level, reason)) for reason in DROP_REASONS[place])
        yield from (("declined_chunks", (level, reason)) for reason in DECLINE_REASONS[place])
        for name in ("hit_chunks", "hit_tokens", "saved_prefill_seconds", "evicted_chunks"):
            yield name, (level,)
    for level in levels:
        for name in ("promoted_chunks", "promoted_bytes", "cascaded_chunks", "cascaded_bytes"):
            yield name, (level,)
        yield "skipped_restores", (level,)
        for name in ("transfer_retries", "late_transfers", "breaker_openings", "tier_bugs"):
            yield name, (level,)


def _gauges(hierarchy: Hierarchy, pace: Pace) -> Iterator[_Reading]:
    yield "is_on", (), 1
    used, capacity = hierarchy.pool.residency()
    yield from _room(LEVEL_0, used, capacity)
    yield "pinned_chunks", (LEVEL_0,), hierarchy.pool.slots.num_pinned
    yield "waiting_restores", (), hierarchy.restores.num_waiting
    yield "moving_chunks", (), len(hierarchy.restores) + len(hierarchy.cascade)
    if (seconds_per_token := pace.seconds_per_token) is not None:
        yield "prefill_seconds_per_token", (), seconds_per_token
    for level in hierarchy.levels:
        yield from _level_gauges(level)
        if isinstance(level.tier, Budgeted) and (allowed := level.tier.allowance()) is not None:
            yield "write_budget_bytes", (level.name,), allowed.budget_bytes
            yield "write_budget_left_bytes", (level.name,), allowed.day_left_bytes
        yield "waiting_chunks", (level.name,), hierarchy.cascade.num_waiting(level.name)
        if isinstance(level.asked, Bounded):
            yield from _room(level.name, level.asked.used_bytes(), level.asked.capacity_bytes)


def _level_gauges(level: Level) -> Iterator[_Reading]:
    transfers, name = level.transfers, level.name
    label = (name,)
    yield "level_usable", label, int(level.usable)
    yield "queued_chunks", (name, "read"), transfers.num_queued_reads
    yield "queued_chunks", (name, "write"), transfers.num_queued_writes
    yield "queued_write_bytes", label, transfers.queued_write_bytes
    yield "max_queued_write_bytes", label, transfers.max_queued_write_bytes
    yield "running_transfers", label, transfers.num_running
    yield "stuck_threads", label, transfers.num_stuck
    if isinstance(level.tier, MovedElsewhere):
        yield "mover_process_up", label, int(level.tier.is_moved_elsewhere())
    now = transfers.breaker.state
    for state, word in _STATES.items():
        yield "breaker_state", (name, word), int(state is now)


def _room(level: str, used_bytes: int, capacity_bytes: int) -> Iterator[_Reading]:
    yield "resident_bytes", (level,), used_bytes
    yield "capacity_bytes", (level,), capacity_bytes
    yield "residency_ratio", (level,), used_bytes / capacity_bytes if capacity_bytes else 0.0


def _samples(counters: Counters) -> Iterator[tuple[str, tuple[str, ...], list[float]]]:
    for name, (_, labelnames) in _HISTOGRAMS.items():
        samples: Samples = getattr(counters, name)
        for level, seconds in samples.take().items():
            yield name, (level,) if labelnames else (), seconds


class StepStats:
    """Turns totals into what changed since the last step. Threads: the scheduler's."""

    def __init__(self, hierarchy: Hierarchy, pace: Pace) -> None:
        self._hierarchy = hierarchy
        self._pace = pace
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, *, is_off: bool = False) -> OffloadingConnectorStats | None:
        """What changed, or None. Cost: some 15 us and 20 us a level, whatever happened.

        Args:
            is_off: The hierarchy is broken: report what was counted, and nothing that has to be
                asked of it.
        """
        # Whatever can fail comes first: nothing may be marked as seen that is not reported.
        gauges: list[_Reading] = [("is_on", (), 0.0)]
        if not is_off:
            gauges = list(_gauges(self._hierarchy, self._pace))
        totals = list(_counters(self._hierarchy))
        stats = OffloadingConnectorStats()
        if not self._seen:
            self._begin(stats)
        for name, labels, total in totals:
            delta = total - self._seen.get((name, labels), 0)
            if delta > 0:
                self._seen[name, labels] = total
                stats.increase_counter(PREFIX + name, delta, labels)
        for name, labels, value in gauges:
            if self._seen.get((name, labels)) != value:
                self._seen[name, labels] = value
                stats.set_gauge(PREFIX + name, value, labels)
        for name, labels, seconds in _samples(self._hierarchy.counters):
            for each in seconds:
                stats.observe_histogram(PREFIX + name, each, labels)
        return None if stats.is_empty() else stats

    def _begin(self, stats: OffloadingConnectorStats) -> None:
        for name, labels in _zeros(self._hierarchy):
            self._seen[name, labels] = 0
            stats.increase_counter(PREFIX + name, 0, labels)
        levels = [(level.name,) for level in self._hierarchy.levels]
        for name, (_, labelnames) in _HISTOGRAMS.items():
            for labels in levels if labelnames else [()]:
                stats.observe_histogram(PREFIX + name, 0.0, labels)
                # It is there now, and has seen nothing.
                stats.data["data"][PREFIX + name][labels].clear()
