"""The settings themselves: frozen, complete, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from undercroft.errors import ConfigError
from undercroft.settings.schema import (
    FAULTY,
    KEYS,
    TIER_KEYS,
    TIER_OPTIONS,
    Key,
    refuse_unknown,
)
from undercroft.settings.sizes import SIZE_FORMS

__all__ = ["Settings", "TierSettings", "build"]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One tier below host memory.

    Args:
        name: What metrics and log lines call it; unique among the tiers.
        type: Plug-in name in `undercroft.tiers`.
        capacity_bytes: Hard bound; None only for stock's `fs` without one, whose bound
            `undercroft.settings.limits.with_capacity` states once the file system is known.
        policy: Plug-in name in `undercroft.policies`.
        admission: Plug-in name in `undercroft.admission`.
        admission_options: That plug-in's own options.
        options: The tier type's own options, those that were written, parsed; for `disk` see
            `undercroft.settings.schema.TIER_OPTIONS`.
        events: Whether to report stores and removals when the engine sends events.
        locality: `LOCAL` or `REMOTE`, for events.
        write_rate_bytes: What may be written to it a second, or None.
        faults: The control file of faults injected on purpose, if it was written as the `inner`
            of a tier of type `faulty`; see docs/how-to/break-it.md.
    """

    name: str
    type: str
    capacity_bytes: int | None
    policy: str = "lru"
    admission: str = "always"
    admission_options: Mapping[str, Any] = field(default_factory=_nothing)
    options: Mapping[str, Any] = field(default_factory=_nothing)
    events: bool = True
    locality: str | None = None
    write_rate_bytes: int | None = None
    faults: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user can set.

    Args:
        host_bytes: Host memory of one replica, all ranks together.
        max_queued_write_bytes: Bytes that may wait to be written to tiers.
        policy: Plug-in name in `undercroft.policies`, for host memory.
        admission: Plug-in name in `undercroft.admission`, for host memory.
        admission_options: That plug-in's own options.
        tiers: Nearest first.
        model_id: What the user calls these weights, or None.
        offload_prompt_only: Keep prompts only, not generated tokens.
        keep_across_sleep: Drop nothing when the engine sleeps or pauses.
        self_describing_kv_events: Events carry token ids and parent hashes.
        lookup_deadline_s: See `undercroft.settings.schema.KEYS`, as for those that follow.
        promote_deadline_s: The same.
        load_only_if_faster: The same.
        load_margin: The same.
        drain_deadline_s: The same.
        shutdown_deadline_s: The same.
        open_deadline_s: The same.
        join_deadline_s: The same.
        restore_share_ratio: Share of host memory promotions may hold at once, in (0, 1].
        record: Folder to record a trace of the requests in, or None.
        record_max_bytes: Of all traces in that folder.
        record_block_tokens: Of a block of the trace; made a multiple of a chunk's.
        engine: Keys the engine reads itself, as parsed; nothing here acts on them.
        notes: What has to be said at start: one line each.
    """

    host_bytes: int
    max_queued_write_bytes: int
    policy: str = "lru"
    admission: str = "always"
    admission_options: Mapping[str, Any] = field(default_factory=_nothing)
    tiers: tuple[TierSettings, ...] = ()
    model_id: str | None = None
    offload_prompt_only: bool = True
    keep_across_sleep: bool = False
    self_describing_kv_events: bool = False
    lookup_deadline_s: float = 0.020
    promote_deadline_s: float = 2.0
    load_only_if_faster: bool = True
    load_margin: float = 1.5
    drain_deadline_s: float = 1.0
    shutdown_deadline_s: float = 3.0
    open_deadline_s: float = 60.0
    join_deadline_s: float = 60.0
    restore_share_ratio: float = 1.0
    record: str | None = None
    record_max_bytes: int = 64 << 20
    record_block_tokens: int = 128
    engine: Mapping[str, Any] = field(default_factory=_nothing)
    notes: tuple[str, ...] = field(default=(), compare=False)


def build(
    values: Mapping[str, object],
    origins: Mapping[str, str],
    engine: Mapping[str, Any],
    notes: tuple[str, ...],
) -> Settings:
    """Parse and complete merged values.

    Args:
        values: Our keys only, as written.
        origins: Where each key was written, for messages.
        engine: Keys the engine reads itself.
        notes: What the translation had to say.

    Raises:
        ConfigError: A value is wrong, or `host` is missing.
    """
    if "host" not in values:
        raise ConfigError(
            f'host is missing: how much host memory may be used, {SIZE_FORMS}; say "host": "32GiB" '
            f"(or stock vLLM's cpu_bytes_to_use)"
        )
    parsed = {
        name: KEYS[name].kind(value, f"{name} in {origins[name]}") for name, value in values.items()
    }
    host_bytes = parsed.pop("host")
    parsed.setdefault("max_queued_write_bytes", max(1, host_bytes // 4))
    _spread_admission(parsed)
    parsed["tiers"] = _tiers(parsed.get("tiers", []), origins.get("tiers", ""))
    return Settings(
        host_bytes=host_bytes,
        engine=MappingProxyType(dict(engine)),
        notes=notes,
        **parsed,
    )


def _tiers(written: list[dict[str, Any]], where: str) -> tuple[TierSettings, ...]:
    tiers: list[TierSettings] = []
    for index, entry in enumerate(written):
        tiers.append(_tier(entry, f"tiers[{index}] in {where}", {t.name for t in tiers}))
    places = [
        (tier.type, str(Path(tier.options["path"]).expanduser().resolve()))
        for tier in tiers
        if tier.type in TIER_OPTIONS and "path" in tier.options
    ]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"two tiers in {where} have the path {place[1]}; keep one of them")
    return tuple(tiers)


def _tier(entry: dict[str, Any], where: str, taken: set[str]) -> TierSettings:
    if "type" not in entry:
        raise ConfigError(f'{where} lacks type such as "disk": {TIER_KEYS["type"].meaning}')
    kind = TIER_KEYS["type"].kind(entry["type"], f"type of {where}")
    if kind == FAULTY:
        return _faulty(entry, where, taken)
    options = TIER_OPTIONS.get(kind)
    valid: Mapping[str, Key] = {**TIER_KEYS, **(options or {})}
    where = f"{where} (type {kind})"
    if options is not None:
        refuse_unknown(entry, valid, where)
    parsed = {
        name: valid[name].kind(value, f"{name} of {where}") if name in valid else value
        for name, value in entry.items()
    }
    _refuse_missing(parsed, valid, where)
    _spread_admission(parsed)
    own = ("admission_options",)
    common = {k: v for k, v in parsed.items() if k in TIER_KEYS or k in own}
    rest = {k: v for k, v in parsed.items() if k not in common}
    common["name"] = _name(common.get("name"), kind, where, taken)
    return TierSettings(
        capacity_bytes=common.pop("capacity", None),
        write_rate_bytes=common.pop("write_rate", None),
        options=MappingProxyType(rest),
        **common,
    )


def _faulty(entry: dict[str, Any], where: str, taken: set[str]) -> TierSettings:
    """The tier inside, as if it stood there by itself, and the file that makes it go wrong."""
    where = f"{where} (type {FAULTY})"
    valid = {"type": TIER_KEYS["type"], **TIER_OPTIONS[FAULTY]}
    common = sorted(name for name in entry if name in TIER_KEYS and name != "type")
    if common:
        raise ConfigError(f"{where} has the key {common[0]!r}, which belongs into inner")
    refuse_unknown(entry, valid, where)
    parsed = {name: valid[name].kind(value, f"{name} of {where}") for name, value in entry.items()}
    _refuse_missing(parsed, valid, where)
    inner = _tier(parsed["inner"], f"inner of {where}", taken)
    if inner.faults is not None:
        raise ConfigError(f"inner of {where} is of that type, too; keep one of them")
    return replace(inner, faults=parsed["control"])


def _refuse_missing(parsed: dict[str, Any], valid: Mapping[str, Key], where: str) -> None:
    for name, key in valid.items():
        if key.default == "required" and name not in parsed:
            example = ' such as "1TiB"' if name == "capacity" else ""
            raise ConfigError(f"{where} lacks {name}{example}: {key.meaning}")


def _name(given: str | None, kind: str, where: str, taken: set[str]) -> str:
    if given is None:
        numbered = (kind if n == 1 else f"{kind}-{n}" for n in range(1, len(taken) + 2))
        return next(name for name in numbered if name not in taken)
    if given in taken:
        raise ConfigError(f"{where} has the name {given!r}, which another tier has; change one")
    return given


def _spread_admission(parsed: dict[str, Any]) -> None:
    if "admission" in parsed:
        parsed["admission"], options = parsed["admission"]
        parsed["admission_options"] = MappingProxyType(options)
