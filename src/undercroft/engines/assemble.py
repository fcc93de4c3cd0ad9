"""Put a hierarchy together from settings. Knows no engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from undercroft.admission.base import Admission
from undercroft.clock import Clock, SystemClock
from undercroft.engines.opening import Opening
from undercroft.errors import ConfigError, TierError, UnknownPlugin
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.events import LevelEvents
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy, Limits
from undercroft.hierarchy.history import History
from undercroft.hierarchy.level import Level
from undercroft.hierarchy.pool import Pool
from undercroft.hierarchy.slots import Slots, slot_bytes_for
from undercroft.hierarchy.transfers import Transfers
from undercroft.keys import ChunkKey, Namespace
from undercroft.plugins import find
from undercroft.policies.base import EvictionPolicy
from undercroft.policies.known_prefixes import KnownPrefixes
from undercroft.settings import Settings, TierSettings, with_capacity
from undercroft.settings.schema import FAULTY
from undercroft.tiers.base import Batched, SharedMemory, Tier
from undercroft.tiers.disk.history import HistoryFile, history_bytes
from undercroft.tiers.disk.names import ROOT_NAME

__all__ = ["Geometry", "assemble", "check_plugins", "held_bytes", "make_tier", "tokens_that_fit"]

_LOG = logging.getLogger(__name__)
_WRITE_DEADLINE_S = 30.0
_SMALL_CHUNK_BYTES = 1 << 20
_NUM_THREADS, _NUM_THREADS_SMALL = 4, 8
"""Small chunks spend as long on checksums and bookkeeping as in the device: more of them are under
way at once (docs/explanation/design/0002-disk-layout.md)."""
_NUM_WAITING = 3
"""Where others move the bytes: two for reads, and one that writes and deletes leave to them."""
_QUEUED_CHUNKS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """The chunks of one model on one replica.

    Args:
        chunk_bytes: Payload bytes of a chunk of each group, all ranks together.
        tokens_per_chunk: Tokens a chunk of each group spans.
        group_of: The index of a key's group.
    """

    chunk_bytes: Sequence[int]
    tokens_per_chunk: Sequence[int]
    group_of: Callable[[ChunkKey], int]

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """The size classes: different slot sizes, largest first."""
        return tuple(sorted({slot_bytes_for(n) for n in self.chunk_bytes}, reverse=True))

    def class_of(self) -> Callable[[ChunkKey], int]:
        """The size class of a key."""
        sizes = self.slot_bytes
        if len(sizes) == 1:
            return lambda _key: 0
        classes = [sizes.index(slot_bytes_for(n)) for n in self.chunk_bytes]
        group_of = self.group_of
        return lambda key: classes[group_of(key)]


class _Policies:
    """Makes policies; those that take it share what is known of prefixes."""

    def __init__(
        self, settings: Settings, geometry: Geometry, host_bytes: int, clock: Clock
    ) -> None:
        chunk_bytes = min(geometry.slot_bytes)
        self._num_chunks = host_bytes // chunk_bytes
        below = sum(tier.capacity_bytes or 0 for tier in settings.tiers)
        self._num_chunks_below = below // chunk_bytes
        self._clock = clock
        self._known: KnownPrefixes | None = None

    def of(self, name: str, where: str) -> Callable[[int], EvictionPolicy]:
        """What makes one for a capacity in chunks."""
        make = find("policies", name)
        takes = signature(make).parameters

        def made(capacity_chunks: int) -> EvictionPolicy:
            offered: dict[str, object] = {"clock": self._clock}
            if "known" in takes:
                self._known = self._known or KnownPrefixes.for_chunks(
                    self._num_chunks, self._num_chunks_below
                )
                offered["known"] = self._known
            policy: EvictionPolicy = _made(
                partial(make, capacity_chunks), f"policy {name} of {where}", {}, offered
            )
            return policy

        return made


_Shared = tuple[Clock, Counters, LevelEvents, _Policies]


def tokens_that_fit(geometry: Geometry, total_bytes: int) -> int:
    """Tokens of a full prefix, all groups counted, that fit into `total_bytes`."""
    bytes_per_token = sum(
        slot_bytes_for(size) / tokens
        for size, tokens in zip(geometry.chunk_bytes, geometry.tokens_per_chunk, strict=True)
    )
    return int(total_bytes / bytes_per_token)


def check_plugins(settings: Settings) -> None:
    """Refuse settings that name a plug-in, or an option of an admission, that is not there.

    Raises:
        ConfigError: The first one found; the message names the nearest that is.
    """
    _installed("policies", settings.policy, "policy of host memory")
    _installed("admission", settings.admission, "admission of host memory")
    _admission(settings, "host memory", SystemClock(), 1)
    for tier in settings.tiers:
        _installed("tiers", tier.type, f"type of tier {tier.name}")
        if tier.faults is not None:
            _installed("tiers", FAULTY, f"type round tier {tier.name}")
        _installed("policies", tier.policy, f"policy of tier {tier.name}")
        _installed("admission", tier.admission, f"admission of tier {tier.name}")
        _admission(tier, f"tier {tier.name}", SystemClock(), 1)


def _installed(kind: str, name: str, where: str) -> None:
    try:
        find(kind, name)
    except UnknownPlugin as error:
        raise UnknownPlugin(f"{where}: {error}") from error


def assemble(  # noqa: PLR0913 - the one place where everything meets
    settings: Settings,
    geometry: Geometry,
    *,
    namespace: Namespace,
    buffer: memoryview,
    clock: Clock,
    num_replicas: int,
    with_events: bool,
    take_failed_stores: Callable[[], frozenset[int] | None],
    memory: SharedMemory | None = None,
) -> Hierarchy:
    """Level 0 over `buffer` and the tiers of `settings` below it.

    A tier that cannot be opened now is left out with an error line: the engine runs without it.

    Raises:
        ConfigError: The settings can never work. No tier is left open.
    """
    counters = Counters()
    events = LevelEvents(enabled=with_events)
    policies = _Policies(settings, geometry, len(buffer), clock)
    with ExitStack() as opened:
        levels = _open_levels(
            settings,
            geometry,
            (clock, counters, events, policies),
            (namespace, num_replicas, memory),
            opened,
        )
        hierarchy = _hierarchy(
            settings,
            geometry,
            levels,
            buffer=buffer,
            shared=(clock, counters, events, policies),
            take_failed_stores=take_failed_stores,
        )
        history = _history(
            settings, [level.name for level in levels], namespace, clock, num_replicas
        )
        opened.pop_all()
    if history:
        counters.note = history.note
        history.start()
        hierarchy.on_close.append(history.close)
    return hierarchy


def _open_levels(
    settings: Settings,
    geometry: Geometry,
    shared: _Shared,
    whose: tuple[Namespace, int, SharedMemory | None],
    opened: ExitStack,
) -> list[Level]:
    """The levels below 0; `opened` closes what was opened, also if a later one is refused."""
    clock, levels = shared[0], list[Level]()
    for tier_settings in settings.tiers:
        make = partial(_open_level, tier_settings, settings, geometry, shared, whose)
        close = partial(_close, clock=clock, seconds=settings.shutdown_deadline_s)
        opening = Opening(make, discard=close, name=tier_settings.name)
        try:
            level = opening.wait(settings.open_deadline_s)
        except ConfigError:
            raise
        except TierError as error:
            _LOG.error("tier %s is left out: %s", tier_settings.name, error)
            continue
        except Exception as error:  # noqa: BLE001 - a stranger's tier may raise anything
            why = f"{type(error).__name__}: {error}"
            _LOG.error("tier %s is left out: %s", tier_settings.name, why, exc_info=error)
            continue
        opened.callback(close, level)
        levels.append(level)
    return levels


def _open_level(
    tier_settings: TierSettings,
    settings: Settings,
    geometry: Geometry,
    shared: _Shared,
    whose: tuple[Namespace, int, SharedMemory | None],
) -> Level:
    tier = _open_tier(tier_settings, shared[0], *whose)
    try:
        return _level(tier, tier_settings, settings, geometry, whose[1], shared)
    except BaseException:
        with suppress(TierError):
            tier.close()
        raise


def _close(level: Level, clock: Clock, seconds: float) -> None:
    level.close(clock.now_s() + seconds)


def _hierarchy(
    settings: Settings,
    geometry: Geometry,
    levels: Sequence[Level],
    *,
    buffer: memoryview,
    shared: _Shared,
    take_failed_stores: Callable[[], frozenset[int] | None],
) -> Hierarchy:
    clock, counters, events, policies = shared
    class_of = geometry.class_of()
    slots = Slots(len(buffer), geometry.slot_bytes)
    admission = _admission(settings, "host memory", clock, 1)
    max_slots = sum(slots.capacity(c) for c in range(len(geometry.slot_bytes)))
    return Hierarchy(
        lambda on_evict: Pool(
            slots,
            make_policy=policies.of(settings.policy, "host memory"),
            class_of=class_of,
            on_evict=on_evict,
            admission=None if settings.admission == "always" else admission,
        ),
        levels,
        buffer=buffer,
        clock=clock,
        counters=counters,
        events=events,
        limits=Limits(
            promote_deadline_s=settings.promote_deadline_s,
            drain_deadline_s=settings.drain_deadline_s,
            shutdown_deadline_s=settings.shutdown_deadline_s,
            restore_share_ratio=settings.restore_share_ratio,
            load_margin=settings.load_margin if settings.load_only_if_faster else None,
            max_cascade_waiting=_QUEUED_CHUNKS_PER_SLOT * max_slots,
        ),
        take_failed_stores=take_failed_stores,
    )


def _history(
    settings: Settings, levels: list[str], namespace: Namespace, clock: Clock, num_replicas: int
) -> History | None:
    """A history of what became of chunks, on the first disk tier, if that is large enough."""
    for tier in settings.tiers:
        if tier.type != "disk" or tier.name not in levels or not isinstance(clock, SystemClock):
            continue
        own_bytes = held_bytes(tier) if tier.capacity_bytes is None else 0
        resolved, _ = with_capacity(tier, own_bytes=own_bytes)
        num_bytes = history_bytes(resolved.capacity_bytes or 0, num_replicas)
        if not num_bytes:
            continue
        file = HistoryFile(
            str(Path(tier.options["path"]).expanduser()),
            namespace=namespace,
            levels=[LEVEL_0, *levels],
            num_bytes=num_bytes,
            capacity_bytes=resolved.capacity_bytes or 0,
            free_space_floor_bytes=int(tier.options.get("free_space_floor", 1 << 30)),
            clock=clock,
        )
        return History(file, clock)
    return None


def _admission(
    level: Settings | TierSettings, where: str, clock: Clock, num_replicas: int
) -> Admission:
    """The admission of a level; `num_replicas` share what it may write."""
    offered: dict[str, object] = {"clock": clock, "num_replicas": num_replicas}
    if isinstance(level, TierSettings):
        offered["level_budget_bytes"] = level.options.get("write_budget")
    what = f"admission {level.admission} of {where}"
    make = find("admission", level.admission)
    made: Admission = _made(make, what, level.admission_options, offered)
    return made


def _made(
    make: Callable[..., Any],
    what: str,
    options: Mapping[str, Any],
    offered: Mapping[str, object] = MappingProxyType({}),
) -> Any:  # noqa: ANN401 - the plug-in decides what it is
    """Call a plug-in's factory with the user's options and what it takes of `offered`.

    Raises:
        ConfigError: The factory has no such option, or lacks one; the message lists them.
    """
    takes = signature(make)
    given = {name: value for name, value in offered.items() if name in takes.parameters}
    try:
        bound = takes.bind(**given, **options)
    except TypeError as error:
        known = ", ".join(name for name in takes.parameters if name not in offered)
        raise ConfigError(
            f"{what} has the options {', '.join(map(repr, options)) or 'none'}: {error}; it takes "
            f"{known or 'none'}"
        ) from error
    return make(*bound.args, **bound.kwargs)


def _level(
    tier: Tier,
    tier_settings: TierSettings,
    settings: Settings,
    geometry: Geometry,
    num_replicas: int,
    shared: _Shared,
) -> Level:
    clock, counters, events, policies = shared
    rate_bytes = tier_settings.write_rate_bytes
    max_queued = max(settings.max_queued_write_bytes, *geometry.slot_bytes)
    return Level(
        tier,
        transfers=Transfers(
            tier,
            clock=clock,
            num_threads=_num_threads(tier, tier_settings, geometry),
            max_queued_write_bytes=max_queued,
        ),
        slot_bytes=geometry.slot_bytes,
        class_of=geometry.class_of(),
        make_policy=policies.of(tier_settings.policy, f"tier {tier_settings.name}"),
        admission=_admission(tier_settings, f"tier {tier_settings.name}", clock, num_replicas),
        clock=clock,
        counters=counters,
        events=events if tier_settings.events else LevelEvents(enabled=False),
        write_deadline_s=_WRITE_DEADLINE_S,
        write_rate_bytes=None if rate_bytes is None else max(1, rate_bytes // num_replicas),
    )


def _num_threads(tier: Tier, settings: TierSettings, geometry: Geometry) -> int:
    if isinstance(tier, Batched) and tier.batch_bytes:
        return _NUM_WAITING
    small = max(geometry.slot_bytes) < _SMALL_CHUNK_BYTES
    return int(settings.options.get("num_threads", _NUM_THREADS_SMALL if small else _NUM_THREADS))


def held_bytes(settings: TierSettings) -> int:
    """What earlier runs hold on disk, of all namespaces. Cost: one `stat` a file."""
    path = settings.options.get("path")
    if path is None:
        return 0
    held = 0
    for folder, _, names in os.walk(Path(path).expanduser() / ROOT_NAME):
        for name in names:
            with suppress(OSError):
                held += (Path(folder) / name).lstat().st_blocks * 512
    return held


def make_tier(
    settings: TierSettings,
    *,
    namespace: Namespace,
    clock: Clock,
    num_replicas: int,
    memory: SharedMemory | None = None,
) -> Tier:
    """One tier, open.

    Args:
        settings: With a capacity: see `with_capacity`.
        namespace: Whose chunks.
        clock: Time.
        num_replicas: Processes of this namespace that share what the tier names.
        memory: Where level 0 lies, if in a file.

    Raises:
        ConfigError: The settings can never work.
        TierError: It cannot be opened now.
    """
    if settings.capacity_bytes is None:
        raise ConfigError(f"tier {settings.name} needs a capacity, such as 1TiB")
    options = {k: v for k, v in settings.options.items() if k != "num_threads"}
    if "path" in options:
        options["path"] = str(Path(options["path"]).expanduser())
    for name in ("free_space_floor", "write_budget"):
        if name in options:
            options[f"{name}_bytes"] = options.pop(name)
    offered = {
        "name": settings.name,
        "namespace": namespace,
        "capacity_bytes": settings.capacity_bytes,
        "clock": clock,
        "num_replicas": num_replicas,
        "memory": memory,
        "num_threads": int(settings.options.get("num_threads", _NUM_THREADS)),
    }
    what = f"tier {settings.name} (type {settings.type})"
    make = find("tiers", settings.type)

    def build(files: object = None) -> Tier:
        tier: Tier = _made(
            make, what, options, offered if files is None else offered | {"files": files}
        )
        return tier

    if settings.faults is None:
        return build()
    faulty: Tier = find("tiers", FAULTY)(
        build,
        control=settings.faults,
        name=settings.name,
        clock=clock,
        path=options.get("path"),
        takes_files="files" in signature(make).parameters,
    )
    return faulty


def _open_tier(
    settings: TierSettings,
    clock: Clock,
    namespace: Namespace,
    num_replicas: int,
    memory: SharedMemory | None,
) -> Tier:
    own_bytes = held_bytes(settings) if settings.capacity_bytes is None else 0
    resolved, note = with_capacity(settings, own_bytes=own_bytes)
    if note:
        _LOG.warning("%s", note)
    return make_tier(
        resolved, namespace=namespace, clock=clock, num_replicas=num_replicas, memory=memory
    )
