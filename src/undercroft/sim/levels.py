"""Replay a trace through the production hierarchy: several levels, real code, no bytes.

Pool, levels, policies, admission, promotion, cascade and write queues are the classes that serve
an engine. Only the movers are others: they end a move when the clock has come to the time at which
the device would have. The engine is one that computes in no time and stores full blocks at once.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from threading import get_ident

from undercroft import plugins
from undercroft.errors import ConfigError
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy, Limits
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.request import Lookup, Request
from undercroft.hierarchy.slots import SLOT_ALIGNMENT_BYTES, Slots
from undercroft.keys import ChunkKey
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.sim.moment import Moment
from undercroft.sim.replay import block_keys, make_policy
from undercroft.sim.report import LevelReport, Report
from undercroft.sim.size_tier import Service, SizeTier, TimedTransfers
from undercroft.traces import Trace

__all__ = ["LevelPlan", "simulate"]

_WRITE_DEADLINE_S = 30.0
_STEP_S, _IDLE_STEP_S = 0.02, 0.1
"""How long a step of an engine takes, with requests that wait and without."""
_QUEUED_SHARE = 4


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """A level to simulate.

    Args:
        name: Of the level. The first one is host memory, whatever it is called.
        capacity_blocks: How many blocks fit, > 0.
        policy: Who goes first.
        admission: Who comes in.
        service: How fast the device is; host memory takes no time.
    """

    name: str
    capacity_blocks: int
    policy: str = "lru"
    admission: str = "always"
    service: Service = field(default_factory=Service)


def simulate(  # noqa: PLR0913 - each is one thing that a user may ask for
    trace: Trace,
    levels: Sequence[LevelPlan],
    *,
    bytes_per_token: int = 131_072,
    prefill_tokens_per_s: float = 10_000.0,
    num_warm: int = 0,
    limits: Limits | None = None,
    on_request: Callable[[], None] | None = None,
) -> Report:
    """Replay `trace` through the production hierarchy.

    Unlike `hit_curve` it knows time: requests come when the trace says so, wait for what lower
    levels read, and lose what did not get there, or was not read, in time. As an engine does, it
    looks up and stores full blocks only, and never evicts what a request in hand has loaded.
    Policies that learn share what they know, and are told of each request as the trace has it.

    Args:
        trace: The requests.
        levels: Nearest first, one at least.
        bytes_per_token: Of the model's KV cache: what devices have to move.
        prefill_tokens_per_s: What the engine computes a second, for the seconds saved.
        num_warm: Requests at the beginning that are replayed, not counted.
        limits: Deadlines and shares, as in production; None: an engine's defaults, but everything
            that is there is read, however slow.
        on_request: Called as each request comes.

    Raises:
        ConfigError: No level, a level without room, two of one name, or a warm start longer than
            the trace.
        UnknownPlugin: There is no such policy or admission.

    Cost: some 4 us a block reference with host memory alone, up to 60 us where many requests wait
    for a busy device. Memory: 4 KiB of address space a block of host memory, hardly any used.
    """
    _check(trace, levels, num_warm)
    limits = limits or Limits(load_margin=None)
    # Pages that nobody touches take no memory; it goes when the last view of it does.
    buffer = memoryview(mmap.mmap(-1, levels[0].capacity_blocks * SLOT_ALIGNMENT_BYTES))
    rates = (bytes_per_token * trace.block_tokens, prefill_tokens_per_s)
    with _unheard():
        return _Engine(trace, levels, buffer, rates, limits).run(num_warm, on_request or _nobody)


@contextmanager
def _unheard() -> Iterator[None]:
    """What the hierarchy would tell an operator now is in the report, as a number."""
    thread = get_ident()

    def is_not_ours(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("undercroft.hierarchy")
    ]
    for logger in loggers:
        logger.addFilter(is_not_ours)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_not_ours)


def _check(trace: Trace, levels: Sequence[LevelPlan], num_warm: int) -> None:
    if not levels:
        raise ConfigError("there is no level to simulate; give host memory at least")
    for level in levels:
        if level.capacity_blocks < 1:
            raise ConfigError(
                f"level {level.name} has room for {level.capacity_blocks} blocks; give 1 or more"
            )
    names = [LEVEL_0, *(level.name for level in levels[1:])]
    if len(set(names)) < len(names):
        raise ConfigError(f"levels need different names, not {', '.join(names)}")
    if not 0 <= num_warm <= trace.num_requests:
        raise ConfigError(
            f"{num_warm} requests are to be warm, but the trace has {trace.num_requests}"
        )


def _level(
    plan: LevelPlan,
    chunk_bytes: int,
    shared: tuple[Moment, Counters, KnownPrefixes | None],
    host: int,
    on_write: Callable[[ChunkKey], None],
) -> Level:
    moment, counters, known = shared
    tier = SizeTier(plan.name, plan.capacity_blocks * SLOT_ALIGNMENT_BYTES)
    queued = max(1, host // _QUEUED_SHARE) * SLOT_ALIGNMENT_BYTES
    tier.on_write = on_write
    return Level(
        tier,
        transfers=TimedTransfers(
            tier,
            plan.service,
            chunk_bytes=chunk_bytes,
            clock=moment,
            max_queued_write_bytes=queued,
        ),
        slot_bytes=(SLOT_ALIGNMENT_BYTES,),
        class_of=_only_class,
        make_policy=lambda capacity: make_policy(plan.policy, capacity, moment, known),
        admission=plugins.find("admission", plan.admission)(),
        clock=moment,
        counters=counters,
        events=LevelEvents(enabled=False),
        write_deadline_s=_WRITE_DEADLINE_S,
    )


def _only_class(_key: ChunkKey) -> int:
    return 0


def _known(plans: Sequence[LevelPlan]) -> KnownPrefixes | None:
    """What all levels share of prefixes, as large as an engine makes it; None: nobody takes it."""
    takes = (signature(plugins.find("policies", plan.policy)).parameters for plan in plans)
    if not any("known" in each for each in takes):
        return None
    host, *below = (plan.capacity_blocks for plan in plans)
    return KnownPrefixes.for_chunks(host, sum(below))


def _one_group(keys: list[ChunkKey], _chain: Iterable[ChunkKey]) -> list[list[ChunkKey]]:
    return [keys] if keys else []


def _nobody() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    keys: list[ChunkKey]
    arrived_s: float
    is_counted: bool


class _Tally:
    """What the counters of the hierarchy do not say."""

    def __init__(self, levels: Sequence[str]) -> None:
        self.num_references = self.num_tokens = 0
        self.waited_s = 0.0
        self.hit_blocks = dict.fromkeys(levels, 0)
        self.written: dict[str, set[ChunkKey]] = {name: set() for name in levels}

    def begin(self) -> None:
        """The warm start is over: what was written before is not counted."""
        for keys in self.written.values():
            keys.clear()


class _Engine:
    """Steps over the hierarchy in the order of an engine's calls; the clock jumps between them."""

    def __init__(
        self,
        trace: Trace,
        plans: Sequence[LevelPlan],
        buffer: memoryview,
        rates: tuple[int, float],
        limits: Limits,
    ) -> None:
        self._trace = trace
        self._plans = plans
        self._chunk_bytes, self._prefill_tokens_per_s = rates
        self._moment = Moment()
        self._counters = Counters()
        host = plans[0]
        slots = Slots(len(buffer), (SLOT_ALIGNMENT_BYTES,))
        slots.set_ready_bytes(len(buffer))
        known = _known(plans)
        shared = (self._moment, self._counters, known)
        self._transfers: list[TimedTransfers] = []
        self._tally = _Tally([LEVEL_0, *(plan.name for plan in plans[1:])])
        levels = [
            _level(
                plan,
                self._chunk_bytes,
                shared,
                host.capacity_blocks,
                self._tally.written[plan.name].add,
            )
            for plan in plans[1:]
        ]
        for level in levels:
            if isinstance(level.transfers, TimedTransfers):
                self._transfers.append(level.transfers)
        admission = plugins.find("admission", host.admission)()
        self._hierarchy = Hierarchy(
            lambda on_evict: Pool(
                slots,
                make_policy=lambda capacity: make_policy(
                    host.policy, capacity, self._moment, known
                ),
                class_of=_only_class,
                on_evict=on_evict,
                admission=None if host.admission == "always" else admission,
            ),
            levels,
            buffer=buffer,
            clock=self._moment,
            counters=self._counters,
            events=LevelEvents(enabled=False),
            limits=limits,
        )
        self._waiting: list[_Waiting] = []

    def run(self, num_warm: int, on_request: Callable[[], None]) -> Report:
        """All requests, and what is under way after the last; tells of each as it comes."""
        trace, keys = self._trace, block_keys(self._trace)
        rows = zip(
            trace.times_ms.tolist(),
            trace.input_tokens.tolist(),
            trace.kinds.tolist(),
            trace.iter_blocks(),
            strict=True,
        )
        began_s = 0.0
        before = self._counted()
        for number, (time_ms, tokens, kind, path) in enumerate(rows):
            arrives_s = time_ms / 1000
            self._go_on(arrives_s)
            self._moment.set(arrives_s)
            is_counted = number >= num_warm
            if number == num_warm:
                before, began_s = self._counted(), arrives_s
                self._tally.begin()
            chain = [keys[block] for block in path[: tokens // trace.block_tokens]]
            position_of = {key: place for place, key in enumerate(chain, 1)}.get
            request = Request(f"r{number}", position_of)
            request.use.every_key = partial(_one_group, chain)
            request.use.kind = kind
            self._waiting.append(_Waiting(request, chain, arrives_s, is_counted))
            if is_counted:
                self._tally.num_references += len(chain)
                self._tally.num_tokens += tokens
            self._step()
            on_request()
        self._go_on(float("inf"))
        if num_warm == trace.num_requests:
            before, began_s = self._counted(), self._moment.now_s()
            self._tally.begin()
        return self._report(before, began_s, trace.num_requests - num_warm)

    def _go_on(self, until_s: float) -> None:
        """Steps of the engine until then, or until nothing is under way."""
        while self._waiting or self._hierarchy.has_pending_work():
            step_s = _STEP_S if self._waiting else _IDLE_STEP_S
            earliest_s = self._moment.now_s() + step_s
            next_s = min((each.next_end_s for each in self._transfers), default=float("inf"))
            next_s = max(earliest_s, next_s if next_s < float("inf") else earliest_s)
            deadlines = [w.request.deadline_s for w in self._waiting if w.request.deadline_s]
            next_s = min(next_s, max(earliest_s, min(deadlines, default=next_s)))
            if next_s >= until_s:
                return
            self._moment.set(next_s)
            self._step()

    def _step(self) -> None:
        hierarchy, scheduled = self._hierarchy, list[tuple[_Waiting, int]]()
        left = []
        for entry in self._waiting:
            num_hits = self._walk(entry)
            if num_hits is None:
                left.append(entry)
                continue
            if num_hits:
                self._load(entry, entry.keys[:num_hits])
            if entry.is_counted:
                self._tally.waited_s += self._moment.now_s() - entry.arrived_s
            scheduled.append((entry, num_hits))
        self._waiting = left
        hierarchy.end_step([entry.request.id for entry, _ in scheduled])
        for entry, num_hits in scheduled:
            rest = entry.keys[num_hits:]
            if rest:
                plan = hierarchy.prepare_store(rest, entry.request)
                if plan.keys:
                    hierarchy.complete_store(plan.keys, entry.request)
                    self._tally.written[LEVEL_0].update(plan.keys)
            hierarchy.finish_request(entry.request)
        hierarchy.step_ended()

    def _walk(self, entry: _Waiting) -> int | None:
        """The prefix that is there; None: part of it is on its way."""
        lookup, request = self._hierarchy.lookup, entry.request
        num_hits, is_pending = 0, False
        for key in entry.keys:
            answer = lookup(key, request)
            if answer is Lookup.MISS:
                break
            is_pending = is_pending or answer is Lookup.PENDING
            num_hits += 1
        return None if is_pending else num_hits

    def _load(self, entry: _Waiting, keys: list[ChunkKey]) -> None:
        hierarchy, tally = self._hierarchy, self._tally
        if entry.is_counted:
            for key in keys:
                tally.hit_blocks[hierarchy.source_of(key, entry.request)] += 1
        tally.written[LEVEL_0].update(entry.request.promoted)
        hierarchy.prepare_load(keys, entry.request)
        hierarchy.complete_load(keys, entry.request)

    def _counted(self) -> dict[str, tuple[int, int, int, int]]:
        """By level: reads, writes, evictions, refusals so far."""
        counters = self._counters
        promoted = counters.promoted_chunks
        declined: dict[str, int] = {}
        for (level, _), count in counters.declined_chunks.items():
            declined[level] = declined.get(level, 0) + count
        found = {
            LEVEL_0: (
                counters.loaded_chunks,
                counters.stored_chunks + sum(promoted.values()),
                counters.evicted_chunks[LEVEL_0],
                declined.get(LEVEL_0, 0),
            )
        }
        for plan in self._plans[1:]:
            found[plan.name] = (
                promoted[plan.name],
                counters.cascaded_chunks[plan.name],
                counters.evicted_chunks[plan.name],
                declined.get(plan.name, 0),
            )
        return found

    def _report(
        self, before: dict[str, tuple[int, int, int, int]], began_s: float, num_requests: int
    ) -> Report:
        after, tally = self._counted(), self._tally
        rows = []
        for name, plan in zip(after, self._plans, strict=True):
            read, written, evicted, declined = (
                b - a for a, b in zip(before[name], after[name], strict=True)
            )
            hit_blocks = tally.hit_blocks[name]
            hit_tokens = hit_blocks * self._trace.block_tokens
            rows.append(
                LevelReport(
                    name=name,
                    capacity_blocks=plan.capacity_blocks,
                    hit_blocks=hit_blocks,
                    hit_tokens=hit_tokens,
                    hit_bytes=hit_blocks * self._chunk_bytes,
                    saved_prefill_s=hit_tokens / self._prefill_tokens_per_s,
                    num_read=read,
                    num_written=written,
                    num_distinct_written=len(tally.written[name]),
                    num_evicted=evicted,
                    num_declined=declined,
                )
            )
        return Report(
            num_requests=num_requests,
            num_references=tally.num_references,
            num_tokens=tally.num_tokens,
            waited_s=tally.waited_s,
            spanned_s=self._moment.now_s() - began_s,
            levels=tuple(rows),
        )
