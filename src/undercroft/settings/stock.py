"""Stock vLLM's keys, so that a user changes only `spec_name` and `spec_module_path`.

Names and meanings: vLLM 0.32, `vllm/v1/kv_offload/{cpu,tiering}/spec.py` and
`tiering/fs/manager.py`. What each key became is said in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from undercroft.errors import ConfigError
from undercroft.settings.schema import (
    DEFAULT_CAPACITY,
    ENGINE_KEYS,
    KEYS,
    TIER_KEYS,
    TIER_OPTIONS,
    Key,
    anything,
    count,
    flag,
    locality,
    objects,
    positive,
    refuse_unknown,
    size,
    text,
)
from undercroft.settings.sizes import format_bytes

__all__ = ["FS_TYPES", "STOCK_KEYS", "STOCK_TIER_KEYS", "Written", "translate"]

FS_TYPES = {"fs": "", "fs_python": "the name fs_python is deprecated, write fs or disk; "}
"""Stock's names of its file-system tier, and what to say about each."""

_MAX_THREADS = 64
_STOCK_THREADS = 16
_REFUSED_TYPES = {
    "obj": "object stores are not served yet",
    "p2p": "it moves chunks between engines and keeps none",
    "kvcr": "it needs stock's tiering manager",
    "mori": "it needs stock's tiering manager",
}


def _stock(name: str, kind: Callable[[object, str], Any], became: str) -> tuple[str, Key]:
    return name, Key(name, kind, "as in stock vLLM", became)


STOCK_KEYS: Mapping[str, Key] = dict(
    (
        _stock("cpu_bytes_to_use", size, "`host`"),
        _stock("eviction_policy", text, "`policy`"),
        _stock("secondary_tiers", objects, "`tiers`"),
        _stock("store_threshold", count, "`admission` frequency with that many `sights`, from 2"),
        _stock("max_tracker_size", positive, "`max_tracked` of that `admission`"),
        _stock("cache_policy_module_path", text, "nothing: policies are installed plug-ins"),
        _stock("backpressure", anything, "nothing: queued writes are bounded in bytes"),
        _stock("max_load_tokens", anything, "nothing: it belongs to a request's parameters"),
        _stock("max_offload_tokens", anything, "nothing: it belongs to a request's parameters"),
    )
)
"""Stock's keys at the top, beside those that mean the same in both."""

STOCK_TIER_KEYS: Mapping[str, Key] = dict(
    (
        _stock("root_dir", text, "`path`"),
        _stock("n_read_threads", positive, "added to `num_threads`"),
        _stock("n_write_threads", positive, "added to `num_threads`"),
        _stock("enable_kv_events", flag, "`events`"),
        _stock("locality", locality, "`locality`"),
        _stock("backpressure", anything, "nothing: queued writes are bounded in bytes"),
        _stock("module_path", anything, "nothing: vLLM ignores it for its own tiers, too"),
    )
)
"""Keys of stock's `fs` tier. Ours but `path` and `num_threads` may stand beside them."""

_FS_KEYS = (
    {name: key for name, key in TIER_OPTIONS["disk"].items() if name not in ("path", "num_threads")}
    | dict(TIER_KEYS)
    | dict(STOCK_TIER_KEYS)
)


@dataclass
class Written:
    """What one source says, in our keys, and what has to be said about it.

    Args:
        values: Our keys only; the values are still as written.
        engine: Keys the engine reads itself.
        notes: One line each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(source: Mapping[str, Any], where: str) -> Written:
    """Sort one source's keys into ours and the engine's, translating stock's.

    Args:
        source: As written; not changed.
        where: Name of the source, for messages.

    Raises:
        ConfigError: A key is unknown, wrong, or says the same as another one.
    """
    refuse_unknown(source, {**KEYS, **STOCK_KEYS, **ENGINE_KEYS}, where)
    written = Written()
    for name, value in source.items():
        if name in ENGINE_KEYS:
            written.engine[name] = ENGINE_KEYS[name].kind(value, f"{name} in {where}")
        elif name in KEYS:
            written.values[name] = value
    _sizes_and_policy(source, where, written)
    _admission(source, where, written)
    _tiers(source, where, written)
    _without_effect(source, where, written)
    return written


def _sizes_and_policy(source: Mapping[str, Any], where: str, written: Written) -> None:
    if "cpu_bytes_to_use" in source:
        host = size(source["cpu_bytes_to_use"], f"cpu_bytes_to_use in {where}")
        _replace(written, "cpu_bytes_to_use", "host", host, where)
        written.notes.append(f"cpu_bytes_to_use became host = {format_bytes(host)}")
    if "eviction_policy" in source:
        policy = text(source["eviction_policy"], f"eviction_policy in {where}")
        _replace(written, "eviction_policy", "policy", policy, where)
        written.notes.append(f"eviction_policy became policy = {policy}")


def _admission(source: Mapping[str, Any], where: str, written: Written) -> None:
    sights = count(source.get("store_threshold", 0), f"store_threshold in {where}")
    tracked = positive(source.get("max_tracker_size", 64_000), f"max_tracker_size in {where}")
    if sights >= 2:  # noqa: PLR2004 - stock's own bound: below it nothing is filtered
        rule = {"type": "frequency", "sights": sights, "max_tracked": tracked}
        _replace(written, "store_threshold", "admission", rule, where)
        written.notes.append(
            f"store_threshold became admission = frequency: a chunk is stored when it is offered "
            f"the {sights}th time, with the last {tracked} chunks remembered"
        )
        return
    for name in ("store_threshold", "max_tracker_size"):
        if name in source:
            written.notes.append(
                f"{name} has no effect: without a store_threshold of 2 or more all chunks are "
                f"admitted, as in stock vLLM"
            )


def _tiers(source: Mapping[str, Any], where: str, written: Written) -> None:
    if "secondary_tiers" in source:
        tiers = objects(source["secondary_tiers"], f"secondary_tiers in {where}")
        _replace(written, "secondary_tiers", "tiers", tiers, where)
        written.notes.append(f"secondary_tiers became tiers ({len(tiers)} given)")
        label = "secondary_tiers"
    elif "tiers" in source:
        tiers = objects(source["tiers"], f"tiers in {where}")
        label = "tiers"
    else:
        return
    translated = (
        _tier(tier, f"{label}[{index}] in {where}", written.notes)
        for index, tier in enumerate(tiers)
    )
    written.values["tiers"] = [tier for tier in translated if tier is not None]


def _tier(tier: dict[str, Any], where: str, notes: list[str]) -> dict[str, Any] | None:
    """Ours for stock's `fs`, None for what keeps nothing, `tier` itself if it is ours."""
    if "type" not in tier:
        return tier
    kind = text(tier["type"], f"type of {where}")
    if kind in FS_TYPES:
        return _fs(tier, where, notes)
    if kind == "example":
        notes.append(f"{where}: the example tier keeps no bytes in stock vLLM either; left out")
        return None
    if "module_path" in tier:
        raise ConfigError(
            f"{where} names the class {kind!r} by module_path; tiers of stock vLLM's interface "
            f"cannot run here: install it as a plug-in (entry point undercroft.tiers)"
        )
    if kind in _REFUSED_TYPES:
        raise ConfigError(
            f"{where} has stock vLLM's type {kind!r}: {_REFUSED_TYPES[kind]}; use a disk tier, or "
            f"stock's TieringOffloadingSpec for this one"
        )
    return tier


def _fs(tier: dict[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    refuse_unknown(tier, _FS_KEYS, where)
    checked = {
        name: STOCK_TIER_KEYS[name].kind(value, f"{name} of {where}")
        for name, value in tier.items()
        if name in STOCK_TIER_KEYS
    }
    ours: dict[str, Any] = {k: v for k, v in tier.items() if k not in STOCK_TIER_KEYS}
    ours["type"] = "disk"
    ours.setdefault("capacity", DEFAULT_CAPACITY)
    notes.append(f"{where}: {FS_TYPES[tier['type']]}type {tier['type']} became disk")
    if "root_dir" not in checked:
        raise ConfigError(f"{where} lacks root_dir, the folder to keep chunks in")
    ours["path"] = checked["root_dir"]
    notes.append(f"{where}: root_dir became path = {ours['path']}")
    if "n_read_threads" in checked or "n_write_threads" in checked:
        threads = sum(
            checked.get(name, _STOCK_THREADS) for name in ("n_read_threads", "n_write_threads")
        )
        ours["num_threads"] = min(threads, _MAX_THREADS)
        notes.append(
            f"{where}: n_read_threads and n_write_threads became num_threads = "
            f"{ours['num_threads']}"
        )
    ours["events"] = checked.get("enable_kv_events", ours.get("events", False))
    if "enable_kv_events" in checked:
        notes.append(f"{where}: enable_kv_events became events = {str(ours['events']).lower()}")
    if "locality" in checked:
        ours["locality"] = checked["locality"]
    if "backpressure" in checked:
        notes.append(_no_effect(f"{where}: backpressure", _BACKPRESSURE))
    if "module_path" in checked:
        notes.append(_no_effect(f"{where}: module_path", "the type is built in"))
    return ours


_BACKPRESSURE = (
    "writes wait in a queue bounded by max_queued_write_bytes, and a slow tier is skipped until "
    "it answers again"
)
_NO_EFFECT = {
    "backpressure": _BACKPRESSURE,
    "cache_policy_module_path": "policies are installed plug-ins (entry point undercroft.policies)",
    "max_load_tokens": "it is read from a request's kv_transfer_params, as in stock vLLM",
    "max_offload_tokens": "it is read from a request's kv_transfer_params, as in stock vLLM",
}


def _without_effect(source: Mapping[str, Any], where: str, written: Written) -> None:
    written.notes.extend(
        _no_effect(f"{name} in {where}", why) for name, why in _NO_EFFECT.items() if name in source
    )


def _no_effect(what: str, why: str) -> str:
    return f"{what} has no effect: {why}"


def _replace(written: Written, stock: str, ours: str, value: object, where: str) -> None:
    if ours in written.values:
        raise ConfigError(f"{where} has both {stock} and {ours}; keep {ours}")
    written.values[ours] = value
